"""The life of batches: validated, run, finalized; cancelled, expired and removed. Each has one task here.

A batch is one run on one record: the run directory ``run/`` in the folder of the batch, or a run in Redis, on which
``batch-agent work`` works too. Its rows are the lines that have no outcome yet, so that a restarted server continues
where the last one was killed: a line whose answer is recorded is not asked again. design/serve.md has the reasons.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, isinf
from pathlib import Path

from batch_agent.agent.prepare import prepare
from batch_agent.blocking import in_thread
from batch_agent.dispatch.cancellation import first_error
from batch_agent.errors import StoreError
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.lock import Lock
from batch_agent.record.redis.reading import delete_run, run_names
from batch_agent.run.recording import in_thread as in_whole_thread
from batch_agent.run.run import Run
from batch_agent.run.shared_state import SharedState
from batch_agent.serve import ServeOptions
from batch_agent.serve.asking import (
    line_spec,
    travelling_spec,
)
from batch_agent.serve.catalog import Catalog, CatalogError, ServedBatch, StoredFile, Tenant
from batch_agent.serve.directory import BATCHES, INPUT, PART, RUN, is_full, move_to_lost
from batch_agent.serve.line_scheduler import LineScheduler
from batch_agent.serve.lines import BatchLines, Checked, Tallied, check_lines, with_files
from batch_agent.serve.models import ServedModels
from batch_agent.serve.objects import log_batch, notice_of
from batch_agent.serve.repair import BeyondRepair, repair_parts, restore_input, salvage
from batch_agent.serve.running_batch import RunningBatch
from batch_agent.serve.upstreams import for_clients

logger = logging.getLogger("batch_agent")

VALIDATIONS = 2  # inputs that are checked at once
OPEN_PER_TENANT = 4  # runs of a tenant that are open at once, those with the earliest deadlines first
GRACE_SECONDS = 10.0  # for lines in flight, when their batch is cancelled
PROGRESS_SECONDS = 1.0  # between two writes of the numbers of a batch
AGAIN_SECONDS = 5.0  # before a batch whose record could not be written is continued
# A batch whose run ends early, or fails by a bug or damage, is continued, after twice the time each time. After this
# many times in a row without another line done it fails, with everything that is done in its files.
MOST_FAILURES = 6
SET_ASIDE_AFTER = 3  # of these failures the record of a batch is set aside: it may be damaged
LOOK_SECONDS = 60.0  # between two looks at the clock while a deadline is waited for
LOCK = "lock"  # in the folder of a batch, held by the process that works on it
# Codes of errors.
QUEUE_LIMIT = "queue_limit_exceeded"
DAMAGED = "batch_damaged"
RUN_FAILED = "run_failed"
RUNS_PREFIX = "serve-"  # of the names of runs in Redis, before the id of the batch
LEASE_SECONDS = 10.0  # after which another process takes over the batches of one that is gone


class RunEnded(Exception):
    """The run of a batch ended before its lines were done, and not because of its client or its deadline."""


class InUse(StoreError):
    """Another process works on a batch."""


class ServedBatches:
    """All batches of a server. ``notify`` is called when a batch has ended and its tenant may have a webhook.
    ``held_up`` returns the reason why no batch can be worked on now, such as a full disk, or "". It blocks."""

    def __init__(
        self,
        catalog: Catalog,
        models: ServedModels,
        shared: SharedState,
        line_scheduler: LineScheduler,
        options: ServeOptions,
        notify: Callable[[], None],
        held_up: Callable[[], str] = lambda: "",
    ) -> None:
        self._catalog = catalog
        self._models = models
        self._shared = shared
        self._line_scheduler = line_scheduler
        self._max_lines = options.max_lines
        self._store = options.store
        self._now = options.now
        self._keep = options.keep
        self._notify, self._held_up = notify, held_up
        # Seconds for which a process owns a batch, if several share the catalog.
        self._lease = LEASE_SECONDS if options.shared else None
        self._owner = secrets.token_hex(8)  # the name of this process
        self.running: dict[str, RunningBatch] = {}
        self._live: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}  # set when a batch is cancelled
        self._validating = asyncio.Semaphore(VALIDATIONS)
        self._waiting: dict[str, dict[str, tuple[float, asyncio.Future[None]]]] = {}  # by tenant and batch
        self.ended: Counter[tuple[str, str]] = Counter()  # batches since this process started, by tenant and status
        self._open: dict[str, set[str]] = {}  # batches with an open run, by tenant
        self.failures = 0  # of batches, by a bug
        self._left: dict[str, int] = {}  # lines that were left when work on a batch last ended
        self._tasks: asyncio.TaskGroup | None = None

    def folder(self, id: str) -> Path:
        return self._catalog.data / BATCHES / id

    def draft(self, id: str) -> Path:
        """Return the folder for a batch that is being created. If a kill interrupts that, the next start removes the
        folder."""
        return self._catalog.data / BATCHES / f"{id}{PART}"

    async def resume(self, tasks: asyncio.TaskGroup) -> None:
        """Continue the batches that have not ended."""
        self._tasks = tasks
        await self.take_over(await in_thread(self._catalog.unfinished))

    async def take_over(self, batches: list[ServedBatch]) -> None:
        """Start batches on which no process works, and renew the ownership of those of this process."""
        for tenant in tuple(self._waiting):
            self._open_next(tenant)  # a model that they wait behind may have gone away
        for batch in batches:
            if self._lease is not None or batch.id not in self._live:
                await self.start(batch)

    async def start(self, batch: ServedBatch) -> None:
        """Start working on a batch, unless this or another process already does."""
        if not await in_thread(self._catalog.claim, batch.id, self._owner, self._lease):
            return
        if batch.id not in self._live and self._tasks is not None and not self._line_scheduler.resting:
            self._stops[batch.id] = asyncio.Event()
            if batch.stop:
                self._stops[batch.id].set()
            task = self._live[batch.id] = self._tasks.create_task(self._accompany(batch.id))
            task.add_done_callback(lambda _: self._forget(batch.id))

    def _forget(self, id: str) -> None:
        for known in (self._live, self._stops, self._left):
            known.pop(id, None)

    async def drain(self, seconds: float) -> None:
        """Start no further line, and wait for those in flight."""
        self._line_scheduler.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._line_scheduler.wait_idle()

    # What clients ask for

    async def cancel(self, id: str) -> ServedBatch | None:
        """Cancel a batch, and return it; None if it does not exist. A batch that has ended or is being finalized stays
        unchanged."""
        change = partial(self._catalog.change_batch, id, lambda batch: batch.cancelled_at(self._now()))
        batch = await in_thread(change)
        if batch is not None and batch.stop == "cancelled" and id in self._stops:
            self._stops[id].set()
        return batch

    async def remove(self, batch: ServedBatch) -> None:
        """Remove a batch that has ended, and everything that belongs to it."""
        await in_thread(self._catalog.remove_batch, batch.id)

    def progress(self, batch: ServedBatch) -> ServedBatch:
        """Return a batch with its current numbers."""
        running = self.running.get(batch.id)
        if running is None or batch.is_over:
            return batch
        tallied = running.lines.tallied
        return replace(
            batch,
            completed=tallied.completed,
            failed=tallied.failed,
            cancelled=tallied.not_done.get("cancelled", 0),
            expired=tallied.not_done.get("expired", 0),
            usage=dict(tallied.usage),
        )

    def estimate(self, batch: ServedBatch) -> float | None:
        """Return the time at which a batch will be done, in Unix seconds; None if it is unknown."""
        running = self.running.get(batch.id)
        if running is None:
            return None
        left = self._line_scheduler.seconds_left(running)
        return None if isinf(left) else self._now() + left

    def over_limit(self, tenant: Tenant, lines: int) -> str:
        """Return the reason why a tenant may not add ``lines`` lines, or "". Blocks. Call it in the transaction that
        adds the lines: then two batches that come at once are both counted."""
        queued = 0
        for batch in self._catalog.unfinished():
            if batch.tenant == tenant.name and batch.status in ("in_progress", "finalizing"):
                batch = self.progress(batch)
                queued += batch.total - batch.completed - batch.failed
        if queued + lines <= tenant.max_queued:
            return ""
        return f"{queued} lines are queued, and {tenant.max_queued} may be; this batch has {lines}."

    # One batch

    async def _accompany(self, id: str) -> None:
        """Work on a batch until it ends. After a failure, work continues. The batch ends as failed if that fails
        several times without another line being done, and the cause is neither the data directory nor the disk nor
        another process."""
        failures = 0
        least = inf
        reason = ""
        code = ""
        while True:
            try:
                batch = await in_thread(self._catalog.batch, id)
                if batch is None or batch.is_over:
                    return
                if failures >= MOST_FAILURES:
                    await self._fail(batch, code, reason)
                elif batch.status == "validating" or (batch.status == "cancelling" and not batch.total):
                    await self._validate(batch)
                else:
                    await self._work(batch, thorough=failures > 0)
            except Exception as error:
                pause = AGAIN_SECONDS
                told = str(error) or type(error).__name__
                if await self._is_own(error):
                    is_damage = isinstance(error, StoreError | OSError | sqlite3.Error | BeyondRepair)
                    left = self._left.get(id, inf)
                    failures = 1 if left < least else failures + 1
                    least = min(left, least)
                    if isinstance(error, BeyondRepair):
                        failures = MOST_FAILURES
                    elif failures == SET_ASIDE_AFTER and is_damage:
                        await self._set_record_aside(id)
                    code = DAMAGED if is_damage else RUN_FAILED
                    reason = f"The batch cannot be continued: {for_clients(told)}."
                    # A part that cannot be read is not better later; a server may be.
                    pause *= 2.0 ** (failures - (5 if is_damage else 1)) if failures < MOST_FAILURES else 0.0
                    trace = None if is_damage or isinstance(error, RunEnded) else error
                    self.failures += trace is not None
                    logger.error("batch %s: %s; it is continued in %g s", id, told, pause, exc_info=trace)
                    await asyncio.sleep(pause)
                else:
                    logger.warning("batch %s: %s; it waits, and is continued every %g s", id, told, pause)
                    while told:
                        await asyncio.sleep(pause)
                        told = await in_thread(self._held_up)

    async def _is_own(self, error: Exception) -> bool:
        """Return whether the batch itself is the cause of a failure, and not something that all batches need: catalog,
        disk, data directory, store."""
        if isinstance(error, InUse | CatalogError) or is_full(error):
            return False
        if self._store and isinstance(error, StoreError):
            return False
        return not await in_thread(self._held_up)

    async def _set_record_aside(self, id: str) -> None:
        """Move the record of a batch to ``lost/``, because it may be unreadable. Answers that are only in the record
        are asked again."""
        record = self.folder(id) / RUN
        with suppress(OSError):
            if record.exists():
                moved = await in_thread(move_to_lost, self._catalog.data, record)
                logger.warning("batch %s: its record is now %s, and it is continued without it", id, moved)

    async def _fail(self, batch: ServedBatch, code: str, reason: str) -> None:
        """End a batch that cannot be continued. Its files get all outcomes that exist."""
        locks: list[Lock] = []
        try:
            with suppress(FileNotFoundError):  # of its folder
                await in_whole_thread(lambda: locks.append(self._lock(batch.id)))
            now = await in_thread(self._catalog.batch, batch.id)
            if now is None or now.is_over:
                return
            try:
                tallied = await in_whole_thread(partial(salvage, self.folder(batch.id), now, reason))
            except (OSError, sqlite3.Error) as error:  # its parts stay where they are
                reason = f"{reason} Its files cannot be completed: {error}"
                tallied = Tallied(now.completed, now.failed, usage=dict(now.usage))
        finally:
            for lock in locks:
                lock.release()
        logger.error("batch %s: %s", batch.id, reason)
        await self._end(now, "cancelled" if now.stop == "cancelled" else "failed", tallied, code, reason)

    async def _end(self, batch: ServedBatch, status: str, tallied: Tallied, code: str = "", reason: str = "") -> None:
        """Write the final state of a batch. Its files are complete."""
        why: list[JsonObject] = [{"code": code, "message": reason, "param": None, "line": None}]
        done = batch.at(
            status,  # type: ignore[arg-type]
            self._now(),
            completed=tallied.completed,
            failed=tallied.failed if not reason else max(tallied.failed, batch.total - tallied.completed),
            cancelled=tallied.not_done.get("cancelled", 0),
            expired=tallied.not_done.get("expired", 0),
            usage=dict(tallied.usage),
            errors=why if reason else batch.errors,
        )
        self._line_scheduler.account(batch.tenant).done.update(tallied.not_done)
        await self._put(*await in_thread(with_files, self.folder(batch.id), done, self._keep))
        await self.forget_run(batch.id)

    async def _validate(self, batch: ServedBatch) -> None:
        if batch.stop == "cancelled":
            await self._put(batch.at("cancelled", self._now()))
            return
        upload = await in_thread(self._upload_of, batch)
        if not await in_thread(self._has_input, batch, upload):
            raise BeyondRepair("its input is missing")
        async with self._validating:
            await self._models.models()  # so that ``knows`` knows
            checked = await in_thread(self._check, batch)
        if checked is None:
            return
        tenant = await in_thread(self._tenant, batch.tenant)

        def change(now: ServedBatch) -> ServedBatch | None:
            if now.status != "validating":
                return None
            errors = checked.errors
            if not errors and tenant is not None and (over := self.over_limit(tenant, checked.total)):
                errors = [{"code": QUEUE_LIMIT, "message": over, "param": None, "line": None}]
            if errors:
                return now.at("failed", self._now(), errors=errors, total=0)
            return now.at("in_progress", self._now(), total=checked.total, model=checked.model)

        def notice(changed: ServedBatch) -> JsonObject | None:
            return notice_of(changed, self._now())

        await in_thread(self._catalog.change_batch, batch.id, change, notice)
        self._notify()

    def _upload_of(self, batch: ServedBatch) -> Path | None:
        """Return the content of the file from which a batch was created; None if it no longer exists."""
        file = self._catalog.file(batch.input_file, batch.tenant) if batch.input_file else None
        path = None if file is None else self._catalog.content_of(file)
        return path if path is not None and path.exists() else None

    def _has_input(self, batch: ServedBatch, upload: Path | None) -> bool:
        folder = self.folder(batch.id)
        return folder.is_dir() and (restore_input(folder, upload) or (folder / INPUT).exists())

    def _check(self, batch: ServedBatch) -> Checked | None:
        """Check the lines of a batch; return None if another process has done it. The lock is released in this
        function, so that it is held until the check ends even if the caller is cancelled."""
        lock = self._lock(batch.id)
        try:
            now = self._catalog.batch(batch.id)
            if now is None or now.status != "validating":
                return None
            return check_lines(self.folder(batch.id), batch.endpoint, self._models.knows, self._max_lines)
        finally:
            lock.release()

    def _lock(self, id: str) -> Lock:
        """Take the lock of a batch's folder. Raises StoreError if another process works on the batch. That process may
        have lost the ownership to this one because it was stopped for a while, and would continue."""
        try:
            return Lock(self.folder(id) / LOCK, "another server works on it")
        except StoreError as error:
            raise InUse(str(error)) from None

    def _tenant(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self._catalog.tenants() if tenant.name == name), None)

    async def _work(self, batch: ServedBatch, *, thorough: bool = False) -> None:
        """Run the remaining lines of a batch, and finalize it. ``thorough``: its files are checked completely first."""
        if batch.status == "in_progress" and not batch.stop:
            await self._wait_open(batch)
        locks: list[Lock] = []
        try:
            if not await in_thread(self.folder(batch.id).is_dir):
                raise BeyondRepair("its folder is missing")
            await in_whole_thread(lambda: locks.append(self._lock(batch.id)))
            now = await in_thread(self._catalog.batch, batch.id)
            if now is not None and not now.is_over:  # else another process has finished it
                upload = await in_thread(self._upload_of, now)
                repair = partial(repair_parts, self.folder(batch.id), now, upload, thorough=thorough)
                for what in await in_whole_thread(repair):
                    logger.warning("batch %s: %s", batch.id, what)
                await self._work_alone(now)
        finally:
            for lock in locks:
                lock.release()
            self._open.get(batch.tenant, set()).discard(batch.id)
            self._open_next(batch.tenant)

    async def _work_alone(self, batch: ServedBatch) -> None:
        """Run and finalize a batch whose lock is held. Raises RunEnded if lines remain that should be done."""
        stop, opened = batch.stop, list[BatchLines]()
        try:
            await in_whole_thread(lambda: opened.append(BatchLines(self.folder(batch.id), batch)))
            (lines,) = opened
            if lines.left and not stop:
                running = self.running[batch.id] = RunningBatch(
                    batch, lines, self._models, self._line_scheduler, travels=bool(self._store)
                )
                stop = await self._run(running)
                if self._line_scheduler.resting and not stop and lines.left:
                    await asyncio.get_running_loop().create_future()  # until this process ends
                if lines.left and not stop:
                    over = self._shared.dispatcher.over
                    raise RunEnded("its run ended before all lines were done" if over is None else over[1])
            await self._finalize(batch, lines, stop)
        finally:
            self.running.pop(batch.id, None)
            for lines in opened:
                self._left[batch.id] = lines.left
                await in_thread(lines.close)

    async def _run(self, running: RunningBatch) -> str:
        """Run lines until none is left, or until the batch is cancelled or expires. Returns the reason for stopping
        early, or ""."""
        batch = running.batch
        if batch.wire == "anthropic":
            await self._models.models()  # so that ``knows`` knows
        if not self._store:
            spec = line_spec(self._models, batch.model, inputs=running.inlet, run_dir=str(self.folder(batch.id) / RUN))
            run = Run[object](prepare(spec), worker=running.answer, within=self._shared)
        else:
            place = f"{self._store}/{RUNS_PREFIX}{batch.id}"
            spec = travelling_spec(self._models, batch.model, inputs=running.inlet, run_dir=place)
            run = Run[object](replace(prepare(spec), backend=self._models), within=self._shared)
        running.run = run
        tenant = await in_thread(self._tenant, batch.tenant)
        if tenant is not None:  # it may have come after the latest look at the books
            self._line_scheduler.set_terms(tenant.name, tenant.share, tenant.tokens_per_day)
        self._line_scheduler.enter(running)
        stops = self._stops[batch.id]
        stop = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(self._take_results(run, running))
                also = stops.wait(), self._tell_progress(running), running.keep_flushed()
                beside = [tasks.create_task(each) for each in also]
                try:
                    while not working.done() and not beside[0].done() and self._now() < batch.deadline:
                        limit = min(LOOK_SECONDS, batch.deadline - self._now())
                        await asyncio.wait({working, beside[0]}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                    if not working.done():
                        stop = "cancelled" if stops.is_set() else "expired"
                        running.stop()
                        if stop == "cancelled":
                            await asyncio.wait({working}, timeout=GRACE_SECONDS)
                        if not working.done():
                            run.cancel()
                        await asyncio.wait({working})
                finally:
                    for task in beside:
                        task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            self._line_scheduler.leave(running)
            running.abandon()
        if running.failure is not None:
            raise StoreError(f"its lines cannot be read: {running.failure}") from running.failure
        return stop if running.lines.left else ""

    async def _take_results(self, run: Run[object], running: RunningBatch) -> None:
        async with run:
            async for result in run.results():
                running.take(result)

    async def _tell_progress(self, running: RunningBatch) -> None:
        """Write the numbers of a batch to the catalog from time to time, for other processes and for a start after a
        kill."""
        told = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            done = running.lines.total - running.lines.left
            if done != told:
                told = done
                with suppress(StoreError):
                    await in_thread(self._catalog.change_batch, running.batch.id, self.progress)

    async def _finalize(self, batch: ServedBatch, lines: BatchLines, stop: str) -> None:
        """Complete the files of a batch, and end it."""

        def change(now: ServedBatch) -> ServedBatch:
            if now.status in ("finalizing", "cancelling") or stop == "cancelled":
                return replace(now, stop=stop or now.stop)
            return now.at("finalizing", self._now(), stop=stop)

        begun = await in_thread(self._catalog.change_batch, batch.id, change)
        assert begun is not None
        stop = begun.stop
        await in_whole_thread(partial(lines.finish, stop or "failed"))  # ``lines`` is closed after it
        damage = lines.damage
        end = stop or ("failed" if damage else "completed")
        await self._end(begun, end, lines.tallied, DAMAGED, damage)

    async def forget_run(self, id: str) -> None:
        """Delete the run of a batch that has ended, if it is in Redis: its files have everything."""
        if self._store:
            with suppress(StoreError):
                await in_thread(delete_run, StoreAddress.parse(f"{self._store}/{RUNS_PREFIX}{id}"))

    async def forget_runs(self) -> None:
        """Delete runs in Redis that killed processes of this server have left. Runs of other servers stay."""
        if self._store:
            names = await in_thread(run_names, StoreAddress.parse(self._store, named=False))
            for id in [name.removeprefix(RUNS_PREFIX) for name in names if name.startswith(RUNS_PREFIX)]:
                batch = await in_thread(self._catalog.batch, id)
                if batch is not None and batch.is_over:
                    await self.forget_run(id)

    async def _put(self, batch: ServedBatch, files: list[StoredFile] | None = None) -> None:
        """Write a batch that has ended to the catalog, together with the notice to its tenant."""
        notice = notice_of(batch, self._now())
        await in_thread(self._catalog.put_batch, batch, files or [], notice)
        self.ended[batch.tenant, batch.status] += 1
        log_batch(batch)
        self._notify()

    # How many runs are open

    async def _wait_open(self, batch: ServedBatch) -> None:
        """Wait until the tenant has few open batches, or until this one is cancelled or expires."""
        own = self._waiting.setdefault(batch.tenant, {})
        turn = asyncio.get_running_loop().create_future()
        own[batch.id] = batch.deadline, turn
        self._open_next(batch.tenant)
        stopping = asyncio.ensure_future(self._stops[batch.id].wait())
        try:
            limit = max(0.0, batch.deadline - self._now())
            await asyncio.wait({turn, stopping}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            own.pop(batch.id, None)

    def _open_next(self, tenant: str) -> None:
        waiting = self._waiting.get(tenant, {})
        opened = self._open.setdefault(tenant, set())
        # A batch with an earlier deadline than all open ones does not wait for them, and none waits for one whose
        # model cannot be answered now.
        for id, (deadline, turn) in sorted(waiting.items(), key=lambda item: item[1][0]):
            known = [self.running[each].batch for each in opened if each in self.running]
            stuck = sum(bool(each.model and self._line_scheduler.stopped(each.model)) for each in known)
            if len(opened) - stuck >= OPEN_PER_TENANT and deadline >= min(
                (each.deadline for each in known), default=inf
            ):
                return
            if not turn.done():
                opened.add(id)
                turn.set_result(None)
