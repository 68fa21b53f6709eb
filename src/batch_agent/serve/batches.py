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
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isinf
from pathlib import Path
from typing import Any, cast

from batch_agent.agent.dialogue import Dialogue
from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.blocking import in_thread
from batch_agent.dispatch.cancellation import first_error
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.door import RequestRefused
from batch_agent.errors import BackendError, Interrupted, StoreError, Timeout
from batch_agent.job import AgentResult, Placed
from batch_agent.messages import JsonObject, Reply
from batch_agent.record.address import StoreAddress
from batch_agent.record.lock import Lock
from batch_agent.record.redis.reading import delete_run, run_names
from batch_agent.run.recording import in_thread as in_whole_thread
from batch_agent.run.run import Run
from batch_agent.run.shared import Shared
from batch_agent.serve import ServeOptions
from batch_agent.serve.asking import (
    ClientCall,
    LineAnswer,
    ask_line,
    failed_line,
    line_needs,
    line_spec,
    refused_for,
    travelling_spec,
)
from batch_agent.serve.catalog import Catalog, CatalogError, ServedBatch, StoredFile, Tenant
from batch_agent.serve.directory import BATCHES, INPUT, PART, RUN, is_full, move_to_lost
from batch_agent.serve.lines import BatchLine, BatchLines, Checked, Tallied, UnreadableLine, check_lines, with_files
from batch_agent.serve.models import ServedModels
from batch_agent.serve.objects import log_batch, notice_of
from batch_agent.serve.repair import BeyondRepair, repair_parts, restore_input, salvage
from batch_agent.serve.turnstile import FIRST_GUESS, Entrant, Turnstile
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
LEAD_SECONDS = 5.0  # that lines wait for the first one with their prefix
MOST_LATER = 1024  # lines that wait for it in memory, or for a server
MOST_SKIPPED = 64  # lines for servers that are away, at one look for a line that may start
LOCK = "lock"  # in the folder of a batch, held by the process that works on it
QUEUE_LIMIT, DAMAGED, RUN_FAILED = "queue_limit_exceeded", "batch_damaged", "run_failed"  # codes of errors
RUNS_PREFIX = "serve-"  # of the names of runs in Redis, before the id of the batch
LEASE_SECONDS = 10.0  # after which another process takes over the batches of one that is gone


class RunEnded(Exception):
    """The run of a batch ended before its lines were done, and neither its client nor its deadline ended it."""


class InUse(StoreError):
    """Another process works on a batch."""


@dataclass(slots=True, eq=False)
class Granted:
    """A line that was started. ``expected``: the tokens that its tenant's account was charged for it."""

    line: BatchLine
    body: JsonObject
    expected: float
    reserved: int = 0  # tokens of the day
    sent_at: float = 0.0
    beside: int = 0  # other requests that were in flight then
    asked: bool = False  # a request is in flight, whose tokens are not known
    tokens: int = 0

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def lost(self) -> int:
        """Tokens that count for an answer that was not awaited."""
        return self.reserved if self.asked else 0


