"""What a run writes about itself into its record, and how it opens that record."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
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
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.journal import Journal, to_its_end
from batch_agent.record.memory import MemoryStore
from batch_agent.record.redis.store import ANNOUNCED, RedisRunStore
from batch_agent.record.row_json import encode_row
from batch_agent.record.rundir import OPTIONS, REVIEWED, SCHEMA, State
from batch_agent.record.store import OBSERVED, Account, Increment, Resuming, RunStore, Store
from batch_agent.run.cascade import cascade_facts, with_recorded_models
from batch_agent.run.changes import Changes, OnChange, options_of
from batch_agent.run.control import Inside
from batch_agent.run.spec_json import pieces, schema_json, spec_json
from batch_agent.run.trust import HOSTS, ROWS, hosts_of, join_line, sign
from batch_agent.share.table import BUDGET_COST, BUDGET_TOKENS, DOLLAR
from batch_agent.spec import BatchSpec
from batch_agent.version import __version__

if TYPE_CHECKING:
    from batch_agent.run.leases import Leases

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
    """Raise SpecError if resuming would drop recorded answers and ``on_change`` does not allow it. Else say what is
    kept and sent."""
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
    """Run a call of the store that may block in a thread. A cancellation waits for its end."""
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
    """Say how a worker joins the run, unless its only worker is in this process. Returns the command for a feeder that
    says it itself while there is no worker, or ""."""
    if spec.feed_only:
        return joining_command(spec, facts)
    if not alone:
        logger.warning("to add a worker: %s", joining_command(spec, facts))
    return ""


def originals_of(inputs: object) -> Sequence[object] | dict[int, object] | None:
    """Return where the feeder finds inputs as the user gave them, for results that come as JSON."""
    return {} if isinstance(inputs, RowChannel) else inputs if isinstance(inputs, list | tuple) else None


def resuming_of(prepared: Prepared, on_change: OnChange, changes: Changes | None = None, stage: str = "") -> Resuming:
    """Return how a run or a stage uses its record. ``changes`` are those of the whole run, once they are known."""
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
    """Return what ``run.json`` says when a session begins."""
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
    """Return what a review needs to know: its options, and where the images and documents of rows are."""
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
    """Return what all rows have in common, so that viewers can compute a row's prompt from its input."""
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


class StageAccount(Account):
    """Reports what an inner run spends, for its own record. The outer run has the ledger. Its ``journal`` records the
    ledger each time this run records something."""

    def __init__(self, metrics: Metrics, journal: Journal | None) -> None:
        self._metrics, self._journal = metrics, journal

    def so_far(self) -> tuple[int, float | None]:
        return self._metrics.spent()

    def advance_written(self, error: StoreError | None = None) -> None:
        if self._journal is not None:
            self._journal.touch()


class WorkSince(TypedSink):
    """What a worker outside the process of its record has done since its latest commit. ``budgets`` are counted in the
    table of shares, so they are left out. ``emit`` has the statistics so far and the events of ``run``; it is None if
    this process is also the feeder, which has them. ``commit_soon`` is called if events wait for a commit."""

    def __init__(self, account: Account, budgets: Collection[str], run: str, emit: Emit | None) -> None:
        self._account, self._budgets, self._run, self._emit = account, budgets, run, emit
        self.commit_soon: Callable[[], None] = lambda: None
        self._tokens = self._cost = 0  # at the latest commit
        self._counted: Mapping[str, float] = {}
        self.handlers = {}
        self._events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None

    def send_events(self) -> None:
        """Send events too from now on: the feeder has observers."""
        if self._emit is not None and not self.handlers:
            self.handlers = dict.fromkeys(SENT, self._add_event)
            self._emit.sinks.add(self)

    def _add_event(self, event: Event) -> None:
        if event.run == self._run:  # else it is one of a run inside this one, which sends it
            self._events.append(event)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SENT_SECONDS, self.commit_soon)

    def increment(self) -> Increment:
        """Return the increment of the commit that begins now."""
        tokens, dollars = self._account.so_far()
        cost = round((dollars or 0.0) * DOLLAR)
        counts, before = {} if self._emit is None else self._emit.metrics.counts(), self._counted
        more = Increment(
            0 if BUDGET_TOKENS in self._budgets else tokens - self._tokens,
            0 if BUDGET_COST in self._budgets else cost - self._cost,
            {name: count - before.get(name, 0) for name, count in counts.items() if count != before.get(name, 0)},
            self._lines() if self._events else b"",
        )
        self._tokens, self._cost, self._counted = tokens, cost, counts
        return more

    def _lines(self) -> bytes:
        """Return the events as lines, and forget them."""
        events, self._events = self._events, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return b"\n".join(map(event_json, events))


def open_journal(
    store: Store,
    number: int,
    account: Account,
    work: WorkSince,
    leases: Leases | None,
    on_backlog: Callable[[bool], None],
    on_overdue: Callable[[bool], None],
) -> Journal:
    """Return the journal through which worker ``number`` writes to the store."""
    journal = Journal(
        store,
        number,
        account=account,
        more=work.increment if store.wait else None,
        on_committed=(lambda lost, ended: None) if leases is None else leases.committed,
        on_backlog=on_backlog,
        on_overdue=on_overdue,
        on_failed=(lambda error: None) if leases is None else leases.fail,
    )
    work.commit_soon = journal.touch
    return journal


def given_up(ended: Ended, why: str, *, has_results: bool) -> BaseException | None:
    """Return the error of a run that cannot continue; None if it has results, which are not hidden by an error."""
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
