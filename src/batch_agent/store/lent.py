"""The seam to what the workers of a run share beside its rows: shares, tool results, model answers, files.

``RunStore`` (``store/shared.py``) has the rows. As there, every call blocks, is atomic and may come from any thread;
time is the store's alone. What is divided and how is decided by ``scheduler.lending``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from batch_agent.messages import JsonObject
from batch_agent.scheduler.lending import Allotment, Claim, Learnt, Steering, Table

LARGEST_SHARED = 4 * 1024 * 1024  # bytes of a result that is shared
UNKEPT_SECONDS = 10.0  # for which those who waited find a result that is not kept


@dataclass(frozen=True, slots=True)
class SharedCall:
    """What is known of a call when a worker asks for it. ``mine``: the worker is to run it and to report its end;
    ``theirs``: another worker runs it, under ``token``; ``done``: ``text`` is its result. ``position`` is where to read
    on among the calls that end."""

    state: Literal["mine", "theirs", "done"]
    token: str
    position: str
    text: str = ""
    ok: bool = True


class LentStore(Protocol):
    """Where the workers of one run keep what they share. ``worker`` is a worker's name, which no other has."""

    def beat(
        self,
        worker: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        """Report to the table, and hold what it grants. The membership ends ``seconds`` after the call."""
        ...

    def leave(self, worker: str) -> None:
        """End the membership. What is not spent of the budget is returned."""
        ...

    def table(self) -> tuple[Table, float]:
        """The table as it is, and the store's time."""
        ...

    def steer(self, request: JsonObject) -> Steering:
        """Ask all workers to do something (``scheduler.lending.steered``). Raises SpecError for a wrong request."""
        ...

    def begin_call(self, worker: str, key: str, token: str, seen: str) -> SharedCall:
        """Run a call, or learn who does. A call whose worker is dead is free. ``token`` is new; ``seen`` is the token
        of a run that the worker waited for, whose result is then good even if it is not kept."""
        ...

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        """The call has ended with that text; None: it did not run, and is free. The text is kept for ``keep`` seconds,
        0: for those who wait. Nothing happens if another worker took the call over."""
        ...

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        """Keys of calls that ended after that position, and the next position; waits for the first that long."""
        ...

    def put_file(self, name: str, text: str) -> None:
        """Keep a small file, such as a hostfile, for workers on other machines."""
        ...

    def get_file(self, name: str) -> str | None:
        """The text of a file; None if there is none of that name."""
        ...
