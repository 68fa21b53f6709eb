"""A run: its inputs, its agents and its end."""
