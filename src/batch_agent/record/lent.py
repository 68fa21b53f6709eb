"""Protocol for what the workers of a run share besides its rows: shares of limits, tool results, model answers, files.

``RunStore`` (``record/shared.py``) has the rows. As there, every call blocks, is atomic and may come from any thread.
All times are by the store's clock. ``scheduler.lending`` decides how limits are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from batch_agent.messages import JsonObject
from batch_agent.scheduler.lending import Allotment, Claim, Learnt, Steering, Table

LARGEST_SHARED = 4 * 1024 * 1024  # bytes of the largest result that is shared
UNKEPT_SECONDS = 10.0  # seconds that a result which is not cached stays available to the workers that waited for it


@dataclass(frozen=True, slots=True)
class SharedCall:
    """State of a call when a worker asks for it. ``mine``: this worker runs it and reports its end. ``theirs``: another
    worker runs it, under ``token``. ``done``: ``text`` is its result. ``position`` is where to continue reading the
    stream of ended calls."""

    state: Literal["mine", "theirs", "done"]
    token: str
    position: str
    text: str = ""
    ok: bool = True


class LentStore(Protocol):
    """Storage of what the workers of one run share. ``worker`` is the unique name of a worker."""

    def beat(
        self,
        worker: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        """Report to the table, and return what it grants. The membership ends ``seconds`` after the call."""
        ...

    def leave(self, worker: str) -> None:
        """End the membership. The unspent part of the worker's budget is returned."""
        ...

    def table(self) -> tuple[Table, float]:
        """Return a copy of the table, and the store's time."""
        ...

    def steer(self, request: JsonObject) -> Steering:
        """Send a request to all workers (``scheduler.lending.steered``). Raises SpecError for an invalid request."""
        ...

    def begin_call(self, worker: str, key: str, token: str, seen: str) -> SharedCall:
        """Start a call, or return its state if another worker runs it or it has ended. A call whose worker is dead can
        be started again. ``token`` is new. ``seen`` is the token of a run that the worker waited for: its result is
        accepted even if it is not cached."""
        ...

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        """Record the end of a call. ``text`` None means that it did not run and can be started again. The text is kept
        for ``keep`` seconds; 0 keeps it only for the workers that wait. Does nothing if another worker took the call
        over."""
        ...

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        """Return the next position, and the keys of calls that ended after ``position``. Waits up to ``seconds`` for
        the first."""
        ...

    def put_file(self, name: str, text: str) -> None:
        """Store a small file, such as a hostfile, for workers on other machines."""
        ...

    def get_file(self, name: str) -> str | None:
        """Return the text of a file, or None if there is none of that name."""
        ...

    def followed_rows(self) -> list[str]:
        """Return the rows that viewers follow now: the index, in a pipeline ``STAGE/INDEX``."""
        ...

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        """Store the conversations of running rows for viewers. They are kept for a few seconds."""
        ...
