"""Who of several workers gets how much of slots, rate limits and budget."""
