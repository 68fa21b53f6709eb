"""A worker process: joins a run that another process feeds, and works until the run is done or it is stopped."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveFloat, ValidationError

from batch_agent.agent.fingerprint import fingerprint_of, under_record
from batch_agent.agent.prepare import Prepared, prepare
from batch_agent.backends.registry import BACKEND_VARIABLE
from batch_agent.backends.schemes import PROVIDERS
from batch_agent.dispatch.cancellation import wait_event
from batch_agent.errors import RunUnreachable, SpecError, StoreError
from batch_agent.files.results import from_json
from batch_agent.fleet.hostfile import KEPT_HOSTFILES
from batch_agent.messages import JsonObject
from batch_agent.record.address import RunPlace, StoreAddress, place_of
from batch_agent.record.control import NotAlive, Refused, ask
from batch_agent.record.reader import look
from batch_agent.record.redis.reading import run_names
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.rundir import stage_names
from batch_agent.record.store import LEASE, WorkStore
from batch_agent.record.store_server import FeederGone, open_served
from batch_agent.run.leases import Over
from batch_agent.run.lending import Lending
from batch_agent.run.recording import in_thread, versions
from batch_agent.run.run import Run
from batch_agent.run.shared_backends import SharedBackends
from batch_agent.run.spec_json import ENTRY, imported, pieces, read_spec
from batch_agent.run.trust import ROWS, Trust, owned

logger = logging.getLogger("batch_agent")

WAIT = 60.0  # seconds to wait for a run, or for a new feeder
LOOK = 0.25  # seconds between two checks for a run
STAGE_LOOK = 0.5  # seconds between two looks at a pipeline, and at a stage without rows
SERVED = "unix:"  # before the path of a socket that another process serves


class NoRunCame(StoreError):
    """There was no run to work on, or it had no feeder."""


class RunIsDone(StoreError):
    """The run is complete."""


class _RecordedOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    tools: list[str] = []


class _RecordedFacts(BaseModel):
    """The types of the facts that a worker reads. BatchSpec checks the other options."""

    model_config = ConfigDict(strict=True, extra="allow")

    spec: _RecordedOptions
    specs: dict[str, _RecordedOptions] = {}
    stages: list[str] = []
    versions: dict[str, str | int]
    fingerprint: str
    pieces: dict[str, str] = {}
    first: Annotated[str, AfterValidator(lambda first: from_json(first.encode()))]
    lease: PositiveFloat = LEASE
    row_schema: str | None = None
    hosts: list[str] = []


def refuse_damaged(facts: JsonObject) -> None:
    """Raise SpecError if a fact that workers read is missing or has a wrong type."""
    try:
        _RecordedFacts.model_validate(facts)
    except ValidationError as error:
        wrong = sorted({".".join(map(str, each["loc"])) for each in error.errors()})
        raise SpecError(
            f"the record of this run is damaged or forged: missing or of a wrong type: {', '.join(wrong)}"
        ) from None


@dataclass(frozen=True, slots=True)
class WorkReport:
    """The number of rows that a worker finished, and the reason why it left."""

    rows: int
    why: Over


class JoinedWorker:
    """Works on the run of a store. ``import_from`` is the directory of the user's modules. ``wait``: number of seconds
    to wait for a run to start, or for a new feeder. ``trust`` decides which things in the record may be used."""

    def __init__(self, store: WorkStore, trust: Trust, *, import_from: Path | None = None, wait: float = WAIT) -> None:
        self._store = store
        self._trust = trust
        self._import_from = import_from
        self._wait = wait
        self._leaving = asyncio.Event()
        self.run: Run[object] | None = None

    def drain(self) -> None:
        """Take no more rows, finish the running ones, and leave."""
        self._leaving.set()
        if self.run is not None:
            self.run.drain()

    def cancel(self) -> None:
        """Hand back every row and leave."""
        self._leaving.set()
        if self.run is not None:
            self.run.cancel()

    async def work(self) -> WorkReport:
        """Work on the run. Raises SpecError if this process cannot work on it, NoRunCame if there is no run."""
        facts = await self._facts()
        if isinstance(facts, str):
            return WorkReport(0, facts)
        refuse_damaged(facts)
        self._trust.check(facts)
        KEPT_HOSTFILES.set(self._trust.file(self._store.get_file))
        prepared = prepare_worker(facts, self._import_from, self._trust)
        for spec in cast("dict[str, JsonObject]", facts.get("specs", {})).values():
            # Raises before this worker takes rows of another stage.
            prepare_recorded(spec, self._import_from, self._trust)
        stages: WorkedStages | None = None
        if names := stage_names(facts):
            backends = SharedBackends()
            prepared = backends.share(prepared)
            stages = WorkedStages(
                self._store, names, backends, self._trust, import_from=self._import_from, patience=self._wait
            )
        self.run = run = worker_run(prepared, self._store, facts, inside=stages, patience=self._wait)
        if self._leaving.is_set():
            run.drain()
        await run.finish()
        if stages is not None:
            return self._report(stages.finished, stages.over)
        return self._report(run.finished, run.over)

    def _report(self, rows: int, why: Over) -> WorkReport:
        if why == "no feeder":
            raise NoRunCame(f"the queue is empty, and the run had no feeder for {self._wait:g} s")
        return WorkReport(rows, why or "done")

    async def _facts(self) -> JsonObject | Over:
        """Wait for a run that has rows to take, and return its facts; or the reason why there is nothing to do."""
        clock = asyncio.get_running_loop().time
        said = ""
        found = None
        deadline = clock() + self._wait
        while not self._leaving.is_set():
            what, facts = "there is no run", await in_thread(self._store.facts)
            if facts is not None and facts.get("state") == "complete":
                found = found or facts
                # Other facts: it was resumed meanwhile, and is complete again.
                if not self._store.lasts or not _has_failed_rows(facts) or facts != found or clock() >= deadline:
                    return "done"
                what = "the run is complete with failed rows, and no process has resumed it to retry them"
            elif facts is not None:
                standing = await in_thread(self._store.standing)
                left = standing.counts.unstarted + standing.counts.leased
                if standing.phase == "running" and (standing.feeder or left):
                    return facts
                if standing.phase == "draining" and standing.feeder:
                    return "the run is draining"
                what = "the run has no feeder"
                if standing.phase == "ended":
                    if not self._store.lasts:  # no new feeder can come
                        return "the run has ended"
                    what = f"the run has ended ({facts.get('state')}), and no process has resumed it"
            if clock() >= deadline:
                raise NoRunCame(f"{what}; waited {self._wait:g} s (--wait)")
            if what != said:
                said = what
                logger.warning("%s. This worker waits for %g s (--wait)", what, self._wait)
            await wait_event(self._leaving, LOOK)
        return "asked to leave"


def _has_failed_rows(facts: JsonObject) -> bool:
    summary = facts.get("summary")
    rows = summary.get("rows") if isinstance(summary, dict) else None
    return isinstance(rows, dict) and bool(rows.get("failed"))


class WorkedStages:
    """The stages of a pipeline, as a worker in another process sees them: one run for each stage that has rows.

    The pipeline's feeder decides when a stage begins and ends. A worker joins a stage when it has begun, and again if a
    new feeder begins it again. ``over`` is the reason why it ended, and ``finished`` counts the rows.
    """

    def __init__(
        self,
        store: WorkStore,
        names: Sequence[str],
        backends: SharedBackends,
        trust: Trust,
        *,
        import_from: Path | None,
        patience: float,
    ) -> None:
        self.names, self.parts = names, {}
        self._store = store
        self._backends = backends
        self._trust = trust
        self._import_from, self._patience = import_from, patience
        self._runs: dict[str, Run[object]] = {}  # stages that this worker works on now
        self._leaving = asyncio.Event()
        self.over: Over = ""
        self.finished = 0

    parts: Mapping[str, Prepared]

    def facts(self, prepared: Prepared) -> JsonObject:
        return {}

    async def begin_sharing(self, lender: Lending) -> None:
        """Do nothing: the stages of this worker share their limits from the start."""

    def stop_feeding(self) -> None:
        """Do nothing: the feeder is in another process."""

    def drain(self) -> None:
        self._leave("asked to leave")

    async def work(self, run: Run[object]) -> bool:
        stores = {name: self._store.stage(name) for name in self.names}
        if (budget := run.shared.spending.rows) is not None:
            for name in self.names:  # in the order of the pipeline
                budget.stage(name)
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, store in stores.items():
                    tasks.create_task(self._work_on(run, name, store))
                self._leave(await self._pipeline_ends(stores.values()))
        finally:
            for store in stores.values():
                store.close()
        return self.over == "done"

    def stage_row(self, row: str | int) -> tuple[Run[object], str]:
        stage, _, name = str(row).partition("/")
        if stage not in self._runs:
            raise SpecError(f"this worker has no row of the stage {stage!r}")
        return self._runs[stage], name

    def _leave(self, why: Over) -> None:
        """Take no more rows; rows that have begun finish."""
        self.over = self.over or why
        self._leaving.set()
        for run in self._runs.values():
            run.drain()

    async def _pipeline_ends(self, stages: Iterable[WorkStore]) -> Over:
        """Wait for the end of the pipeline, and return the reason to leave."""
        lonely_since: float | None = None
        while not self._leaving.is_set():
            standing = await in_thread(self._store.standing)
            if standing.phase != "running":
                begun = [facts for stage in stages if (facts := await in_thread(stage.facts)) is not None]
                complete = begun and all(facts.get("state") == "complete" for facts in begun)
                return "done" if complete else "asked to leave"
            now = asyncio.get_running_loop().time()
            if standing.feeder or any(run.holds_rows for run in self._runs.values()):
                lonely_since = None
            else:
                lonely_since = lonely_since or now
                if now - lonely_since >= self._patience:
                    return "no feeder"
            await wait_event(self._leaving, STAGE_LOOK)
        return self.over

    async def _work_on(self, outer: Run[object], stage: str, store: WorkStore) -> None:
        """Work on a stage whenever it has rows, until this worker leaves."""
        while (facts := await self._begun(store)) is not None:
            refuse_damaged(facts)
            self._trust.check(facts)
            prepared = self._backends.share(prepare_worker(facts, self._import_from, self._trust))
            run = self._runs[stage] = worker_run(prepared, store, facts, within=outer, stage=stage)
            if self._leaving.is_set():
                run.drain()
            try:
                await run.finish()
            finally:
                del self._runs[stage]
                self.finished += run.finished
            if run.shared.dispatcher.over is not None or outer.shared.spending.exhausted:
                return  # the feeder ends the stage

    async def _begun(self, store: WorkStore) -> JsonObject | None:
        """Wait until a stage has rows to work on, and return its facts; None if this worker leaves."""
        while not self._leaving.is_set():
            facts = await in_thread(store.facts)
            if facts is not None:
                standing = await in_thread(store.standing)
                waits = standing.counts.unstarted + standing.counts.leased
                if standing.phase == "running" and not standing.done and (standing.feeder or waits):
                    return facts
            await wait_event(self._leaving, STAGE_LOOK)
        return None


def worker_run(
    prepared: Prepared,
    store: WorkStore,
    facts: JsonObject,
    *,
    inside: WorkedStages | None = None,
    within: Run[object] | None = None,
    stage: str = "",
    patience: float = float("inf"),
) -> Run[object]:
    """Return the run of a worker in another process than the feeder."""
    plan = copy.copy(prepared.plan)
    plan.total = None
    lease = float(cast(float, facts.get("lease", LEASE)))
    keep = "results" if facts.get("keep") == "results" else "all"
    changed: dict[str, object] = {
        "inputs": [],
        "run_dir": None,
        "on_result": None,
        "resume": False,
        "lease": lease,
        "keep": keep,
    }
    rows = facts.get(ROWS)
    return Run(
        replace(prepared, spec=prepared.spec.model_copy(update=changed), plan=plan),
        work_on=store,
        within=None if within is None else within.shared,
        stage=stage,
        inside=inside,
        row_schema=None if rows is None else cast("type[object]", imported(str(rows))),
        patience=patience,
    )


def prepare_recorded(options: JsonObject, import_from: Path | None, trust: Trust) -> Prepared:
    """Prepare the options in a record. Raises SpecError."""
    spec = read_spec(options, [], import_from)
    entries = [each for each in spec.cascade if isinstance(each, Mapping)] if isinstance(spec.cascade, list) else [{}]
    if not trust.everything and spec.backend is None and not all(each.get("backend") for each in entries):
        # A feeder names its backend, except a login or one with a password. Then the model's name must not name one.
        provider = (spec.model or "").partition("/")[0]
        if (spec.runtime is None or provider in PROVIDERS) and not os.environ.get(BACKEND_VARIABLE):
            raise SpecError(f"the record names no backend: set {BACKEND_VARIABLE} on this worker")
    return prepare(spec, confined=not trust.everything)


def prepare_worker(facts: JsonObject, import_from: Path | None, trust: Trust) -> Prepared:
    """Prepare the feeder's run in this process. Raises SpecError, which names what differs."""
    theirs, ours = cast(JsonObject, facts.get("versions", {})), versions()
    for name in ("batch-agent", "journal"):
        if theirs.get(name) != ours[name]:
            raise SpecError(
                f"the run was started with {name} {theirs.get(name)}, this worker has {ours[name]}: install the same"
            )
    prepared = prepare_recorded(cast(JsonObject, facts["spec"]), import_from, trust)
    prepared = under_record(prepared, facts)
    with suppress(SpecError):  # a row that another stage made: it fails alone
        prepared.plan.check_first(from_json(str(facts["first"]).encode()))
    known, here = cast("dict[str, str]", facts.get("pieces", {})), pieces(prepared)
    entries = [name for name in here if name.startswith(ENTRY) and known.get(name) != here[name]]
    if entries or fingerprint_of(prepared).hex() != facts["fingerprint"]:
        differ = sorted(name for name in {*known, *here} if known.get(name) != here.get(name))
        raise SpecError(
            f"the requests of this worker would differ from those of the run in: {', '.join(differ) or 'the worker'}. "
            "Give it the same code and environment (--import-from)"
        )
    return prepared


