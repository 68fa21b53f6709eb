"""Exit statuses of the commands."""

ALL_OK, RUN_FAILED, ROWS_FAILED, OUT_OF_BUDGET, UNREACHABLE, CANCELLED = range(6)
SIGNALLED = 128  # plus the signal's number, as shells report it
