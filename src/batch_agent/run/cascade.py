"""A row of a cascade: entries that are asked one after the other, until an answer stays.

Each entry is an agent, or several samples, with a conversation and a record of its own, under a key that is derived
from that of the row. The first entry has the key of the row. The worker starts the entries; this module decides which
answer stays, and keeps the entries of a run ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.agent.agent import Agent, InnerWorker
from batch_agent.agent.cascade import Cascade, Entry
from batch_agent.agent.dialogue import Resources
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.agent.prepare import Prepared, choose_model, learn_context, with_model
from batch_agent.agent.user_worker import UserWorker
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import outlast
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.errors import BackendError, JobError, Oversized, RunUnreachable, WorkerFailed
from batch_agent.files.results import from_json, plainly, to_json
from batch_agent.foreign import describe, traceback_of
from batch_agent.job import AgentResult, Earlier, Job, Placed, is_interrupted
from batch_agent.messages import JsonObject
from batch_agent.observe.entry_counts import EntryCounts
from batch_agent.observe.metrics import Metrics
from batch_agent.observe.text import rows
from batch_agent.record.keys import asked_of, derived, entry_mark
from batch_agent.record.replay import Call
from batch_agent.record.steps import Past
from batch_agent.record.store import Identity
from batch_agent.run.learning import LearnedThreshold
from batch_agent.run.parts import Several
from batch_agent.run.rows import compile_all
from batch_agent.run.samples import Samples, samples_of
from batch_agent.trust.escalate import failed_by_content
from batch_agent.trust.votes import Voting

logger = logging.getLogger("batch_agent")
MOST_WAITING = 4096  # rows that wait for later entries before no new row starts: each takes about 10 KiB
FIRST_LOOK = 5.0  # seconds for the first request to a server for the name of its model


@dataclass(slots=True, eq=False)
class EntryDesk:
    """What the agents of one entry work with. ``voting``: how the samples of a row vote, if each row has several.
    ``asks_first``: an agent begins with a model request."""

    resources: Resources
    function: InnerWorker | UserWorker
    asks_first: bool
    voting: Voting | None


OpenDesk: TypeAlias = Callable[[Prepared, Dispatcher], AbstractAsyncContextManager[EntryDesk]]


def entry_identity(row: Identity, label: str, prepared: Prepared) -> Identity:
    """Return the identity of a row at an entry after the first. It does not depend on the id of the row."""
    key = derived(asked_of(row.key), entry_mark(label, fingerprint_of(prepared)))
    return Identity(key, derived(row.row, entry_mark(label, b"")))


def further_identities(row: Identity, prepared: Prepared) -> list[Identity]:
    """Return the identities of all agents of a row except its first: of samples, and of entries of a cascade."""
    found = samples_of(row, prepared.spec.samples)[1:]
    for entry in () if prepared.cascade is None else prepared.cascade.later:
        found += samples_of(entry_identity(row, entry.label, entry.prepared), entry.prepared.spec.samples)
    return found


class LaterEntry:
    """An entry after the first, in one process. If its model is known, it is opened at once, else when a row needs
    it."""

    def __init__(self, entry: Entry, name: str, dispatcher: Dispatcher) -> None:
        self.entry = entry
        self.name = name
        self.dispatcher = dispatcher
        self.prepared = entry.prepared
        self._desk: asyncio.Future[EntryDesk | None] = asyncio.get_running_loop().create_future()
        self._wanted = asyncio.Event()

    async def desk(self) -> EntryDesk | None:
        """Return what the agents of this entry work with; None if its server does not answer."""
        self._wanted.set()
        return await asyncio.shield(self._desk)

    @property
    def is_patient(self) -> bool:
        """Whether answers take hours."""
        return self.prepared.backend.capabilities.patient

    @property
    def is_down(self) -> bool:
        return not any(endpoint.is_working for endpoint in self.dispatcher.scheduler.endpoints)

    def identities(self, row: Identity) -> list[Identity]:
        """Return the identities of a row at this entry; [] while the model is unknown, because it then has answered
        nothing."""
        if self.prepared.model is None:
            return []
        return samples_of(entry_identity(row, self.entry.label, self.prepared), self.prepared.spec.samples)

    async def serve(self, open_desk: OpenDesk) -> None:
        """Open the entry, and keep it open until this is cancelled."""
        while True:
            if self.prepared.model is None:
                await self._wanted.wait()
            try:
                self.prepared = await learn_context(await choose_model(self.prepared))
            except (RunUnreachable, BackendError) as error:
                logger.warning("cascade: %s does not answer: its rows keep their earlier answers: %s", self.name, error)
                waiting = self._desk
                self._desk = asyncio.get_running_loop().create_future()
                self._wanted.clear()
                waiting.set_result(None)
                continue
            async with open_desk(self.prepared, self.dispatcher) as desk:
                self._desk.set_result(desk)
                await asyncio.get_running_loop().create_future()


async def look_for_models(prepared: Prepared) -> Prepared:
    """Return the run with the models of its later entries, as far as their servers answer now. Raises RunRejected."""
    cascade = prepared.cascade
    assert cascade is not None

    async def look(entry: Entry) -> Entry:
        if entry.prepared.model is not None:
            return entry
        try:
            async with asyncio.timeout(FIRST_LOOK):
                return replace(entry, prepared=await choose_model(entry.prepared))
        except (TimeoutError, RunUnreachable, BackendError):
            logger.warning("cascade: %s does not answer yet; it is asked again when a row needs it", entry.named(None))
            return entry

    later = await asyncio.gather(*map(look, cascade.later))
    return replace(prepared, cascade=replace(cascade, later=tuple(later)))


def cascade_facts(prepared: Prepared) -> JsonObject:
    """Return the description of a run's cascade for its record."""
    cascade = prepared.cascade
    assert cascade is not None
    labels = [cascade.label, *(entry.label for entry in cascade.later)]
    models = [prepared, *(entry.prepared for entry in cascade.later)]
    entries: list[JsonValue] = [
        {
            "name": name,
            "label": label,
            "model": each.model,
            "backend": each.backend.name,
            "fingerprint": None if each.model is None else fingerprint_of(each).hex(),
        }
        for name, label, each in zip(cascade.names(prepared), labels, models, strict=True)
    ]
    return {"entries": entries, "people": cascade.people, "escalate": cascade.rule.text}