class JoinedWorkers:
    """Works on all runs of a Redis server whose name has a prefix, in the order in which they appear. It ends when
    there was none for ``wait`` seconds."""

    def __init__(self, address: StoreAddress, prefix: str, trust: Trust, *, import_from: Path | None, wait: float):
        self._address = address
        self._prefix = prefix
        self._trust = trust
        self._import_from, self._wait = import_from, wait
        self._leaving = asyncio.Event()
        self._joining: set[str] = set()
        self._workers: dict[str, JoinedWorker] = {}
        self._said: dict[str, str] = {}  # by run: why this worker does not work on it
        self._rows = 0

    def drain(self) -> None:
        """Take no more rows, finish the running ones, and leave."""
        self._leaving.set()
        for worker in self._workers.values():
            worker.drain()

    def cancel(self) -> None:
        """Hand back every row and leave."""
        self._leaving.set()
        for worker in self._workers.values():
            worker.cancel()

    async def work(self) -> WorkReport:
        """Work on the runs. A run that this process cannot work on is reported; the others continue."""
        clock = asyncio.get_running_loop().time
        busy_at = clock()
        async with asyncio.TaskGroup() as tasks:
            while not self._leaving.is_set() and clock() - busy_at < self._wait:
                try:
                    names = await in_thread(partial(run_names, self._address))
                except StoreError as error:
                    self._tell("", error)
                    names = []
                for name in names:
                    if name.startswith(self._prefix) and name not in self._joining:
                        self._joining.add(name)
                        tasks.create_task(self._join(name))
                if any(worker.run is not None for worker in self._workers.values()):
                    busy_at = clock()
                await wait_event(self._leaving, STAGE_LOOK)
        return WorkReport(self._rows, "asked to leave" if self._leaving.is_set() else "done")

    async def _join(self, name: str) -> None:
        """Work on a run for as long as it has rows."""
        store, worker = None, None
        try:
            store = await in_thread(partial(RedisRunStore.at, self._address.at(name)))
            self._workers[name] = worker = JoinedWorker(store, self._trust, import_from=self._import_from, wait=0.0)
            await worker.work()
        except NoRunCame:
            pass
        except (SpecError, StoreError, RunUnreachable) as error:  # also of an outage: it joins again
            with suppress(StoreError):
                if name in await in_thread(partial(run_names, self._address)):  # else it has ended, and was deleted
                    self._tell(name, error)
        finally:
            self._workers.pop(name, None)
            self._joining.discard(name)
            if worker is not None and worker.run is not None:
                self._rows += worker.run.finished
            if store is not None:
                store.close()

    def _tell(self, name: str, error: Exception) -> None:
        if self._said.get(name) != str(error):
            self._said[name] = str(error)
            logger.warning("%s: %s", name or self._address, error)


