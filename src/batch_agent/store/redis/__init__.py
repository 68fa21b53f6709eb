"""A run kept in Redis."""
