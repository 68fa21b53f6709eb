"""What a run writes about itself to its record, and how it opens that record."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import JsonValue

from batch_agent.agent.fingerprint import RAISED, under_record
from batch_agent.agent.prepare import Prepared, models_of
from batch_agent.dispatch.cancellation import outlast
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import InputError, RunRejected, RunUnreachable, SpecError, StoreError
from batch_agent.events import SENT, Ended, Event, TypedSink
from batch_agent.files.gold import GOLD_FACT
from batch_agent.job import UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.observe.event_lines import event_json
from batch_agent.observe.metrics import Emit, Metrics
from batch_agent.record.address import StoreAddress, place_of
from batch_agent.record.codec import FORMAT
from batch_agent.record.commits import Commits, Meter, to_its_end
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.memory import MemoryStore
from batch_agent.record.redis.store import ANNOUNCED, RedisRunStore
from batch_agent.record.row_json import encode_row
from batch_agent.record.rundir import OPTIONS, REVIEWED, SCHEMA, State
from batch_agent.record.store import OBSERVED, Resuming, RunStore, Store
from batch_agent.run.cascade import cascade_facts, with_recorded_models
from batch_agent.run.changes import Changes, OnChange, options_of
from batch_agent.run.control import Inside
from batch_agent.run.lending import WholeBudget, shared_budgets
from batch_agent.run.spec_json import pieces, schema_json, spec_json
from batch_agent.run.trust import HOSTS, ROWS, hosts_of, join_line, sign
from batch_agent.spec import BatchSpec
from batch_agent.version import __version__

if TYPE_CHECKING:
    from batch_agent.dispatch.spending import Spending
    from batch_agent.run.feeder import Feeder
    from batch_agent.run.leases import Leases
    from batch_agent.run.shared_state import SharedState

R = TypeVar("R")
logger = logging.getLogger("batch_agent")
SENT_SECONDS = 1.0  # after which a commit is begun if events wait for one
# How a run ends, as its record calls it.
RECORDED_STATES: Mapping[str, State] = {
    "complete": "complete",
    "drained": "interrupted",
    "pilot": "interrupted",
    "cancelled": "interrupted",
    "failed": "failed",
    "out of budget": "out of budget",
    "unreachable": "unreachable",
}


def open_record(spec: BatchSpec) -> RunStore:
    """Return the record of a run: in memory, in its directory, or in Redis. Connects to Redis, so it may block."""
    if spec.run_dir is None:
        return MemoryStore()
    place = place_of(spec.run_dir)
    if isinstance(place, Path):
        return DirectoryStore(place.absolute())  # a tool may change the working directory
    place.refuse_stage()
    store = RedisRunStore.at(place)
    for danger in store.dangers():
        logger.warning("%s: %s. See docs/cluster.md", place, danger)
    return store


async def open_to_feed(
    spec: BatchSpec,
    resuming: Resuming,
    open_record: Callable[[BatchSpec], RunStore],
    outer: Store | None,
    stage: str,
) -> Store:
    """Return the opened record of a run: its own, or that of a stage of the outer run."""
    if outer is not None and stage:
        store = outer.fed.stage(stage)
    elif spec.run_dir is None:
        store = open_record(spec)
    else:
        store = await in_thread(lambda: open_record(spec))
    if store.blocks("open"):
        try:
            await in_thread(partial(store.open, resuming))
        except BaseException:
            await in_thread(store.close)
            raise
    return Store(store)


@asynccontextmanager
async def announced(record: Store | None) -> AsyncIterator[None]:
    """Tell readers of a run in Redis that it is starting, until it is fed. A directory is locked for that."""
    if record is None or not record.wait:
        yield
        return

    async def announce() -> None:
        with suppress(StoreError):  # the run itself reports it
            while await record.announce():  # noqa: ASYNC110  it is forgotten otherwise
                await asyncio.sleep(ANNOUNCED / 3)

    announcing = asyncio.get_running_loop().create_task(announce())
    try:
        yield
    finally:
        announcing.cancel()
        await outlast(announcing)
        with suppress(StoreError):
            await record.stop_announcing()


async def refuse_changes(compared: Callable[[], Changes], on_change: OnChange) -> None:
    """Raise SpecError if resuming would drop recorded answers and ``on_change`` does not allow that. Otherwise log what
    is kept and what is sent."""
    changes = await in_thread(compared)
    if changes.dropped and on_change is None:
        raise SpecError(changes.refusal(flags=False))
    changes.tell(on_change)


async def as_recorded(prepared: Prepared, store: Store | None) -> Prepared:
    """Return a run that this process feeds, with the max_tokens of its record."""
    if store is None:
        return prepared
    facts = await store.facts() or {}
    prepared = under_record(prepared, facts)
    return prepared if prepared.cascade is None else with_recorded_models(prepared, facts)


async def in_thread(function: Callable[[], R]) -> R:
    """Run a call of the store that may block, in a thread. If this is cancelled, it still waits for the end of the
    call."""
    calling = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await to_its_end(calling)
        raise


def joining_command(spec: BatchSpec, facts: JsonObject) -> str:
    """Return the command that starts a worker of this run in another process."""
    assert spec.run_dir is not None, "other processes cannot reach a run without a record"
    place = place_of(spec.run_dir)
    return join_line(str(place), facts) if isinstance(place, StoreAddress) else f"batch-agent work {place}"


def say_joining(spec: BatchSpec, facts: JsonObject, *, alone: bool) -> str:
    """Log how a worker joins the run, unless the only worker is in this process. Returns the command, if the feeder
    must log it itself while there is no worker; else ""."""
    if spec.feed_only:
        return joining_command(spec, facts)
    if not alone:
        logger.warning("to add a worker: %s", joining_command(spec, facts))
    return ""


def originals_of(inputs: object) -> Sequence[object] | dict[int, object] | None:
    """Return where the feeder finds inputs as the user gave them, for results that arrive as JSON."""
    return {} if isinstance(inputs, RowChannel) else inputs if isinstance(inputs, list | tuple) else None


def resuming_of(prepared: Prepared, on_change: OnChange, changes: Changes | None = None, stage: str = "") -> Resuming:
    """Return how a run or a stage uses its record. ``changes`` are those of the whole run, if they are known."""
    spec, retry = prepared.spec, prepared.spec.retry_failed
    kinds = retry if isinstance(retry, bool) else (retry,) if isinstance(retry, str) else tuple(retry)
    keeps, raised = on_change == "keep", prepared.shapes.raised_from is not None
    adopted = None if changes is None else changes.adoptions(stage, keeps=keeps)
    answered = {} if changes is None else changes.answered.get(stage, {})
    how = on_change == "resend", raised, prepared.cascade is not None
    return Resuming(spec.resume or keeps, keeps, kinds, *how, adopted=adopted, answered=answered)


def facts_of(
    prepared: Prepared,
    fingerprint: bytes,
    command: Mapping[str, JsonValue] | None,
    stages: Sequence[str],
    *,
    observed: bool,
) -> JsonObject:
    """Return the content of ``run.json`` at the start of a session."""
    began, shapes = now_text(), prepared.shapes
    facts: JsonObject = {
        "state": "running",
        "why": None,
        "fingerprint": fingerprint.hex(),
        "started": began,
        "session_started": began,
        "ended": None,
        "versions": versions(),
        "model": prepared.model,
        "backend": prepared.backend.name,
        "total": prepared.plan.total,
        OPTIONS: options_of(prepared),
        SCHEMA: None if prepared.schema is None else prepared.schema.written_schema,
        REVIEWED: _review_facts(prepared),
    }
    if prepared.cascade is not None:
        facts["cascade"] = cascade_facts(prepared)
    if prepared.gold is not None:
        facts[GOLD_FACT] = prepared.gold.facts
    if shapes.raised_from is not None:
        facts[RAISED] = shapes.raised_from
    if observed:
        facts[OBSERVED] = True
    if stages:
        facts["stages"] = list(stages)
    if prepared.carry:
        facts["carry"] = list(prepared.carry)
    if prepared.examples is not None:
        facts["examples"] = prepared.examples.facts()
    if command is not None:
        facts["command"] = dict(command)
    return facts


def _review_facts(prepared: Prepared) -> JsonObject:
    """Return what a review needs to know: its options, and in which fields and directories rows have images and
    documents."""
    spec = prepared.spec
    column = spec.document_column
    roots = [spec.image_root, Path.cwd()]
    return {
        "overlap": spec.overlap,
        "lease": spec.review_lease,
        "fields": [*spec.images, *([] if column is None else [column])],
        "roots": [*dict.fromkeys(str(Path(root).absolute()) for root in roots if root is not None)],
    }


def facts_for_workers(
    prepared: Prepared, first: object, inside: Inside | None = None, row_schema: type[object] | None = None
) -> JsonObject:
    """Return what a worker in another process needs to prepare the same run, signed if there is a secret. ``first`` is
    its first input, ``row_schema`` the class of its rows. Raises SpecError for an option that other processes cannot
    use."""
    try:
        shown = "null" if isinstance(first, UnreadableRow) else encode_row(first).decode()
    except InputError:  # this row fails alone
        shown = "null"
    unnamed = prepared.model is None or prepared.cascade is not None
    model: JsonObject = {} if unnamed else {"model": prepared.spec.model or prepared.model}
    facts: JsonObject = {"spec": {**spec_json(prepared), **model}, "first": shown, "pieces": {**pieces(prepared)}}
    facts |= {"asked": asked_json(prepared), "lease": prepared.spec.lease, "keep": prepared.spec.keep}
    facts |= {} if inside is None else inside.facts(prepared)
    if row_schema is not None:
        facts[ROWS] = schema_json(row_schema)
    own = {host for each in models_of(prepared) for host in hosts_of(each.backend)}
    hosts = {*own, *cast("list[str]", facts.get(HOSTS, ()))}
    return sign({**facts, HOSTS: [*sorted(hosts)]} if hosts else facts)


def asked_json(prepared: Prepared) -> dict[str, JsonValue]:
    """Return what all rows share, so that viewers can compute a row's prompt from its input."""
    plan, spec = prepared.plan, prepared.spec
    schema = None if prepared.schema is None else prepared.schema.json_schema
    return {
        "system": plan.system,
        "task": spec.task,
        "template": spec.template,
        "hoisted": [*plan.hoisted],
        "schema": schema,
        "tools": [tool.name for tool in prepared.tools],
    }


