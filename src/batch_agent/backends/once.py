"""Interface for work that several workers of a run need and only one does: tool calls and model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Found:
    """The result of work that another worker did."""

    text: str
    ok: bool


class Once(Protocol):
    async def begin(self, key: str) -> Found | str:
        """Return the result of another worker, after waiting for it, or a token. With a token, the caller must do the
        work and call ``end``."""
        ...

    def end(self, key: str, token: str, found: Found | None, keep: float) -> None:
        """Report that the work has ended. ``found`` is None if it failed, or if other workers may not use the result.
        The result is kept for ``keep`` seconds. With 0 only the workers that wait for it now get it."""
        ...
