"""Parses a model's text to a value of the user's schema. Pure code."""