class SentWork(TypedSink):
    """The work of a process that does not feed the run, as it is sent with its commits: by how much the numbers of its
    statistics have grown, and the events of ``run`` if the feeder has observers. ``commit_soon`` is called if events
    wait for a commit."""

    def __init__(self, run: str, emit: Emit) -> None:
        self._run, self._emit = run, emit
        self.commit_soon: Callable[[], None] = lambda: None
        self._counted: Mapping[str, float] = {}
        self.handlers = {}
        self._events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None

    def send_events(self) -> None:
        """Send events too from now on."""
        if not self.handlers:
            self.handlers = dict.fromkeys(SENT, self._add_event)
            self._emit.sinks.add(self)

    def _add_event(self, event: Event) -> None:
        if event.run == self._run:  # else it is one of a run inside this one, which sends it
            self._events.append(event)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SENT_SECONDS, self.commit_soon)

    def since_commit(self) -> tuple[Mapping[str, float], bytes]:
        """Return what was not sent yet."""
        counts, before = self._emit.metrics.counts(), self._counted
        self._counted = counts
        grown = {name: count - before.get(name, 0) for name, count in counts.items() if count != before.get(name, 0)}
        events, self._events = self._events, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return grown, b"\n".join(map(event_json, events))


def open_commits(
    store: Store,
    number: int,
    spending: Spending,
    metrics: Metrics,
    outer: SharedState | None,
    feeder: Feeder | None,
    sent: SentWork,
    leases: Leases,
    on_backlog: Callable[[bool], None],
    on_overdue: Callable[[bool], None],
) -> Commits:
    """Return the commits of worker ``number``. ``sent`` is what it reports to a feeder
    in another process. ``outer`` is the state of the outer run of a stage, which has the budget: its commits record
    what the run has spent each time the stage records something."""
    budgets = shared_budgets(spending) if outer is None else []
    so_far, learnt = (spending.so_far, spending.learnt) if outer is None else (metrics.spent, lambda: None)
    claims = budgets and number and feeder is not None and store.writes
    commits = Commits(
        store,
        number,
        meter=Meter(so_far, budgets, learnt, None if feeder is not None else sent.since_commit),
        budget=WholeBudget(spending, feeder.session) if claims and feeder is not None else None,
        on_committed=leases.committed,
        on_backlog=on_backlog,
        on_overdue=on_overdue,
        on_failed=leases.fail,
        on_written=None if outer is None or outer.commits is None else outer.commits.touch,
    )
    sent.commit_soon = commits.touch
    return commits


def given_up(ended: Ended, why: str, *, has_results: bool) -> BaseException | None:
    """Return the error of a run that cannot continue; None if it has results, because an error would hide them."""
    if has_results:
        logger.warning("%s: %s", ended, why)
        return None
    return RunUnreachable(why) if ended == "unreachable" else RunRejected(why)


def now_text() -> str:
    """Return the current time in the format of ``run.json``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def versions() -> JsonObject:
    """Return the versions of the software that records a run."""
    return {
        "batch-agent": __version__,
        "python": platform.python_version(),
        "journal": FORMAT,
    }
