"""What a user would pick instead of this package, on the same work, server and machine. ``make bench-peers``."""
