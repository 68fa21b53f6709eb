"""Events outward: counts, the terminal, the summary of a run."""
