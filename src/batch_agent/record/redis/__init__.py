"""A run stored in Redis."""
