"""Compiles a spec to a plan: what all agents of a run share, and how each input becomes a job. Pure code."""
