"""One loopback address that speaks the wires agent frameworks speak; what it is asked counts as a row's model calls."""
