"""A week of a server in virtual time: tenants with batches, and everything that goes wrong meanwhile.

``make soak-serve SEEDS=200`` plays that many weeks, over all cores or ``JOBS=``; ``SEED=n`` plays one again. Servers
of models fail with every status, hang and hold; the server is killed (its directory is copied at that moment, and the
next start works on the copy), its clock jumps, its directory is away, its disk is full. At the end every batch is
final, every custom_id has one outcome, no answer was paid for twice without a reason, no window was shorter, no tenant
is over its limit, and nothing of a batch is left in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import process_time
from typing import Any, TypeVar, TypeVarTuple
from unittest.mock import Mock

import orjson
from aiohttp import web
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from tests.serve.served import CHAT, OVER, chat
from tests.simulation.loop import answer, fail

from batch_agent.door import RequestRefused
from batch_agent.errors import BatchAgentError
from batch_agent.gateway.client_request import ClientRequest
from batch_agent.messages import Usage
from batch_agent.run.run import Run
from batch_agent.scheduler.core import Ticket
from batch_agent.serve import ServeOptions, asking, batches, line_scheduler, server, upstreams, webhooks
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.clock import RATE
from batch_agent.serve.lines import BatchLines
from batch_agent.serve.models import ServedModel, ServedModels
from batch_agent.serve.recovery import check
from batch_agent.serve.running_batch import RunningBatch
from batch_agent.serve.server import BatchService
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend
from batch_agent.testing.clock import Ready, VirtualClockLoop
from batch_agent.testing.replies import ScriptedReply

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HOUR, DAY = 3600.0, 86400.0
WEEK = 7 * DAY
EPOCH = 1_750_000_000.0
TENANTS, BATCHES, MOST_LINES = 20, 9, 6
MOST_MEMORY_MB = 300  # that a process may take, however many weeks it has played
LIMITED = 0.3  # of the tenants have tokens per day
TOKENS = Usage(20, 0, 30)  # of an answer
# What a request has of its connection; one for all, because a mock takes long.
NETWORK = Mock(_reading_paused=False, max_field_size=8190, max_headers=128)
STATUSES = (401, 402, 403, 404, 408, 409, 425, 429, 500, 502, 503, 504, 529)
THREAD_SECONDS = 0.0015  # that work in a thread takes
SLACK = 60.0  # seconds by which a window may be shorter after a kill: the time is kept every half hour here
GONE = {Run, BatchLines, RunningBatch, ClientRequest, Ticket}  # what an idle server has none of
# How often parts look, so that a week does not have a million looks.
LOOKS = {
    (server, "BOOKS_SECONDS"): 1800.0,
    (server, "SWEEP_SECONDS"): 1800.0,
    (line_scheduler, "TICK_SECONDS"): 900.0,
    (upstreams, "LOOK_SECONDS"): 1800.0,
    (upstreams, "IDLE_SECONDS"): 3600.0,
    (upstreams, "LIST_SECONDS"): 6 * HOUR,
    (webhooks, "IDLE_SECONDS"): 6 * HOUR,
    (batches, "PROGRESS_SECONDS"): 900.0,
    (batches, "LOOK_SECONDS"): 1800.0,
    (asking, "LOOK_SECONDS"): 10.0,
}


class WeekLoop(VirtualClockLoop):
    """A loop without threads and sockets: what is handed to a thread is done at once, and answered a moment later. Work
    that takes three turns, and a look at sockets in each turn, would be a third of the CPU time of a week."""

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001
            self.call_later(THREAD_SECONDS, fail, future, error)
        else:
            self.call_later(THREAD_SECONDS, answer, future, result)
        return future

    def _wait(self, select: Callable[[float | None], Ready], sockets: int, timeout: float | None) -> Ready:
        if timeout is None:
            return super()._wait(select, 1, timeout)
        if timeout:
            self.stall(timeout)
        return []


@dataclass
class Wanted:
    """A batch of a client."""

    name: str
    tenant: int
    lines: list[str]
    bad: set[str]  # lines at fault
    window: float
    at: float
    cancel_at: float | None
    id: str = ""
    created: float = 0.0
    cancelled: bool = False
    over_at: float = 0.0  # when its client saw its end


@dataclass
class World:
    seed: int
    folder: Path
    wanted: list[Wanted] = field(default_factory=list)
    faults: list[tuple[float, float, str]] = field(default_factory=list)  # of the server of models: from, to, what
    kills: list[float] = field(default_factory=list)
    jumps: list[tuple[float, float]] = field(default_factory=list)
    aways: list[tuple[float, float]] = field(default_factory=list)
    fulls: list[tuple[float, float]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sessions: int = 0
    before: Counter[type] = field(default_factory=lambda: in_memory())  # of other tests in this process

    def __post_init__(self) -> None:
        random = Random(self.seed)
        for number in range(BATCHES):
            at = random.uniform(0, 6 * DAY)
            lines = [f"b{number}-l{line}" for line in range(random.randint(1, MOST_LINES))]
            bad = {line for line in lines if random.random() < 0.1}
            cancel = at + random.expovariate(1 / HOUR) if random.random() < 0.2 else None
            window = random.choice([HOUR, 6 * HOUR, DAY])
            self.wanted.append(Wanted(f"b{number}", random.randrange(TENANTS), lines, bad, window, at, cancel))
        for _ in range(random.randint(3, 8)):
            begin, what = random.uniform(0, 6.5 * DAY), random.choice([*map(str, STATUSES), "hang", "hold", "one"])
            self.faults.append((begin, begin + random.choice([10.0, 600.0, 2 * HOUR, 7 * HOUR]), what))
        # A fault and a kill hit what works: most of them come soon after a batch.
        self.kills = sorted(self._soon(random) for _ in range(random.randint(1, 3)))
        self.jumps = [(self._soon(random), random.choice([-1, 1]) * random.choice([HOUR, DAY, 30 * DAY]))]
        self.aways = [(begin, begin + random.choice([4.0, 2000.0])) for begin in [self._soon(random)]]
        self.fulls = [(begin, begin + random.choice([60.0, HOUR])) for begin in [self._soon(random)]]
        self.limits = [random.choice([100, 300, 1000]) if random.random() < LIMITED else None for _ in range(TENANTS)]
        self._random = random

    def _soon(self, random: Random) -> float:
        return random.choice(self.wanted).at + random.choice([0.0, 1.0, 60.0]) + random.expovariate(1 / 20.0)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return EPOCH + self.now() + sum(by for at, by in self.jumps if at <= self.now())

    def is_in(self, spans: list[tuple[float, float]]) -> bool:
        return any(begin <= self.now() < end for begin, end in spans)

    def script(self, request: Request) -> ScriptedReply:
        seconds = self._random.expovariate(1 / 10.0)
        line = request.text.partition(" ")[2]
        if any(line in wanted.bad for wanted in self.wanted):
            return Fail(400, latency=seconds)
        for begin, end, what in self.faults:
            if begin <= self.now() < end:
                match what:
                    case "hang":
                        return Hang()
                    case "hold":
                        return Fail(429, headers={"Retry-After": "86400"})
                    case "one" if not line.endswith("l0"):
                        continue
                    case "one":
                        return Fail(401)
                return Fail(int(what), latency=self._random.uniform(0, 2))
        return Answered(self, line, seconds)

    def complain(self, problem: str) -> None:
        self.problems.append(f"{problem} (at {self.now() / HOUR:.2f} h)")


class Answered(Say):
    """An answer that is counted when it is given."""

    def __init__(self, world: World, line: str, seconds: float) -> None:
        super().__init__("done", latency=seconds, usage=TOKENS)
        world.answered[line] += 1


class Service(BatchService):
    """A server in the world."""

    world: World

    def _has_room(self) -> bool:
        return not self.world.is_in(self.world.fulls)


mocked = partial(make_mocked_request, app=NETWORK, writer=NETWORK, protocol=NETWORK, transport=NETWORK)


async def ask(service: BatchService, key: str, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
    """Send a request past the door. Returns status and document."""
    given = {"Authorization": f"Bearer {key}", "Content-Length": str(len(body)), **headers}
    payload = StreamReader(NETWORK, 2**20, loop=asyncio.get_running_loop())
    payload.feed_data(body)
    payload.feed_eof()
    try:
        response = await service._handle(mocked(method, path, given, payload=payload))
    except RequestRefused as refused:
        return refused.status, {}
    assert isinstance(response, web.Response) and isinstance(response.body, bytes)
    return response.status, orjson.loads(response.body)


async def create(world: World, service: BatchService, wanted: Wanted) -> None:
    """Create a batch as a client does that tries again until it has an answer."""
    key = world.keys[wanted.tenant]
    content = b"".join(orjson.dumps(chat(line, max_tokens=30)) + b"\n" for line in wanted.lines)
    parts = [b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="x"\r\n\r\n' + content]
    form = b"".join(b"--B\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--B--\r\n"
    kind = "multipart/form-data; boundary=B"
    status, file = await ask(service, key, "POST", "/v1/files", form, **{"Content-Type": kind})
    if status == 200:
        body: dict[str, Any] = {"input_file_id": file["id"], "endpoint": CHAT}
        body["completion_window"] = f"{wanted.window:g}s"
        created = world.now()
        status, batch = await ask(service, key, "POST", "/v1/batches", orjson.dumps(body))
        if status == 200:
            wanted.id, wanted.created = batch["id"], created


async def be_a_client(world: World, service: BatchService, wanted: Wanted) -> None:
    while not wanted.id:
        await asyncio.sleep(max(1.0, wanted.at - world.now()))
        await create(world, service, wanted)
    if wanted.cancel_at is not None:
        await asyncio.sleep(max(0.0, wanted.cancel_at - world.now()))
        while not wanted.cancelled:
            status, _ = await ask(service, world.keys[wanted.tenant], "POST", f"/v1/batches/{wanted.id}/cancel")
            wanted.cancelled = status in (200, 409)
            await asyncio.sleep(5.0)
    while not wanted.over_at:
        status, batch = await ask(service, world.keys[wanted.tenant], "GET", f"/v1/batches/{wanted.id}")
        if status == 200 and batch["status"] in OVER:
            wanted.over_at = world.now()
        await asyncio.sleep(900.0)


async def move_away(world: World, data: Path) -> None:
    for begin, end in world.aways:
        if end > world.now():
            await asyncio.sleep(max(0.0, begin - world.now()))
            elsewhere = data.with_name(f"{data.name}-away")
            data.rename(elsewhere)
            try:
                await asyncio.sleep(end - world.now())
            finally:
                if data.exists():
                    world.complain("something was made in the place of the directory that was away")
                    shutil.rmtree(data)
                elsewhere.rename(data)


async def session(world: World, data: Path, until: float) -> Path:
    """Serve until a kill. Returns the directory as the kill has left it."""
    world.sessions += 1
    backend = ScriptedBackend(world.script)
    options = ServeOptions(
        data, port=0, reserve=0, drain=0.0, keep=30 * DAY, now=world.wall, elapsed=world.now, max_inflight=8
    )
    models = ServedModels({"m": ServedModel(backend, "scripted")})
    Service.world = world
    service = Service(options, models)
    if not world.keys:
        for number, limit in enumerate(world.limits):
            world.keys.append(service.catalog.add_tenant(Tenant(f"t{number}", tokens_per_day=limit)))

    async def ready(url: str, key: str) -> None:
        async with asyncio.TaskGroup() as clients:
            for wanted in world.wanted:
                clients.create_task(be_a_client(world, service, wanted))
            clients.create_task(move_away(world, data))
            clients.create_task(asyncio.sleep(max(0.0, until - world.now())))

    serving = asyncio.create_task(service.serve(ready))
    await asyncio.wait({serving}, timeout=max(0.0, until - world.now()))
    copy = data.with_name(f"session-{world.sessions}")
    is_last = until >= world_end()
    if is_last and not serving.done():
        world.problems += leftovers(service, world.before)
    while not data.exists():  # it is away: the kill comes a little later
        await asyncio.sleep(1.0)
    shutil.copytree(data, copy, symlinks=True)
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    shutil.rmtree(data)
    world.problems += [f"{len(backend.requests)} requests"] if backend.inflight else []
    return copy


def world_end() -> float:
    return WEEK + 30 * HOUR


def in_memory() -> Counter[type]:
    gc.collect()
    return Counter(filter(GONE.__contains__, map(type, gc.get_objects())))


def leftovers(service: BatchService, before: Counter[type]) -> Iterator[str]:
    """Yield what a server still has in memory when nothing is to be done. ``before``: of others in this process."""
    parts = {"batches": service.batches._live, "stops": service.batches._stops, "runs": service.batches.running}
    parts |= {
        "sources": service.line_scheduler.sources,
        "waiting": {k: v for k, v in service.batches._waiting.items() if v},
    }
    for name, part in parts.items():
        if part:
            yield f"{len(part)} {name} are left in memory: {list(part)[:3]}"
    if service.line_scheduler.inflight:
        yield f"{service.line_scheduler.inflight} lines are in flight"
    for kind, number in (in_memory() - before).items():
        yield f"{number} {kind.__name__} are left in memory"


def check_batch(world: World, data: Path, wanted: Wanted, batch: Any) -> Iterator[str]:
    if not batch.is_over:
        yield f"{wanted.name} is {batch.status}"
        return
    if batch.status == "failed":
        yield f"{wanted.name} failed: {batch.errors}"
        return
    folder = data / "batches" / batch.id
    outcomes: dict[str, dict[str, Any]] = {}
    for name in ("output.jsonl", "errors.jsonl"):
        for raw in (folder / name).read_bytes().splitlines() if (folder / name).exists() else []:
            line = orjson.loads(raw)
            if line["custom_id"] in outcomes:
                yield f"{wanted.name} has {line['custom_id']} twice"
            outcomes[line["custom_id"]] = line
    if outcomes.keys() != set(wanted.lines):
        yield f"{wanted.name} has outcomes of {sorted(outcomes)}"
    if batch.status == "expired" and wanted.over_at - wanted.created < wanted.window / (1 + RATE) - SLACK:
        yield f"{wanted.name} expired after {wanted.over_at - wanted.created:.0f} s of {wanted.window:g}"
    if batch.status == "cancelled" and not wanted.cancelled:
        yield f"{wanted.name} was cancelled by nobody"
    interruptions = len(world.kills) + len(world.aways)
    for line in wanted.lines:
        if world.answered[line] > 1 + interruptions:
            yield f"{line} was answered {world.answered[line]} times"
        response = outcomes.get(line, {}).get("response") or {}
        if response.get("status_code") == 200 and line not in wanted.bad and not world.answered[line]:
            yield f"{line} has an answer that nobody gave"


async def play(world: World) -> None:
    data = world.folder / "data"
    for kill in [*world.kills, world_end()]:
        if kill > world.now():
            data = await session(world, data, kill)
    catalog, findings = check(data, world.wall)
    with catalog:
        for wanted in world.wanted:
            if not wanted.id:
                world.complain(f"{wanted.name} was never created")
                continue
            batch = catalog.batch(wanted.id)
            if batch is None:
                world.complain(f"{wanted.name} is gone")
                continue
            world.problems += check_batch(world, data, wanted, batch)
        world.problems += [str(finding) for finding in findings]
        for tenant, day, tokens in catalog._rows("SELECT tenant, day, tokens FROM usage"):
            limit = world.limits[int(tenant[1:])] if tenant.startswith("t") else None
            if limit is not None and int(tokens) > limit:
                world.complain(f"{tenant} used {tokens} of {limit} on day {day}")
    if (data / "lost").exists():
        world.complain(f"lost: {[str(path) for path in (data / 'lost').rglob('*')]}")


@contextmanager
def looking_seldom() -> Iterator[None]:
    with ExitStack() as undone:
        for (module, name), seconds in LOOKS.items():
            undone.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, seconds)
        yield


def play_seed(seed: int) -> World:
    """Play one week."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would take most of the time for syncing
    with tempfile.TemporaryDirectory(prefix="soak-serve-", dir=memory) as folder, looking_seldom():
        world = World(seed, Path(folder))
        NETWORK.reset_mock()  # it remembers what was done with it
        with asyncio.Runner(loop_factory=WeekLoop) as runner:
            try:
                runner.run(play(world))
            except BatchAgentError as error:
                world.problems.append(f"{type(error).__name__}: {error}")
    return world


