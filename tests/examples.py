"""How many examples property tests take: all in ``make soak``, which searches, and half of them in ``make test``."""

import os

SEARCHES = "BATCH_AGENT_TEST_RANDOM" in os.environ


def examples(most: int) -> int:
    return most if SEARCHES else most // 2