class RunningBatch(Entrant):
    """A batch that has been validated, while its lines are asked. ``inlet`` has the rows of its run. ``travels``:
    processes of other machines ask them too, so that rows have the whole line, and results its outcome. ``failure``:
    why the lines cannot be read."""

    def __init__(
        self, batch: ServedBatch, lines: BatchLines, models: ServedModels, turnstile: Turnstile, *, travels: bool
    ) -> None:
        super().__init__(batch.id, batch.tenant, batch.deadline)
        self.batch, self.lines, self._models, self._turnstile, self._travels = batch, lines, models, turnstile, travels
        self.inlet: RowChannel[object] = RowChannel()
        self.failure: Exception | None = None
        self._suffix = batch.id.rpartition("_")[2]
        self._written = asyncio.Event()  # outcomes are to be flushed
        self._clock = asyncio.get_running_loop().time
        self._granted: dict[int, Granted] = {}
        self._refused: dict[int, RequestRefused] = {}  # by line, until its outcome is written
        self._ordered = lines.left_in_order()
        self._next: tuple[BatchLine, str, JsonObject] | None = None
        self._later: deque[BatchLine] = deque()  # lines that wait for the first one with their prefix
        self._away: deque[tuple[BatchLine, str]] = deque()  # lines whose model cannot be answered now
        self._leaders: dict[bytes, float] = {}  # by prefix: the loop time until which others wait for its first line
        self.run: Run[object] | None = None

    @property
    def left(self) -> int:
        return self.lines.left

    def offer(self) -> int | None:
        for _ in range(MOST_SKIPPED):
            if self._next is None and not self.closed:
                try:
                    self._next = self._next_that_fits()
                except (OSError, ValueError, sqlite3.Error) as error:
                    self.failure = error
                    self.close()
            if self._next is None:
                return None
            line, _, body = self._next
            self.model = str(body["model"])
            if not self._turnstile.waits(self.model):
                return line.size
            if len(self._away) >= MOST_LATER:
                return None
            self._away.append((line, self.model))
            self._next = None
        return None

    def start(self, expected: float) -> None:
        assert self._next is not None
        (line, own, body), self._next = self._next, None
        if line.has_long_prefix and line.group not in self._leaders:
            if len(self._leaders) >= MOST_LATER:
                self._leaders.clear()
            self._leaders[line.group] = self._clock() + LEAD_SECONDS
        self._granted[line.number] = Granted(line, body, expected, self.reserved, asked=self._travels)
        row: JsonObject = {"id": own, "line": line.number}
        if self._travels:
            row |= {"name": self._name(line.number), "endpoint": self.batch.endpoint, "body": body}
        self.inlet.put(Placed(line.number, row))

    def close(self) -> None:
        super().close()
        self._next = None
        self.inlet.close()

    def _next_that_fits(self) -> tuple[BatchLine, str, JsonObject] | None:
        """Return the next line that can be read, with its content. One that needs more tokens than its tenant has in a
        day fails."""
        limit = self._turnstile.ledger.limit(self.tenant)
        while (line := self._next_in_order()) is not None:
            try:
                own, body = self.lines.read(line)
            except UnreadableLine:
                self.lines.give_up(line)
                self._written.set()
                continue
            if limit is None:
                return line, own, body
            longest, usual = self._turnstile.account(self.tenant).longest, int(self.per_line or FIRST_GUESS)
            try:
                self.needs = line_needs(self.batch.endpoint, body, limit, longest, usual)
                return line, own, body
            except RequestRefused as refused:
                answer = failed_line(self.batch.endpoint, self._name(line.number), refused)
                self._put(line.number, own, answer)
        return None

    def _next_in_order(self) -> BatchLine | None:
        """Return the next line; None if there is none now. Those with a long prefix come after the answer to the first
        of them, so that the engine has computed it; meanwhile other lines come."""
        later, away = self._later, self._away
        if away and not self._turnstile.waits(away[0][1]):
            return away.popleft()[0]
        if later and self._is_led(later[0].group):
            return later.popleft()
        while len(later) < MOST_LATER:
            line = next(self._ordered, None)
            if line is None:
                break
            if not line.has_long_prefix or self._is_led(line.group):
                return line
            later.append(line)
        if not later and not away:
            self.close()
        return None

    def _is_led(self, group: bytes) -> bool:
        """Return whether no line of a group was started, or the first was answered, or has taken too long."""
        return self._leaders.get(group, -inf) <= self._clock()

    def _lead_over(self, group: bytes) -> None:
        if group in self._leaders:
            self._leaders[group] = -inf

    async def answer(self, row: object, dialogue: Dialogue) -> object:
        """Answer one line. The worker of the batch's run. The outcome is written when it is recorded (``take``)."""
        assert isinstance(row, dict)
        granted = self._granted[row["line"]]
        try:
            return await self._answer(granted, dialogue)
        finally:
            self._lead_over(granted.line.group)
            if self._granted.pop(granted.line.number, None) is not None:
                self._end(granted, granted.tokens, sent=bool(granted.sent_at))

    def _end(self, granted: Granted, tokens: int, *, sent: bool) -> None:
        reserved, lost, model = granted.reserved, granted.lost, granted.model
        self._turnstile.ended(self, tokens, granted.expected, sent=sent, model=model, reserved=reserved, lost=lost)

    async def _answer(self, granted: Granted, dialogue: Dialogue) -> LineAnswer:
        def call(models: ServedModels, question: ModelRequest) -> ClientCall:
            return _LineCall(models, question, partial(self._sent, granted), granted)

        def ask(shape: RequestShape, _: object, send: Callable[[ModelRequest], ClientCall]) -> Awaitable[Reply]:
            return dialogue.ask(shape, send=send)

        name = self._name(granted.line.number)
        try:
            answer = await ask_line(self._models, self.batch.endpoint, name, granted.body, ask, call)
        except BackendError as error:  # the record keeps only its message
            self._refused[granted.line.number] = refused_for(error)
            raise
        granted.tokens = answer.tokens
        account = self._turnstile.account(self.tenant)
        account.longest = max(account.longest, answer.completion_tokens)
        if granted.sent_at and answer.ok:
            seconds, governor = self._clock() - granted.sent_at, self._turnstile.governor
            beside = max(granted.beside, self._turnstile.inflight - 1 + governor.active)
            governor.learn_line(seconds, answer.completion_tokens, beside)
        return answer

    def _name(self, number: int) -> str:
        return f"{self._suffix}{number:08x}"

    def _sent(self, granted: Granted, endpoint: str) -> None:
        self._turnstile.note_sent(endpoint)
        if not granted.sent_at:
            granted.sent_at = self._clock()
            granted.beside = self._turnstile.inflight - 1 + self._turnstile.governor.active
            self._turnstile.sent(granted.model)

    def state_of(self, number: int) -> str:
        """Return the state of a line that is not done, or ""."""
        return "" if self.lines.is_done(number) else "in flight" if number in self._granted else "waiting"

    def abandon(self) -> None:
        """End lines that were started and that the run has not begun."""
        for granted in self._granted.values():
            self._end(granted, 0, sent=bool(granted.sent_at))
        self._granted.clear()

    def take(self, result: AgentResult[object]) -> None:
        """Write the outcome of a line, which is in the record of the run. If a kill comes before it is flushed, the
        line is fed again, and answered from the record."""
        if self._travels and (granted := self._granted.pop(result.index, None)) is not None:
            self._lead_over(granted.line.group)
            tokens = result.usage.prompt_tokens + result.usage.completion_tokens
            granted.asked = not result.ok and result.error.type == Interrupted.type
            self._end(granted, tokens, sent=True)
        if not result.ok:
            if result.error.type == Interrupted.type:
                return
            refused = self._refused.pop(result.index, None) or refused_for(result.error.exception())
            answer = failed_line(self.batch.endpoint, self._name(result.index), refused)
        elif isinstance(result.output, LineAnswer):
            answer = result.output
        else:
            told = cast("dict[str, Any]", result.output)  # of ``answer_line``
            answer = LineAnswer(told["ok"], told["outcome"])
        row = cast("dict[str, Any]", result.input)
        self._put(result.index, row["id"], answer)

    def _put(self, number: int, own: str, answer: LineAnswer) -> None:
        self.lines.put(number, own, answer.outcome, ok=answer.ok)
        self._turnstile.account(self.tenant).done["succeeded" if answer.ok else "failed"] += 1
        self._written.set()

    async def keep_flushed(self) -> None:
        """Flush the outcomes that were written in one iteration of the event loop together."""
        while True:
            await self._written.wait()
            self._written.clear()
            self.lines.flush()


