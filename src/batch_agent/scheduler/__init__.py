"""Who goes next, how many at once, how long to wait: pure code, no await, no clock, no I/O."""