def with_recorded_models(prepared: Prepared, facts: JsonObject) -> Prepared:
    """Return a resumed run with the models that its record has for entries that name none."""
    known: Any = facts.get("cascade")
    if prepared.cascade is None or not isinstance(known, dict):
        return prepared
    models = {each.get("label"): each.get("model") for each in known.get("entries", ())}

    def named(entry: Entry) -> Entry:
        model = models.get(entry.label)
        if entry.prepared.model is not None or not isinstance(model, str):
            return entry
        return replace(entry, prepared=with_model(entry.prepared, model))

    return replace(prepared, cascade=replace(prepared.cascade, later=tuple(map(named, prepared.cascade.later))))


def edited_entries(prepared: Prepared, facts: JsonObject) -> dict[str, bool]:
    """Return the names of the recorded later entries that ask something else now. The value says whether the entry
    still exists, so that its answers could be kept."""
    known: Any = facts.get("cascade")
    if not isinstance(known, dict):
        return {}
    later = () if prepared.cascade is None else prepared.cascade.later
    now = {each.label: None if each.prepared.model is None else fingerprint_of(each.prepared).hex() for each in later}
    return {
        str(each["name"]): each["label"] in now
        for each in known["entries"][1:]
        if each["fingerprint"] is not None and now.get(each["label"]) != each["fingerprint"]
    }