@dataclass(frozen=True, slots=True)
class Played:
    """What is said of a week. ``memory_mb``: the most that its process has taken so far."""

    seed: int
    sessions: int
    problems: tuple[str, ...]
    cpu: float
    memory_mb: int


def played(seed: int) -> Played:
    logging.getLogger("batch_agent").setLevel(logging.CRITICAL)
    began = process_time()
    world = play_seed(seed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    problems = list(world.problems)
    if memory > MOST_MEMORY_MB:
        problems.append(f"the process takes {memory} MB")
    return Played(seed, world.sessions, tuple(problems), process_time() - began, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.seed is not None:
        world = play_seed(options.seed)
        print(f"seed {options.seed}: {world.sessions} sessions", *world.problems, sep="\n  ")
        return int(bool(world.problems))
    weeks = sessions = failed = memory = 0
    cpu = 0.0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        from tests.serve import soak as here  # another process does not import what was started with -m

        for one in pool.map(here.played, range(options.seeds), chunksize=5):
            weeks, sessions, cpu = weeks + 1, sessions + one.sessions, cpu + one.cpu
            failed, memory = failed + bool(one.problems), max(memory, one.memory_mb)
            if one.problems:
                print(f"seed {one.seed} fails: make soak-serve SEED={one.seed}", *one.problems, sep="\n  ", flush=True)
            if weeks % 50 == 0 or weeks == options.seeds:
                told = f"{weeks} weeks, {sessions} sessions; {cpu:.0f} s of CPU, {memory} MB; {failed} failed"
                print(told, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
