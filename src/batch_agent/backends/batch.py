"""Providers' batch APIs as a Backend: requests are collected into a wave, a wave is one job, answers come hours later.

``infer`` joins the wave being collected and waits. A wave is sent when it is full, or when no request has joined for a
moment. So the rows of a run are one job, and agents with tools need one job per turn. Nothing here starts a task: one
of the waiting callers drives the wave, and if it is cancelled, the next caller does. Batch APIs have no callback, so
the driver polls the job at growing intervals.

The ledger in the record of the run has a wave before it is sent. A request is identified by a hash of its body, which
is also its id in the job: a resumed run sends the same request, finds the job that contains it, and waits for that job.
A worker that takes a row over from another one finds the other worker's job in the same way.
If a job's id was lost, with the process or with the answer to its submission, the job is searched at the provider. Its
requests are sent again only when it is certain that no job exists. Each answer is delivered once. A request that the
job left undone (expired, cancelled, failed on the provider's side) fails with a retryable error and joins the next
wave.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Any, Self, TypeVar
from urllib.parse import quote
from zlib import crc32

import orjson

from batch_agent.backends.anthropic.answer import PAUSED
from batch_agent.backends.base import Backend, Capabilities, JobLines, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.http.backend import HttpBackend, HttpClient, Route
from batch_agent.backends.http.wire import Naming, mapping, object_of, objects_of, report_calls
from batch_agent.blocking import in_thread
from batch_agent.errors import BackendError, Rejected, StoreError, Unavailable
from batch_agent.messages import JsonObject, Reply

T = TypeVar("T")

GATHER_SECONDS = 1.0  # the wave is sent when no request has joined for this long
FIRST_LOOK = 1.0  # seconds between the first two polls of a job
LONGEST_LOOK = 60.0
LOOK_GROWTH = 1.5  # factor from one pause to the next
PATIENCE_SECONDS = 900.0  # of an unreachable provider, before the waiting rows fail
MOST_KNOCKS = 4  # at a provider that was never reached: its address may be wrong, so fail soon
GOODBYE_SECONDS = 5.0  # to cancel jobs that no run will resume
CHECK = b',"check":'
# Polls between the searches for a job whose submission was not answered: the provider may still be making it when the
# process that sent it is gone, and a new job may not be listed yet.
UNLISTED_LOOKS = (10, 50)
CLOCKS_DIFFER = 86_400.0  # seconds by which a provider's clock may be behind ours
PRICE = 0.5  # of the normal price, at every provider


@dataclass(frozen=True, slots=True)
class State:
    """The state of a job as its provider reports it. ``failed`` is the reason why none of its requests will be
    answered, or ""."""

    done: bool
    failed: BackendError | None = None
    places: Sequence[str] = ()  # locations of its answers


RESULT_BYTES = 2 * 1024**3  # limit for all answers of a job

Answer = bytes | BackendError
"""A complete answer in its wire's format, or the error in its place."""


