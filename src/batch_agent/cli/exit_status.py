"""What the exit status of a command says."""

ALL_OK, RUN_FAILED, ROWS_FAILED, OUT_OF_BUDGET, UNREACHABLE = range(5)
SIGNALLED = 128  # plus the signal's number, as shells say it
