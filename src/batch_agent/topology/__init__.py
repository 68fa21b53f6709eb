"""Runs made of runs: pipelines and reductions."""
