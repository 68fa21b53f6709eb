"""Decides the order of requests, the concurrency and the delays. Pure code: no await, no clock, no I/O."""
