"""How long to wait before a request is sent again. Whether it is sent again is a property of its error's type."""

from __future__ import annotations

FIRST = 0.5  # seconds; doubles with each failure
LONGEST = 60.0
LONGEST_RETRY_AFTER = 3600.0  # a server that asks for more has said no: the request fails, and a later run may try


def retry_delay(failures: int, retry_after: float | None, chance: float) -> float:
    """Full jitter: a uniform share (``chance``, 0 to 1) of an exponentially growing span, so that siblings which failed
    together do not come back together. The server's own Retry-After is the least we wait."""
    span = min(LONGEST, FIRST * 2.0 ** min(failures - 1, 30))
    return max(retry_after or 0.0, 0.0) + span * chance
