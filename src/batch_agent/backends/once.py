"""Identical work of several workers, done once: the seam for tool calls and model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Found:
    """What another worker's run of the work came to."""

    text: str
    ok: bool


class Once(Protocol):
    async def begin(self, key: str) -> Found | str:
        """The result of another worker, waited for while it is at work. Or a token: the caller is to do the work, and
        ``end`` must follow."""
        ...

    def end(self, key: str, token: str, found: Found | None, keep: float) -> None:
        """The work has ended; None: it was not done, or nobody else may use it. It is kept for ``keep`` seconds, 0: for
        those who wait for it."""
        ...
