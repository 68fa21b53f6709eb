"""The finished rows of a run, as far as a promise needs them: their doubts, and the places of their records."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import cast

from batch_agent.files.results import to_json
from batch_agent.files.tables import Record
from batch_agent.record.reader import RowLines, RunReader
from batch_agent.trust.escalate import OUTSIDE
from batch_agent.trust.promise import band

# In place of a doubt: no result yet; no answer, or one without a doubt; the last model was asked.
UNFINISHED = math.nan
NEVER = 2.0
SETTLED = -2.0


def input_digest(value: object) -> str:
    """Return the digest of a row's input."""
    return blake2b(to_json(value), digest_size=8).hexdigest()


class FinishedDoubts:
    """The finished rows of a run, with their doubts. Digests of their inputs are read only when they are needed."""

    def __init__(self, run: RunReader, *, doubt: bool, last: str = "") -> None:
        """``last`` has the meaning that it has in ``doubt_of``."""
        self._run = run
        self._doubt = doubt
        self._last = last
        self._lines: RowLines | None = None
        self.version = 0  # it changes when rows come
        self._bands: tuple[object, list[int]] | None = None
        self._forget()

    def _forget(self) -> None:
        self.doubts = array("d")
        self.places = array("q")
        self.done = self.ok = 0
        self._digests: dict[int, str] = {}
        self._digested: dict[int, int] = {}  # row → place of the line that was read for it
        self.version += 1

    def catch_up(self) -> None:
        if self._lines is None or self._lines.replaced():
            self.close()
            self._lines = self._run.lines()
            self._lines.replaced()
            self._forget()
        while page := self._lines.block():
            self.version += 1
            for place, record in page:
                self._add(place, record)

    def _add(self, place: int, record: Record) -> None:
        index = cast(int, record["index"])
        if (more := index + 1 - len(self.places)) > 0:
            self.doubts.extend(repeat(UNFINISHED, more))
            self.places.extend(repeat(-1, more))
        before = self.doubts[index]
        self.done += self.places[index] < 0
        self.ok += bool(record.get("ok")) - (self.places[index] >= 0 and before < NEVER)
        self.places[index], self.doubts[index] = place, doubt_of(record, doubt=self._doubt, last=self._last)

    def bands(self, thresholds: Sequence[float]) -> list[int]:
        """Return the number of finished rows in each band."""
        known = self.version, tuple(thresholds)
        if self._bands is None or self._bands[0] != known:
            self._bands = known, self._count_bands(thresholds)
        return [*self._bands[1]]

    def _count_bands(self, thresholds: Sequence[float]) -> list[int]:
        found = [0] * (len(thresholds) + 1)
        for doubt in self.doubts:
            if doubt == doubt:  # finished
                found[band(thresholds, doubt)] += 1
        return found

    def doubt(self, index: int) -> float:
        return self.doubts[index]

    def digests(self, indexes: Collection[int]) -> Mapping[int, str]:
        """Return the digests of the inputs of those of these rows that are finished. A judgement of another input does
        not count."""
        new = [index for index in indexes if self.is_done(index) and self.places[index] != self._digested.get(index)]
        for index, record in zip(new, self.records(new), strict=True):
            if record is not None:
                self._digests[index] = input_digest(record.get("input"))
                self._digested[index] = self.places[index]
        return self._digests

    def records(self, indexes: Sequence[int]) -> list[Record | None]:
        assert self._lines is not None, "the rows were read"
        known = [index for index in indexes if self.is_done(index)]
        found = dict(zip(known, self._lines.read([self.places[index] for index in known]), strict=True))
        return [found.get(index) for index in indexes]

    def is_done(self, index: int) -> bool:
        return 0 <= index < len(self.places) and self.places[index] >= 0

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def doubt_of(record: Record, *, doubt: bool, last: str = "") -> float:
    """Return the doubt that decides whether a finished row is sent on; ``NEVER`` if the row is always sent on.
    ``doubt``: the answers of the run have doubts. ``last`` is the model to which rows are sent, "" if they are sent to
    people. A row that has the answer of ``last``, or failed because of its content, gets ``SETTLED``."""
    if last and _is_settled(record, last):
        return SETTLED
    if not record.get("ok"):
        return NEVER
    known = record.get("doubt")
    if isinstance(known, int | float) and not isinstance(known, bool):
        return float(known)
    return NEVER if doubt else 0.0


def _is_settled(record: Record, last: str) -> bool:
    """Return whether the result of a row is final: the last model has answered it, or it failed because of its
    content."""
    if record.get("waits_for") is not None:
        return False
    error = record.get("error")
    if not record.get("ok"):  # one that failed at the first model by its content was sent on, if it could be asked
        return isinstance(error, dict) and error.get("type") not in OUTSIDE
    earlier = record.get("earlier")
    named = [each.get("name") for each in earlier if isinstance(each, dict)] if isinstance(earlier, list) else []
    return last in (record.get("answered_by"), *named)
