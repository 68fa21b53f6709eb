"""Exit statuses of the commands."""

ALL_OK, RUN_FAILED, ROWS_FAILED, OUT_OF_BUDGET, UNREACHABLE = range(5)
SIGNALLED = 128  # plus the signal's number, as shells report it
