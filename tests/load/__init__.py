"""Whole runs against servers with limits and faults of load, on a virtual clock: wall time over the ideal, and requests
over needed."""