class JobService(ABC):
    """One provider's batch API, over one HTTP client. ``names_jobs``: a job carries the name that we gave it."""

    most_requests: int  # of one job
    most_bytes: int  # of all bodies of one job
    names_jobs: bool

    def __init__(self, http: HttpClient, path: str) -> None:
        """``path`` is the route that creates jobs."""
        self.http, self._path = http, path
        self.batches = http.route("POST", path, once=True)  # a job created twice is paid for twice

    @abstractmethod
    async def submit(self, bodies: Mapping[str, bytes], wave: str) -> str:
        """Create a job for these requests and return its id. ``wave`` is our own name for it."""

    @abstractmethod
    async def candidates(self, wave: Wave) -> list[str]:
        """Return the jobs that may belong to a wave whose job's id was lost. If jobs carry names, this is the one with
        the name of the wave. Empty: the job was never created."""

    @abstractmethod
    async def look(self, job: str) -> State: ...

    @abstractmethod
    async def answers(self, state: State) -> Mapping[str, Answer]:
        """Return the answers by request. A request that the job does not mention is missing."""

    @abstractmethod
    def answer_in(self, row: JsonObject) -> Answer:
        """Return the answer in a result line."""

    async def cancel(self, job: str) -> None:
        await self.ask(self.http.route("POST", f"{self.path_of(job)}/cancel"), b"{}")

    def path_of(self, job: str) -> str:
        return f"{self._path}/{quote(job, safe='')}"

    async def read_lines(self, path: str) -> dict[str, Answer]:
        """Return the answers in a file of result lines, in any order. There are many, so a thread parses them."""
        content = await self.ask(self.http.route("GET", path, max_bytes=RESULT_BYTES))

        def read() -> dict[str, Answer]:
            rows = map(self.document, filter(None, map(bytes.strip, content.split(b"\n"))))
            return {str(row.get("custom_id")): self.answer_in(row) for row in rows}

        return await in_thread(read)

    async def ask(self, route: Route, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        return await self.http.send(route, body, headers=headers) or b""

    async def listed(self, query: str, cursor: str, since: float | None) -> AsyncIterator[JsonObject]:
        """Yield all jobs created since then, newest first. ``cursor`` names the parameter for the next page."""
        after = ""
        while True:
            page = self.document(await self.ask(self.http.route("GET", f"{self._path}?{query}{after}")))
            found = objects_of(page.get("data"))
            for job in found:
                made = self.made_at(job)
                if since is not None and made is not None and made < since - CLOCKS_DIFFER:
                    return
                yield job
            if not found or page.get("has_more") is not True:
                return
            after = f"&{cursor}={quote(str(found[-1].get('id')), safe='')}"

    @abstractmethod
    def made_at(self, job: JsonObject) -> float | None:
        """Return when the job was created, as Unix time; None if that is not reported."""

    def document(self, body: bytes) -> JsonObject:
        return object_of(body, self.batches.faults)

    def id_of(self, body: bytes) -> str:
        """Return the id in the provider's answer to the creation of a job or a file."""
        made = self.document(body).get("id")
        if not isinstance(made, str) or not made:
            raise Rejected(f"{self.batches.faults.where}: the answer has no id, so this is no batch API")
        return made


@dataclass(eq=False, slots=True)
class Wave:
    """One job, from its first request to its last answer."""

    name: str
    job: str | None = None  # None while requests are collected
    bodies: dict[str, bytes] = field(default_factory=dict)  # not known to be sent
    rows: dict[str, str] = field(default_factory=dict)  # request → the row that sent it
    requests: tuple[str, ...] = ()  # set when it is sent
    tried: bool = False  # sending was started, in this session or an earlier one, and may have succeeded
    since: float | None = None  # when that was, Unix time
    done: bool = False
    ours: bool = False  # this process has sent it, or waited for it
    answers: dict[str, Answer] = field(default_factory=dict)  # after the end, the answers not yet delivered
    size: int = 0
    waiting: dict[str, asyncio.Future[Answer]] = field(default_factory=dict)
    joined_at: float = 0.0
    full: bool = False
    driven: asyncio.Lock = field(default_factory=asyncio.Lock)


class JobBackend(Backend):
    """``wire`` writes requests and reads answers; ``service`` talks to the provider."""

    def __init__(
        self,
        wire: HttpBackend[Any],
        service: JobService,
        *,
        gather: float = GATHER_SECONDS,
        look: float = FIRST_LOOK,
    ) -> None:
        self._wire, self._service = wire, service
        self._name = wire.name.replace("://", "-batch://", 1)
        self._gather, self._look = gather, look
        self._gathering: Wave | None = None
        self._waves: list[Wave] = []  # sent, with answers not yet delivered
        # Requests that may have been sent, without a waiting caller.
        self._known: dict[str, list[tuple[Wave, str]]] = {}
        self._elsewhere: dict[tuple[str, str], list[tuple[Wave, str]]] = {}  # the same of other workers, and by row
        self._reading = asyncio.Lock()  # held while the ledger is read
        self._readings = 0  # of the ledger
        self._promised: Counter[str] = Counter()  # requests reported as already paid
        self._well = True  # every run that used this backend has ended without an error
        self._ledger: JobLedger | None = None
        self._outlasts = False  # the ledger is there after the run has ended
        self._reached = False  # the provider has answered at least once
        self._entered = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        known = self._wire.capabilities
        return Capabilities(
            native_schema=known.native_schema,
            schema_with_tools=known.schema_with_tools,
            images=known.images,
            documents=known.documents,
            logprobs=known.logprobs,
            streaming=False,
            default_inflight=self._service.most_requests,
            patient=True,
            price=PRICE,
        )

    def keep(self, record: JobLines, *, outlasts: bool) -> None:
        if not self._entered:  # else an outer run has set it
            self._ledger = JobLedger(record)
            self._outlasts = outlasts

    async def __aenter__(self) -> Self:
        await self._wire.__aenter__()
        try:
            await self._service.http.__aenter__()
            if not self._entered and self._ledger is not None:
                await self._pick_up(self._ledger)
        except BaseException:
            await self._wire.__aexit__(None, None, None)
            raise
        self._entered += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._entered -= 1
        self._well = self._well and exception[0] is None
        try:
            if not self._entered:
                await self._leave(well=self._well)
        finally:
            await self._service.http.__aexit__(*exception)
            await self._wire.__aexit__(*exception)

    def check(self, shape: RequestShape) -> None:
        self._wire.check(shape)

    def answer_limit(self, shape: RequestShape) -> int | None:
        return self._wire.answer_limit(shape)

    async def models(self) -> list[str]:
        return await self._wire.models()

    async def probe(self, endpoint: str = "") -> Probe:
        return await self._wire.probe()

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        body = self._wire.body_of(request)
        answer = await self._answer(body, request.job_id)
        if isinstance(answer, BackendError):
            raise copy(answer)  # several callers may have received the same error
        reply = self._wire.read_whole(answer, Naming(request.conversation.messages, self._wire.faults))
        reply = self._wire.finished(reply, request.shape)
        report_calls(reply, on_tool_call)
        return reply

    def has_bought(self, request: ModelRequest) -> bool:
        digest = _digest(self._wire.body_of(request))
        bought = len(self._known.get(digest, ())) > self._promised[digest]
        self._promised[digest] += bought
        return bought

    # Waves

    async def _answer(self, body: bytes, row: str) -> Answer:
        digest = _digest(body)
        promised = self._promised[digest] > 0
        self._promised[digest] -= promised
        await self._look_elsewhere()
        # The latest first, each once. A request that failed then is sent again.
        while known := self._known.get(digest) or self._elsewhere.get((digest, row)):
            wave, own = known.pop()
            answer = await self._wait(wave, own)
            if isinstance(answer, bytes) or not wave.done:
                return answer
        if promised:  # but only after a new cost reservation
            again = Unavailable(f"{self._name}: the recorded job does not contain this answer", unreached=True)
            again.second_hand = True
            return again
        wave, own = self._join(digest, body, row)
        return await self._wait(wave, own)

    def _remember(self, wave: Wave, own: str) -> None:
        """Make the requests of a wave available to callers that send them again."""
        self._known.setdefault(_digest_in(own), []).append((wave, own))

    def _join(self, digest: str, body: bytes, row: str) -> tuple[Wave, str]:
        service, wave = self._service, self._gathering
        if wave is not None:
            wave.full = len(wave.bodies) >= service.most_requests or wave.size + len(body) > service.most_bytes
            wave = None if wave.full else wave
        if wave is None:
            wave = self._gathering = Wave(secrets.token_hex(8))
        own, again = digest, 0
        while own in wave.bodies:  # two rows with identical requests need two answers
            again += 1
            own = f"{digest}-{again}"
        wave.bodies[own], wave.rows[own] = body, row
        wave.size += len(body)
        wave.joined_at = _now()
        return wave, own

    async def _wait(self, wave: Wave, own: str) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        wave.waiting[own] = answer
        try:
            while not answer.done():
                async with wave.driven:
                    if not answer.done():
                        await self._drive(wave)
            return answer.result()
        finally:
            wave.waiting.pop(own, None)
            if not wave.requests:  # cancelled before anything was sent
                wave.size -= len(wave.bodies.pop(own, b""))
            elif wave.tried and not (wave.done and answer.done()):
                self._remember(wave, own)

    async def _drive(self, wave: Wave) -> None:
        """Take the wave to its end and answer every waiting caller. Answers for later callers are kept."""
        answers = wave.answers
        try:
            if not wave.done:
                answers = wave.answers = await self._finish(wave)
        except BackendError as failure:
            answers = dict.fromkeys(wave.waiting, failure)
        for own, waiting in wave.waiting.items():
            if not waiting.done():
                waiting.set_result(answers.pop(own))
        if wave.done and not wave.answers and wave in self._waves:
            self._waves.remove(wave)

    async def _finish(self, wave: Wave) -> dict[str, Answer]:
        wave.ours = True
        if wave.job is None:
            await self._submit(wave)
        if wave.job is None:
            wave.done = True
            never = Unavailable(f"{self._name}: the job of an earlier session was never created")
            return dict.fromkeys(wave.requests, never)
        job = wave.job
        state = await self._patiently(lambda: self._until_done(job))
        found = {} if state.failed is not None else await self._patiently(lambda: self._service.answers(state))
        missing = state.failed or Unavailable(f"{self._name}: job {wave.job} ended without an answer to this request")
        for failure in (missing, *found.values()):
            if isinstance(failure, BackendError):
                failure.second_hand = True
        wave.done = True
        return {own: found.get(own, missing) for own in wave.requests}

    async def _submit(self, wave: Wave) -> None:
        """Create the job of the wave. No job is created if an earlier session recorded that it would send the wave and
        did not."""
        # Each request that joins meanwhile extends the wait.
        while not wave.tried and not wave.full and (left := wave.joined_at + self._gather - _now()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        if self._gathering is wave:
            self._gathering = None
        if not wave.bodies and self._ledger is not None:  # another worker may have sent it meanwhile
            wave.job = await self._ledger.job_of(wave.name)
            if wave.job is not None:
                return
        if wave.bodies and not wave.requests:
            wave.requests = tuple(wave.bodies)
            wave.since = time.time()
            self._waves.append(wave)
            if self._ledger is not None:
                await self._ledger.intend(wave.name, {own: wave.rows[own] for own in wave.requests})
        wave.job = await self._patiently(lambda: self._place(wave))
        if wave.job is not None:
            wave.bodies.clear()
            if self._ledger is not None:
                await self._ledger.sent(wave.name, wave.job)

    async def _place(self, wave: Wave) -> str | None:
        """Return the job's id. A job that may already exist is searched first, so that it is not paid twice."""
        if wave.tried:
            job = await self._find(wave)
            if job is not None or not wave.bodies:
                return job
        wave.tried = True
        return await self._service.submit({own: wave.bodies[own] for own in wave.requests}, wave.name)

    async def _find(self, wave: Wave) -> str | None:
        """Return the job of a wave that was sent without an answer; None if it is certain that there is none."""
        others = {other.job for other in self._waves}
        for looks in (*UNLISTED_LOOKS, 0):
            for job in await self._service.candidates(wave):
                if self._service.names_jobs:
                    return job
                if job not in others:
                    state = await self._until_done(job)
                    if state.failed is None and (await self._service.answers(state)).keys() == set(wave.requests):
                        return job
                    others.add(job)
            await asyncio.sleep(self._look * looks)
        return None

    async def _until_done(self, job: str) -> State:
        pause = self._look
        while not (state := await self._service.look(job)).done:
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK, pause * LOOK_GROWTH)
        return state

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry temporary errors here, and not in the engine: a row that returned to the engine would start a job of
        its own."""
        began = _now()
        pause = self._look
        knocks = 0
        while True:
            try:
                answer = await ask()
            except BackendError as error:
                knocks += 1
                never = error.unreached and not self._reached and knocks >= MOST_KNOCKS
                if not error.retryable or never or _now() - began > PATIENCE_SECONDS:
                    raise
                await asyncio.sleep(max(pause, error.retry_after or 0.0))
                pause = min(LONGEST_LOOK, pause * LOOK_GROWTH)
            else:
                self._reached = True
                return answer

    # Across sessions

    async def _pick_up(self, ledger: JobLedger) -> None:
        """Load recorded waves. A job that may exist is searched when one of its requests is sent again."""
        for wave in await ledger.read():
            self._waves.append(wave)
            for own in wave.requests:
                self._remember(wave, own)

    async def _look_elsewhere(self) -> None:
        """Load waves that other workers have sent meanwhile. Their requests are found by row: a worker that sends a
        request of the same row has taken the row over. Callers share one reading of the ledger if it began after they
        came."""
        if self._ledger is None:
            return
        came = self._readings
        async with self._reading:
            if self._readings > came:
                return
            self._readings += 1
            for wave in await self._ledger.read(new=True):
                self._waves.append(wave)
                for own, row in wave.rows.items():
                    self._elsewhere.setdefault((_digest_in(own), row), []).append((wave, own))

    async def _leave(self, *, well: bool) -> None:
        left = self._waves
        self._waves = []
        self._gathering = None
        self._known.clear()
        self._elsewhere.clear()
        if self._ledger is not None and well:  # every delivered answer is recorded
            await self._ledger.close({w.name: tuple(w.answers) if w.done else w.requests for w in left})
        if self._outlasts:
            return
        # No run will resume these jobs, and unfinished requests need not be paid for.
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                for wave in left:
                    job = await self._find(wave) if wave.job is None and wave.tried else wave.job
                    if job is not None and wave.ours and not wave.done:
                        await self._service.cancel(job)


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=16).hexdigest()


def _digest_in(own: str) -> str:
    """Return the digest of a request from its id, which begins with it."""
    return own.partition("-")[0]


def _now() -> float:
    return asyncio.get_running_loop().time()


class JobLedger:
    """Lines of JSON in the record of the run, each kept before the next step. Other workers may use the same record.

        {"wave": name, "requests": [id, …], "rows": [row, …], "at": seconds}    will be sent now
        {"wave": name, "job": id}                   the provider accepted it
        {"wave": name, "requests": [id, …]}         only these answers are not delivered yet
        {"wave": name, "over": true}                its answers were delivered and recorded

    Each line ends with the checksum of the rest, ``"check"``; lines of earlier versions have none. A line cut short by
    a crash is ignored. A damaged one is an error: its requests would be bought again.
    """

    def __init__(self, lines: JobLines) -> None:
        self._lines = lines
        self._known: set[str] = set()  # waves that this ledger returned or wrote

    async def read(self, *, new: bool = False) -> list[Wave]:
        """Return the waves with undelivered answers, oldest first; with ``new`` only those that this ledger did not
        return or write yet. Each was sent, or may have been."""
        found = [wave for wave in await in_thread(self._read) if not (new and wave.name in self._known)]
        self._known.update(wave.name for wave in found)
        return found

    async def intend(self, wave: str, rows: Mapping[str, str]) -> None:
        """Record that a wave will be sent now. ``rows`` are its requests, each with its row."""
        self._known.add(wave)
        await self._note({"wave": wave, "requests": [*rows], "rows": [*rows.values()], "at": time.time()})

    async def sent(self, wave: str, job: str) -> None:
        await self._note({"wave": wave, "job": job})

    async def job_of(self, wave: str) -> str | None:
        """Return the job of a wave; None if it is not recorded."""
        return next((entry.job for entry in await in_thread(self._read) if entry.name == wave), None)

    async def close(self, left: Mapping[str, Sequence[str]]) -> None:
        """Mark all waves that this ledger knows as over, except those in ``left``, which are recorded with their
        remaining requests."""

        def close() -> None:
            lines: list[dict[str, object]] = []
            for wave in self._read():
                if wave.name not in self._known:
                    continue  # of another worker
                if wave.name not in left:
                    lines.append({"wave": wave.name, "over": True})
                elif len(left[wave.name]) < len(wave.requests):
                    lines.append({"wave": wave.name, "requests": [*left[wave.name]]})
            self._append(lines)

        await in_thread(close)

    async def _note(self, line: dict[str, object]) -> None:
        await in_thread(self._append, [line])

    def _read(self) -> list[Wave]:
        waves: dict[str, Wave] = {}
        over: set[str] = set()
        for number, line in enumerate(self._lines.job_lines(), start=1):
            start, check, sum_of = line.rpartition(CHECK)
            try:
                if check and sum_of != b"%d}" % crc32(start):
                    raise ValueError("the checksum is wrong")
                note = orjson.loads(line)
                wave = waves.setdefault(note["wave"], Wave(note["wave"], tried=True))
            except (ValueError, KeyError, TypeError):
                if not check and not line.endswith(b"}"):
                    continue  # cut short by a crash
                raise StoreError(
                    f"line {number} of the record of batch jobs (jobs.jsonl; in Redis the list jobs) is damaged: its "
                    "requests could be bought twice. Restore a backup; or delete this line: its requests are then "
                    "sent again"
                ) from None
            wave.requests = tuple(note.get("requests", wave.requests))
            rows = dict(zip(wave.requests, note["rows"], strict=False)) if "rows" in note else wave.rows
            wave.rows = {own: rows[own] for own in wave.requests if own in rows}
            wave.job = note.get("job", wave.job)
            wave.since = note.get("at", wave.since)
            if note.get("over"):
                over.add(wave.name)
        return [wave for wave in waves.values() if wave.name not in over]

    def _append(self, lines: Sequence[dict[str, object]]) -> None:
        if lines:
            plain = [orjson.dumps(line)[:-1] for line in lines]
            self._lines.add_job_lines([b"%s%s%d}" % (line, CHECK, crc32(line)) for line in plain])


ENDPOINT = "/v1/chat/completions"
WAVE = "batch_agent_wave"  # in a job's metadata
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class OpenAIJobs(JobService):
    """OpenAI's batch API. It takes a file of requests and gives files of answers and of errors."""

    most_requests, most_bytes = 50_000, 190_000_000  # of 200 MB, minus room for the fields around a body
    names_jobs = True

    def __init__(self, http: HttpClient) -> None:
        super().__init__(http, "/batches")
        self._files = http.route("POST", "/files")

    async def submit(self, bodies: Mapping[str, bytes], wave: str) -> str:
        lines = b"".join(
            b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (own.encode(), ENDPOINT.encode(), body)
            for own, body in bodies.items()
        )
        kind, form = _multipart(lines)
        file = self.id_of(await self.ask(self._files, form, {"Content-Type": kind}))
        job: JsonObject = {
            "input_file_id": file,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "metadata": {WAVE: wave},
        }
        return self.id_of(await self.ask(self.batches, orjson.dumps(job)))

    async def candidates(self, wave: Wave) -> list[str]:
        async for job in self.listed("limit=100", "after", wave.since):
            if mapping(job.get("metadata")).get(WAVE) == wave.name:
                return [str(job["id"])]
        return []

    def made_at(self, job: JsonObject) -> float | None:
        made = job.get("created_at")
        return float(made) if isinstance(made, int | float) else None

    async def look(self, job: str) -> State:
        told = self.document(await self.ask(self.http.route("GET", self.path_of(job))))
        status = told.get("status")
        places = [str(place) for name in ("output_file_id", "error_file_id") if (place := told.get(name))]
        if status in OPEN:
            return State(done=False)
        if status == "failed":
            refused = f"{self.batches.faults.where}: job {job} was refused: {self.batches.faults.clean(_why(told))}"
            return State(True, Rejected(refused, status=400))
        if not places and status != "completed":  # expired or cancelled before anything was done
            return State(True, Unavailable(f"{self.batches.faults.where}: job {job} is {status} without any answer"))
        return State(True, places=places)

    async def answers(self, state: State) -> Mapping[str, Answer]:
        found: dict[str, Answer] = {}
        for place in state.places:
            # Answers take precedence over errors.
            found = await self.read_lines(f"/files/{quote(place, safe='')}/content") | found
        return found

    def answer_in(self, row: JsonObject) -> Answer:
        response = row.get("response")
        if isinstance(response, dict):
            status, body = response.get("status_code"), orjson.dumps(response.get("body"))
            if status == 200 or not isinstance(status, int):
                return body
            return self.batches.faults.answered(status, {}, body)
        error = row.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        if code in ("batch_expired", "batch_cancelled"):
            return Unavailable(f"{self.batches.faults.where}: the job ended before this request finished ({code})")
        return self.batches.faults.reported(error)


def _why(job: JsonObject) -> str:
    told = objects_of(mapping(job.get("errors")).get("data"))
    words = [str(error.get("message")) for error in told]
    return "; ".join(words[:3]) or "no reason given"


def _multipart(lines: bytes) -> tuple[str, bytes]:
    border = secrets.token_hex(16)
    head = (
        f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    )
    return f"multipart/form-data; boundary={border}", head.encode() + lines + f"\r\n--{border}--\r\n".encode()


class AnthropicJobs(JobService):
    """Anthropic's batch API. One HTTP request takes all requests of a job; the results are lines of JSON."""

    most_requests, most_bytes = 100_000, 245_000_000  # of 256 MB, minus room for the fields around a body
    names_jobs = False

    def __init__(self, http: HttpClient) -> None:
        super().__init__(http, "/messages/batches")

    async def submit(self, bodies: Mapping[str, bytes], wave: str) -> str:
        requests = b",".join(b'{"custom_id":"%b","params":%b}' % (own.encode(), body) for own, body in bodies.items())
        return self.id_of(await self.ask(self.batches, b'{"requests":[%b]}' % requests))

    async def candidates(self, wave: Wave) -> list[str]:
        """Return the jobs with the same number of requests: a job lists the ids of its requests only when it has
        ended."""
        jobs = self.listed("limit=1000", "after_id", wave.since)
        return [str(job.get("id")) async for job in jobs if _count(job) in (None, len(wave.requests))]

    def made_at(self, job: JsonObject) -> float | None:
        made = job.get("created_at")
        with suppress(ValueError):
            return datetime.fromisoformat(made).timestamp() if isinstance(made, str) else None
        return None

    async def look(self, job: str) -> State:
        told = self.document(await self.ask(self.http.route("GET", self.path_of(job))))
        return State(told.get("processing_status") == "ended", places=[job])

    async def answers(self, state: State) -> Mapping[str, Answer]:
        [job] = state.places
        return await self.read_lines(f"{self.path_of(job)}/results")

    def answer_in(self, row: JsonObject) -> Answer:
        told = mapping(row.get("result"))
        kind = told.get("type")
        message = told.get("message")
        if kind == "succeeded" and isinstance(message, dict):
            if message.get("stop_reason") == PAUSED:  # one of the server's own tools takes long
                return self.batches.faults.bad("the answer was paused, and a batch job cannot continue it")
            return orjson.dumps(message)
        if kind in ("expired", "canceled"):
            where = self.batches.faults.where
            return Unavailable(f"{where}: the job ended before this request finished ({kind})")
        return self.batches.faults.reported(told.get("error"))


def _count(job: JsonObject) -> int | None:
    """Return the number of requests in the job; None if not reported."""
    counts = job.get("request_counts")
    return sum(n for n in counts.values() if isinstance(n, int)) if isinstance(counts, dict) else None
