"""What the workers of a run share, in the memory of the driver: ``LentStore`` for a cluster without Redis.

The table must survive the driver, because it holds the budget: ``write`` receives its JSON before a worker gets its
shares. Calls and files need not, because no worker outlives the driver.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Condition
from typing import TypeVar

from batch_agent.messages import JsonObject
from batch_agent.record.lent import LARGEST_SHARED, UNKEPT_SECONDS, SharedCall
from batch_agent.scheduler.lending import Allotment, Claim, Learnt, Steering, Table, steered

T = TypeVar("T")

MOST_ENDED = 1000  # number of the latest ended calls that waiting workers can still find


@dataclass(frozen=True, slots=True)
class _Shared:
    """A call that ``worker`` runs, or whose result is kept until ``until``."""

    worker: str
    token: str
    text: str | None = None  # None: it is running
    ok: bool = True
    kept: bool = False  # for all workers; else only for those that waited
    until: float = 0.0


class LocalLent:
    """``table`` is the JSON that ``write`` last received, {} at first. ``clock`` returns the time of day, so that the
    next driver can continue with it."""

    def __init__(
        self, table: JsonObject, write: Callable[[JsonObject], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._table, self._write, self._clock = Table.from_json(table), write, clock
        self._changed = Condition()
        self._calls: dict[str, _Shared] = {}
        self._kept: deque[tuple[float, str]] = deque()  # end of keeping, key; replaced results are skipped
        self._ended: deque[tuple[int, str]] = deque(maxlen=MOST_ENDED)
        self._position = 0
        self._files: dict[str, str] = {}

    # The table

    def beat(
        self,
        worker: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        # The table keeps the membership longer than the worker expects, so the worker stops using its shares first.
        return self._change(lambda now: self._table.beat(worker, now, 1.2 * seconds, claims, learnt, status))

    def leave(self, worker: str) -> None:
        self._change(lambda now: self._table.leave(worker, now))

    def table(self) -> tuple[Table, float]:
        with self._changed:
            return Table.from_json(self._table.to_json()), self._clock()

    def steer(self, request: JsonObject) -> Steering:
        def change(_: float) -> Steering:
            self._table.steering = steered(self._table.steering, request)
            return self._table.steering

        return self._change(change)

    def _change(self, change: Callable[[float], T]) -> T:
        with self._changed:
            answer = change(self._clock())
            self._write(self._table.to_json())
            return answer

    # Calls

    def begin_call(self, worker: str, key: str, token: str, seen: str) -> SharedCall:
        with self._changed:
            now = self._clock()
            self._forget(now)
            call = self._calls.get(key)
            if call is not None and call.text is not None and (call.kept or call.token == seen):
                return SharedCall("done", call.token, str(self._position), call.text, call.ok)
            if (
                call is not None
                and call.text is None
                and call.worker != worker
                and call.worker in self._table.live(now)
            ):
                return SharedCall("theirs", call.token, str(self._position))
            self._calls[key] = _Shared(worker, token)
            return SharedCall("mine", token, str(self._position))

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        with self._changed:
            call = self._calls.get(key)
            if call is None or call.token != token:
                return
            if text is None or len(text) > LARGEST_SHARED:
                del self._calls[key]
            else:
                until = self._clock() + (keep or UNKEPT_SECONDS)
                self._calls[key] = replace(call, text=text, ok=ok, kept=keep > 0, until=until)
                self._kept.append((until, key))
            self._position += 1
            self._ended.append((self._position, key))
            self._changed.notify_all()

    def _forget(self, now: float) -> None:
        """Drop expired results. A result behind one with a longer time is dropped a little later."""
        while self._kept and self._kept[0][0] <= now:
            until, key = self._kept.popleft()
            call = self._calls.get(key)
            if call is not None and call.text is not None and call.until <= until:
                del self._calls[key]

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        with self._changed:
            self._changed.wait_for(lambda: self._position > int(position.partition("-")[0]), seconds)
            after = int(position.partition("-")[0])
            return str(self._position), {key for number, key in self._ended if number > after}

    # Files

    def put_file(self, name: str, text: str) -> None:
        with self._changed:
            self._files[name] = text

    def get_file(self, name: str) -> str | None:
        with self._changed:
            return self._files.get(name)

    def followed_rows(self) -> list[str]:
        return []  # viewers of a run directory ask its process

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        """Does nothing, for the same reason."""
