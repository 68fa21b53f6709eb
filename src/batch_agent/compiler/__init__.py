"""Spec → plan: what all agents of a run share, and what each input becomes. Pure code."""
