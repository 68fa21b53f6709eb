"""Outputs made from events: statistics, the terminal, the summary of a run, metrics and traces."""