class _LineCall(ClientCall):
    __slots__ = ("_granted", "_on_sent")

    def __init__(
        self, backend: ServedModels, request: ModelRequest, on_sent: Callable[[str], None], granted: Granted
    ) -> None:
        super().__init__(backend, request)
        self._on_sent, self._granted = on_sent, granted

    async def send(self, endpoint: str) -> Reply:
        self._on_sent(endpoint)
        self._granted.asked = True
        try:
            reply = await super().send(endpoint)
        except BackendError as error:
            self._granted.asked = isinstance(error, Timeout) and not error.unreached  # it may have generated all
            raise
        self._granted.asked = False
        return reply


class ServedBatches:
    """All batches of a server. ``notify`` is called when a batch has ended and its tenant may have a webhook.
    ``held_up`` returns why no batch can be worked on now, such as a full disk, or ""; it blocks."""

    def __init__(
        self,
        catalog: Catalog,
        models: ServedModels,
        shared: Shared,
        turnstile: Turnstile,
        options: ServeOptions,
        notify: Callable[[], None],
        held_up: Callable[[], str] = lambda: "",
    ) -> None:
        self._catalog, self._models, self._shared, self._turnstile = catalog, models, shared, turnstile
        self._max_lines, self._store, self._now = options.max_lines, options.store, options.now
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
        """Return the folder of a batch that is being created. After a kill it is removed."""
        return self._catalog.data / BATCHES / f"{id}{PART}"

    async def resume(self, tasks: asyncio.TaskGroup) -> None:
        """Continue the batches that have not ended."""
        self._tasks = tasks
        await self.take_over(await in_thread(self._catalog.unfinished))

    async def take_over(self, batches: list[ServedBatch]) -> None:
        """Begin with batches that no process works on, and keep those of this process."""
        for tenant in tuple(self._waiting):
            self._open_next(tenant)  # a model that they wait behind may have gone away
        for batch in batches:
            if self._lease is not None or batch.id not in self._live:
                await self.start(batch)

    async def start(self, batch: ServedBatch) -> None:
        """Begin with a batch, unless this or another process works on it."""
        if not await in_thread(self._catalog.claim, batch.id, self._owner, self._lease):
            return
        if batch.id not in self._live and self._tasks is not None and not self._turnstile.resting:
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
        self._turnstile.rest()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._turnstile.wait_idle()

    # What clients ask for

    async def cancel(self, id: str) -> ServedBatch | None:
        """Cancel a batch. One that has ended, or is being finalized, stays as it is."""
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
        """Return the unix time at which a batch will be done; None if it is not known."""
        running = self.running.get(batch.id)
        if running is None:
            return None
        left = self._turnstile.seconds_left(running)
        return None if isinf(left) else self._now() + left

    def over_limit(self, tenant: Tenant, lines: int) -> str:
        """Return why ``lines`` more of a tenant would be too many, or "". Blocks. Two batches at once are both counted
        if it is called in the transaction that adds the lines."""
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
        """Take a batch to its end. After a failure it is continued. If that fails again and again without another line
        done, and neither the data directory nor the disk nor another process is the reason, it ends as failed."""
        failures, least, reason, code = 0, inf, "", ""
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
                pause, told = AGAIN_SECONDS, str(error) or type(error).__name__
                if await self._is_own(error):
                    is_damage = isinstance(error, StoreError | OSError | sqlite3.Error | BeyondRepair)
                    left = self._left.get(id, inf)
                    failures, least = 1 if left < least else failures + 1, min(left, least)
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
        """Return whether a failure is that of the batch itself, and not of what all batches need: catalog, disk, data
        directory, store."""
        if isinstance(error, InUse | CatalogError) or is_full(error):
            return False
        if self._store and isinstance(error, StoreError):
            return False
        return not await in_thread(self._held_up)

    async def _set_record_aside(self, id: str) -> None:
        """Move the record of a batch to ``lost/``: it may be what cannot be read. Answers that are only there are asked
        again."""
        record = self.folder(id) / RUN
        with suppress(OSError):
            if record.exists():
                moved = await in_thread(move_to_lost, self._catalog.data, record)
                logger.warning("batch %s: its record is now %s, and it is continued without it", id, moved)

    async def _fail(self, batch: ServedBatch, code: str, reason: str) -> None:
        """End a batch that cannot be continued: all outcomes that are there are in its files."""
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
        """Write the final state of a batch, whose files are complete."""
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
        self._turnstile.account(batch.tenant).done.update(tallied.not_done)
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
        """Return the content of the file that a batch was created from, if that is there."""
        file = self._catalog.file(batch.input_file, batch.tenant) if batch.input_file else None
        path = None if file is None else self._catalog.content_of(file)
        return path if path is not None and path.exists() else None

    def _has_input(self, batch: ServedBatch, upload: Path | None) -> bool:
        folder = self.folder(batch.id)
        return folder.is_dir() and (restore_input(folder, upload) or (folder / INPUT).exists())

    def _check(self, batch: ServedBatch) -> Checked | None:
        """Check the lines of a batch; None if another process has done it. The lock is released here, so that it is
        held until the end of this call also if its caller was cancelled."""
        lock = self._lock(batch.id)
        try:
            now = self._catalog.batch(batch.id)
            if now is None or now.status != "validating":
                return None
            return check_lines(self.folder(batch.id), batch.endpoint, self._models.knows, self._max_lines)
        finally:
            lock.release()

    def _lock(self, id: str) -> Lock:
        """Take the lock of a batch's folder. Raises StoreError if another process works on the batch: it may have lost
        the batch to this one because it was slow or stopped for a while, and would continue."""
        try:
            return Lock(self.folder(id) / LOCK, "another server works on it")
        except StoreError as error:
            raise InUse(str(error)) from None

    def _tenant(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self._catalog.tenants() if tenant.name == name), None)

    async def _work(self, batch: ServedBatch, *, thorough: bool = False) -> None:
        """Run the lines of a batch that are left, and finalize it. ``thorough``: its files are looked at closely."""
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
        """Run and finalize a batch whose lock is held. Raises RunEnded if lines are left that should be done."""
        stop, opened = batch.stop, list[BatchLines]()
        try:
            await in_whole_thread(lambda: opened.append(BatchLines(self.folder(batch.id), batch)))
            (lines,) = opened
            if lines.left and not stop:
                running = self.running[batch.id] = RunningBatch(
                    batch, lines, self._models, self._turnstile, travels=bool(self._store)
                )
                stop = await self._run(running)
                if self._turnstile.resting and not stop and lines.left:
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
        """Ask lines until none is left, or until the batch is cancelled or expires. Returns which, or ""."""
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
            self._turnstile.set_terms(tenant.name, tenant.share, tenant.tokens_per_day)
        self._turnstile.enter(running)
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
                        running.close()
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
            self._turnstile.leave(running)
            running.abandon()
        if running.failure is not None:
            raise StoreError(f"its lines cannot be read: {running.failure}") from running.failure
        return stop if running.lines.left else ""

    async def _take_results(self, run: Run[object], running: RunningBatch) -> None:
        async with run:
            async for result in run.results():
                running.take(result)

    async def _tell_progress(self, running: RunningBatch) -> None:
        """Write the numbers of a batch now and then, for other processes and for the time after a kill."""
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
        """Delete the run of a batch that has ended, if it is in Redis: everything is in the files."""
        if self._store:
            with suppress(StoreError):
                await in_thread(delete_run, StoreAddress.parse(f"{self._store}/{RUNS_PREFIX}{id}"))

    async def forget_runs(self) -> None:
        """Delete what a process that was killed has left in Redis. Runs of other servers stay."""
        if self._store:
            names = await in_thread(run_names, StoreAddress.parse(self._store, named=False))
            for id in [name.removeprefix(RUNS_PREFIX) for name in names if name.startswith(RUNS_PREFIX)]:
                batch = await in_thread(self._catalog.batch, id)
                if batch is not None and batch.is_over:
                    await self.forget_run(id)

    async def _put(self, batch: ServedBatch, files: list[StoredFile] | None = None) -> None:
        """Write a batch that has ended, with the notice to its tenant."""
        notice = notice_of(batch, self._now())
        await in_thread(self._catalog.put_batch, batch, files or [], notice)
        self.ended[batch.tenant, batch.status] += 1
        log_batch(batch)
        self._notify()

    # How many runs are open

    async def _wait_open(self, batch: ServedBatch) -> None:
        """Wait until few batches of the tenant are open, or until this one is cancelled or expires."""
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
        waiting, opened = self._waiting.get(tenant, {}), self._open.setdefault(tenant, set())
        # A batch with an earlier deadline than all open ones does not wait for them, and none waits for one whose
        # model cannot be answered now.
        for id, (deadline, turn) in sorted(waiting.items(), key=lambda item: item[1][0]):
            known = [self.running[each].batch for each in opened if each in self.running]
            stuck = sum(bool(each.model and self._turnstile.stopped(each.model)) for each in known)
            if len(opened) - stuck >= OPEN_PER_TENANT and deadline >= min(
                (each.deadline for each in known), default=inf
            ):
                return
            if not turn.done():
                opened.add(id)
                turn.set_result(None)