async def work(
    place: str,
    *,
    import_from: str | Path | None = None,
    wait: float = WAIT,
    allow: Sequence[str] = (),
    trust: str = "",
) -> WorkReport:
    """Work on the run at ``place`` until it is done."""
    may_use = Trust([allow] if isinstance(allow, str) else allow, trust)
    return await work_at(place, may_use, import_from=None if import_from is None else Path(import_from), wait=wait)


async def work_at(
    place: str,
    trust: Trust,
    *,
    import_from: Path | None,
    wait: float,
    around: Callable[[JoinedWorker], AbstractContextManager[object]] = nullcontext,
) -> WorkReport:
    """Work on the run at ``place`` until it is done, inside of ``around``. Raises NoRunCame if its process ends."""
    try:
        store = await open_store(place, wait, trust)
    except RunIsDone:
        return WorkReport(0, "done")
    worker = JoinedWorker(store, trust, import_from=import_from, wait=wait)
    try:
        with around(worker):
            return await worker.work()
    except FeederGone as error:
        raise NoRunCame(str(error)) from None
    finally:
        store.close()


async def open_store(place: str, wait: float, trust: Trust) -> WorkStore:
    """Open the record of a run: at a URL of Redis, at a socket, or in the directory of a run on this machine.

    A record behind a socket of this user is trusted: the process behind it could do everything that this worker can.
    Raises SpecError for a wrong URL, and if the record is unreachable for ``wait`` seconds; NoRunCame if the run of a
    directory has no process in this time, and RunIsDone if that run is complete.
    """
    deadline, said = asyncio.get_running_loop().time() + wait, ""
    served = Path(place.removeprefix(SERVED)) if place.startswith(SERVED) else None
    address = served or place_of(place)
    while True:
        try:
            if isinstance(address, StoreAddress):
                address.refuse_stage()
                return await in_thread(partial(RedisRunStore.at, address))
            try:
                socket = served or Path(str((await ask(address, {"do": "share"}))["socket"]))
            except Refused as error:
                raise SpecError(str(error)) from None
            store = open_served(socket)
            trust.everything = trust.everything or owned(socket)
            return store
        except (StoreError, NotAlive) as error:
            over = asyncio.get_running_loop().time() >= deadline
            is_directory = isinstance(address, Path) and served is None
            if is_directory and await in_thread(partial(_is_complete, address, with_failures=over)):
                raise RunIsDone(f"{address} is complete") from None
            if over:
                raise (NoRunCame if isinstance(error, NotAlive) else SpecError)(str(error)) from None
            if str(error) != said:
                said = str(error)
                logger.warning("%s. This worker tries again for %g s (--wait)", said.rstrip("."), wait)
        await asyncio.sleep(LOOK)


def _is_complete(run_dir: RunPlace, *, with_failures: bool) -> bool:
    """Return whether a run on this machine is complete. Its failed rows may be retried by a process that comes."""
    try:
        standing = look(run_dir)
    except (SpecError, StoreError):  # there is no run yet, or it cannot be read
        return False
    return standing.state == "complete" and (with_failures or standing.progress.failed == 0)
