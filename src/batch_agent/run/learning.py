"""A threshold between two models that a run learns: the rows of the audit go first, and to both models.

``AuditFirst`` is in the process that feeds the run. It hands out the rows of the audit, waits for their ends, and
records both answers, which gives the threshold (``record.learned``). The other rows follow then. ``LearnedThreshold``
is in every process that works on rows. It reads what is decided from the facts of the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import cast

from pydantic import JsonValue

from batch_agent.blocking import in_thread
from batch_agent.compiler.schema import OutputSchema
from batch_agent.files.inputs import rows_again
from batch_agent.files.results import from_json, plainly, to_json
from batch_agent.job import AgentResult, Placed, is_interrupted
from batch_agent.messages import JsonObject
from batch_agent.record.doubts import input_digest
from batch_agent.record.learned import LearnedPromise
from batch_agent.record.people import PeopleReview
from batch_agent.run.pilot import named
from batch_agent.trust.escalate import failed_by_content
from batch_agent.trust.order import KeyedOrder
from batch_agent.trust.review import AUDIT, Event

logger = logging.getLogger("batch_agent")
LEARNED = "learned"  # the fact of a run that learns a threshold
UNTOLD: JsonObject = {"key": "", "last": "", "decided": False, "threshold": None}  # until the feeder has read its log
LOOK, LOOKS = 0.1, 100  # seconds between two looks for what the feeder says, and their number


class LearnedThreshold:
    """Decides in one process which answers of the first model stay. ``facts`` returns the facts of the run."""

    def __init__(self, facts: Callable[[], Awaitable[JsonObject | None]]) -> None:
        self._facts = facts
        self._order: KeyedOrder | None = None
        self._last = b""  # the rank of the last row of the audit
        self._known: JsonObject | None = None
        self._learns: bool | None = None

    async def decide(self, name: str, doubt: float | None) -> bool | None:
        """Return whether a row goes to the last model; None if that is not decided yet."""
        if self._learns is None:
            await self._begin()
        if self._order is None:
            return False
        if self._order.rank(name) <= self._last:
            return True
        if not self._is_decided:
            await self._read()  # the other rows are fed after it was written
        if not self._is_decided:
            return None
        known = cast(JsonObject, self._known)
        if doubt is None:
            return True
        threshold = known.get("threshold")
        return threshold is not None and doubt > cast(float, threshold)

    @property
    def _is_decided(self) -> bool:
        return self._known is not None and self._known.get("decided") is True

    async def _begin(self) -> None:
        """Read which rows the audit has. A row of an earlier session may arrive here before the feeder has recorded
        that."""
        for _ in range(LOOKS):
            await self._read()
            if not self._learns or self._last:
                return
            self._learns = None
            await asyncio.sleep(LOOK)

    async def _read(self) -> None:
        known = (await self._facts() or {}).get(LEARNED)
        self._learns = isinstance(known, dict)
        if isinstance(known, dict):
            self._known = known
            self._order = KeyedOrder(str(known["key"]))
            self._last = bytes.fromhex(str(known["last"]))


class AuditFirst:
    """The audit of a run that this process feeds. ``names`` are those of the models. ``tell`` records facts of the run,
    and returns when others can read them."""

    def __init__(
        self,
        run: str,
        names: Sequence[str],
        schema: OutputSchema[object] | None,
        tell: Callable[[JsonObject], Awaitable[None]],
    ) -> None:
        self._run = run
        self._names = names
        self._schema = schema
        self._tell = tell
        self.rows: list[int] = []  # that go first, in their order
        self._key = self._last = ""
        self._answers: dict[int, Event] = {}
        self._open: set[int] = set()  # rows that a model could not be asked about in this session
        self._wanted: frozenset[int] = frozenset()
        self._all = asyncio.Event()
        self.decided = False

    async def begin(self) -> None:
        """Read what earlier sessions have decided, and record it for all workers."""
        await self._tell({LEARNED: await in_thread(self._begin)})

    def _begin(self) -> JsonObject:
        with PeopleReview.open(self._run) as review:
            promise = cast(LearnedPromise, review.promise)
            self.rows, self._key = promise.head, promise.known.key
            names = dict(promise.head_names())
            order = KeyedOrder(self._key)
            self._last = order.rank(names[self.rows[-1]]).hex() if self.rows else ""
            self._wanted = frozenset(self.rows)
            self.decided = promise.is_complete
            return self._facts(promise)

    def _facts(self, promise: LearnedPromise) -> JsonObject:
        threshold = promise.threshold if self.decided else None
        return {"key": self._key, "last": self._last, "decided": self.decided, "threshold": threshold}

    def lead(self, inputs: Iterable[object], id_column: str | None) -> Iterator[Placed]:
        """Return the rows of the audit, in its order. Reads all inputs."""
        found = {
            row.index: row for row in named(rows_again(inputs), id_column, warns=True) if row.index in self._wanted
        }
        return iter([found[index] for index in self.rows if index in found])

    def others(self, inputs: Iterable[object], id_column: str | None) -> Iterator[Placed]:
        return (row for row in named(inputs, id_column, warns=False) if row.index not in self._wanted)

    def took(self, result: AgentResult[object]) -> None:
        """Note the result of a row."""
        index = result.index
        if index not in self._wanted or self.decided or is_interrupted(result):
            return
        plain = plainly(result, self._schema)
        self._answers[index] = self._event(plain)
        outside = plain.error is not None and not failed_by_content(plain.error)
        (self._open.add if outside or plain.waits_for is not None else self._open.discard)(index)
        if len(self._answers) == len(self._wanted):
            self._all.set()

    def _event(self, result: AgentResult[object]) -> Event:
        """Return the event with both answers of a row."""
        answered = result.ok and result.answered_by == self._names[-1]
        own = next((each for each in result.earlier if each.name == self._names[0]), None)
        first = result if own is None else own
        ok, doubt = (result.ok, result.doubt) if own is None else (own.error is None, own.doubt)
        answers: JsonObject = {
            "ok": ok,
            "output": _as_json(first.output) if ok else None,
            "doubt": doubt if ok else None,
            "answered": answered,
            "right": _as_json(result.output) if answered else None,
        }
        name, digest = result.job_id, input_digest(result.input)
        return Event(0, "frozen", row=result.index, id=name, queue=AUDIT, input=digest, output=answers)

    async def wait(self) -> None:
        """Wait until all rows of the audit have ended, and decide."""
        if not self._wanted or self.decided:
            return
        await self._all.wait()
        facts = await in_thread(self._decide)
        if facts["decided"]:
            await self._tell({LEARNED: facts})
            return
        logger.warning(
            "promise: %d of %d rows of the audit have no answer of both models, so no threshold is learned: the other "
            "rows keep their answers of %s, and wait for %s until a resume completes the audit",
            *(len(self._open), len(self._wanted), self._names[0], self._names[-1]),
        )

    def _decide(self) -> JsonObject:
        with PeopleReview.open(self._run) as review:
            promise = cast(LearnedPromise, review.promise)
            promise.record(self._answers, unanswered=bool(self._open))
            self.decided = promise.is_complete
            return self._facts(promise)


def _as_json(output: object) -> JsonValue:
    return cast(JsonValue, from_json(to_json(output)))
