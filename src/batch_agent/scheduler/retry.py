"""Computes the delay before a retry. The type of the error decides whether to retry."""

from __future__ import annotations

FIRST = 0.5  # seconds; doubles with each failure
LONGEST = 60.0
LONGEST_RETRY_AFTER = 3600.0  # if a server asks for more, the request fails, and a later run may retry it


def retry_delay(failures: int, retry_after: float | None, chance: float) -> float:
    """Return the delay in seconds, with full jitter: a uniform part (``chance``, 0 to 1) of an exponentially growing
    span. So requests that failed together do not return together. The server's Retry-After is the minimum."""
    span = min(LONGEST, FIRST * 2.0 ** min(failures - 1, 30))
    return max(retry_after or 0.0, 0.0) + span * chance