class Ladder:
    """The entries of a run in one process. ``names`` are those of all models, the first included."""

    def __init__(
        self,
        prepared: Prepared,
        dispatchers: Mapping[str, Dispatcher],
        metrics: Metrics,
        facts: Callable[[], Awaitable[JsonObject | None]],
    ) -> None:
        """``facts`` returns the facts of the run, which may learn a threshold in addition to its rule."""
        assert prepared.cascade is not None
        self.learned = LearnedThreshold(facts)
        self.cascade: Cascade = prepared.cascade
        self.schema: OutputSchema[object] | None = prepared.schema
        self.names = self.cascade.names(prepared)
        self.retries_for_people = prepared.spec.given("retry_failed")  # else people have the rows that failed
        self._counts = metrics.entries = EntryCounts(self.names)
        self._waiting = 0  # rows at later entries
        self._room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.later = [
            LaterEntry(entry, name, dispatchers[entry.prepared.backend.name])
            for entry, name in zip(self.cascade.later, self.names[1:], strict=True)
        ]

    @asynccontextmanager
    async def opened(self, open_desk: OpenDesk) -> AsyncIterator[None]:
        """Keep the later entries ready."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(entry.serve(open_desk), name="batch-agent entry") for entry in self.later]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                await outlast(task)

    def enter(self, place: int) -> bool:
        """Count a row at a later entry. Returns False if the row cannot wait there, because the entry is down and many
        rows wait already."""
        entry = self.later[place - 1]
        if entry.is_patient:  # its rows are sent together
            return True
        if self._is_full and entry.is_down:
            return False
        self._waiting += 1
        return True

    def leave(self, place: int) -> None:
        """Record that a row has ended at a later entry."""
        if not self.later[place - 1].is_patient:
            self._waiting -= 1
            self.wake()

    @property
    def _is_full(self) -> bool:
        return self._waiting >= MOST_WAITING

    async def wait_room(self, is_over: Callable[[], bool]) -> None:
        """Wait until a new row may start: rows that wait for a slow entry must not fill the memory. An entry that is
        down stops no row."""
        while self._is_full and not is_over() and not any(entry.is_down for entry in self.later):
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def wake(self) -> None:
        """Check again whether a row may start."""
        if not self._room.done():
            self._room.set_result(None)

    async def fitting(self, made: Job | AgentResult[object]) -> Job | None:
        """Return the job of a row; None for a row that no entry can be asked about. ``made`` is the job, or the reason
        why it could not be made: a later model may have a larger context than the first."""
        if isinstance(made, Job) or made.error is None or made.error.type != Oversized.type:
            return made if isinstance(made, Job) else None
        for entry in self.later:
            value = Placed(made.index, made.input, made.job_id)
            [job] = await compile_all(entry.prepared.plan, made.index, [value])
            if isinstance(job, Job):
                return job
        return None

    @property
    def unasked(self) -> str:
        """Text that says which rows wait for a model that did not answer, and why it did not; "" if there are none."""
        if (away := self._counts.count().away) is None:
            return ""
        name, count = away
        over = next((each.dispatcher.over for each in self.later if each.name == name), None)
        why = over[1] if over else "it did not answer"
        return f"{rows(count)} {'waits' if count == 1 else 'wait'} for {name}: {why}"

    def is_over(self, place: int) -> bool:
        """Return whether a later entry cannot answer any more in this session."""
        return self.later[place - 1].dispatcher.over is not None


class CascadeRow(Several):
    """A row of a cascade. ``own`` is the identity of the row, and ``samples`` the number of samples of its first entry.
    ``wrote``: calls of its agents that may have written. ``pasts``: what earlier sessions recorded, by the place of the
    entry. ``waits_for``: the model or the people that the row still needs, if no entry can answer it now."""

    def __init__(self, job: Job, ladder: Ladder, own: Identity, samples: int) -> None:
        super().__init__(job)
        self.ladder = ladder
        self._own, self._samples = own, samples
        self.asking: Agent | Samples | None = None
        self.wrote: list[Call] = []
        self.pasts: dict[int, list[Past | None]] = {}
        self.waits_for: str | None = None
        self._asked: list[AgentResult[object]] = []  # the results of the entries, by their places
        self._outputs: list[JsonValue] = []  # the same as plain JSON
        self._at = 0  # the place of the later entry where the row waits

    @property
    def works(self) -> bool:
        return self.asking is not None and self.asking.works

    @property
    def place(self) -> int:
        """The place of the entry that is being asked, or is asked next."""
        return len(self._asked)

    def identities(self, place: int) -> list[Identity]:
        """Return the identities of the agents of the row at an entry."""
        return self.ladder.later[place - 1].identities(self._own) if place else samples_of(self._own, self._samples)

    def may_retry(self, pasts: Sequence[Past | None]) -> bool:
        """Return whether the next entry is asked again if it failed before.

        If it failed because of the content of the row, it is not asked again as long as another entry or people can be
        asked, or an earlier answer stays. An entry whose rows wait for people is asked again if the user wants that.
        """
        failed = [past.failed.error for past in pasts if past is not None and past.failed is not None]
        if not any(map(failed_by_content, failed)):
            return True
        ladder = self.ladder
        is_last = self.place == len(ladder.names) - 1 and (ladder.retries_for_people or not ladder.cascade.people)
        return is_last and not any(result.ok for result in self._asked)

    def stop(self, error: JobError) -> None:
        """End the row now with this error."""
        self.fail(error)
        if self.asking is not None:
            self.asking.stop(error)

    def shown(self) -> JsonObject:
        """Return the conversation at the entry that is being asked."""
        assert self.asking is not None
        return self.asking.shown()

    def move(self) -> bool:
        """Move to the next entry, and wait there. Returns False if the row cannot wait there."""
        self.leave()
        if self.ladder.enter(self.place):
            self._at = self.place
        return bool(self._at)

    def leave(self) -> None:
        """Stop waiting at a later entry."""
        if self._at:
            self.ladder.leave(self._at)
            self._at = 0

    def end(self, result: AgentResult[object]) -> bool:
        """Note the result of the next entry. Returns whether its answer may escalate."""
        place, error = len(self._asked), result.error
        if isinstance(self.asking, Agent):
            self.wrote += self.asking.writes
        self.asking = None
        if is_interrupted(result) and place and self.ladder.is_over(place):
            self.waits_for = self.ladder.names[place]
            return False
        plain = plainly(result, self.ladder.schema)
        self._asked.append(result if plain.ok else plain)
        self._outputs.append(cast(JsonValue, from_json(to_json(plain.output))) if plain.ok else None)
        if self.error is not None or is_interrupted(result):
            self.error = self.error or error
            return False
        if place and error is not None and not failed_by_content(error):
            self.waits_for = self.ladder.names[place]
            return False
        return plain.ok or failed_by_content(plain.error)

    def escalates(self) -> bool:
        """Return whether the rule sends the latest answer to the next entry."""
        ladder, result = self.ladder, self._asked[-1]
        if len(self._asked) == len(ladder.names) and not ladder.cascade.people:
            return False
        try:
            return ladder.cascade.rule.decides(result, self._outputs[-1])
        except Exception as raised:
            if ladder.cascade.rule.function is None:
                raise
            failed = WorkerFailed(f"escalate: {describe(raised)}")  # the user's function can raise anything
            failed.traceback = traceback_of(raised)
            self.fail(failed)
            return False

    async def is_sent(self) -> bool:
        """Return whether a learned threshold sends the latest answer to the last model. If that is not decided in this
        session, the row waits for it."""
        learned, last = self.ladder.learned, self.ladder.names[-1]
        if self.error is not None or self.place != len(self.ladder.names) - 1:
            return False
        decided = await learned.decide(self.job.job_id, self._asked[-1].doubt)
        if decided is None:
            self.waits_for = last
        return decided is True

    def result(self) -> AgentResult[object]:
        """Return the result of the row, even before its end: the latest valid answer, else the latest failure."""
        asked = self._asked
        place = max((place for place, each in enumerate(asked) if each.ok), default=len(asked) - 1)
        if not asked:
            return cast("AgentResult[object]", self.summed([], None))
        stays = asked[place]
        self.error = self.error or stays.error
        ok = self.error is None
        others = [each for each in range(len(asked)) if each != place or not ok]
        result: Any = replace(
            self.summed(asked, stays),
            repaired=ok and stays.repaired,
            truncated=ok and stays.truncated,
            earlier=tuple(map(self._earlier, others if ok else others[:-1])),
            waits_for=self.waits_for,
        )
        result.answered_by = self.ladder.names[place] if ok else None  # not that of a standby
        if ok:
            result.votes = stays.votes
            result.samples = stays.samples
            result.doubts = stays.doubts
        return cast("AgentResult[object]", result)

    def _earlier(self, place: int) -> Earlier:
        each = self._asked[place]
        return Earlier(
            *(self.ladder.names[place], self._outputs[place], each.error, each.doubts, each.votes),
            *(each.usage, each.cost),
        )
