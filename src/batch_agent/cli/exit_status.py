"""Exit statuses of the commands."""

ALL_OK, RUN_FAILED, ROWS_FAILED, OUT_OF_BUDGET, UNREACHABLE, CANCELLED = range(6)
REQUIRED = 6  # what is required of the score is not met, or rows wait for people
PILOT = 7  # the run stopped after its pilot
PART_FAILED = 70  # a part of a server fails again and again; its supervisor should start it again
SIGNALLED = 128  # plus the signal's number, as shells report it
