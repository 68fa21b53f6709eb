"""A loopback server with the wires of agent frameworks. Requests to it count as a row's model calls."""
