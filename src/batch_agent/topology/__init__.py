"""Runs made of runs: pipelines, and what is written with them."""
