"""The world outside the process: model servers, tools that write, a disk, and an account of everything that happened.

The world outlives the processes that work in it. It complains the moment something happens that must not: a write that
was done before, a request whose answer is on disk, a request for a row whose result was delivered.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.faults import BusyDisk, FullDisk, Mode, Outage, Stall, Timed, ToolMode, ToolTrouble
from tests.simulation.loop import SimulatedLoop
from tests.simulation.model import answer, mark_of, notes_of

from batch_agent.messages import Usage
from batch_agent.testing import Cut, Fail, Malformed, Request, Say
from batch_agent.testing.replies import ScriptedReply

if TYPE_CHECKING:
    from tests.simulation.jobs import JobProvider

Row = tuple[int, str]  # version of the prompt, name


class ModelServer:
    """One server in a mode, which may change at any time. ``capacity``: requests beyond it are refused."""

    def __init__(self, name: str, world: World, capacity: int | None, rpm: int | None) -> None:
        self.name, self.world, self.capacity, self.rpm = name, world, capacity, rpm
        self.mode: Mode = "good"
        self.inflight = 0
        self._came: deque[float] = deque()  # requests of the last minute
        self._outage: Outage | None = None
        self._changed = asyncio.Event()

    def begin(self, outage: Outage) -> None:
        self._outage = outage
        self._set(outage.mode)

    def end(self, outage: Outage) -> None:
        if self._outage is outage:  # else another has begun since
            self._set("good")

    def _set(self, mode: Mode) -> None:
        self.mode = mode
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()

    async def reply(self, request: Request) -> ScriptedReply:
        self._count()
        if request.is_control:
            return await self._serve_control()
        mark = mark_of(request)
        self.inflight += 1
        try:
            if self.capacity is not None and self.inflight > self.capacity:
                return Fail(429, headers={"Retry-After": "1"})
            return await self._serve(request, mark)
        finally:
            self.inflight -= 1

    async def _serve_control(self) -> ScriptedReply:
        while (failure := self._failure()) is None and self.mode in ("stuck", "mute"):
            await self._changed.wait()
        return Say("OK", latency=0.1) if failure is None else failure

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        self._came.append(now)
        while self._came[0] < now - 60:
            self._came.popleft()
        if self.rpm is not None and len(self._came) > self.rpm:
            self.world.complain(f"{self.name} was sent {len(self._came)} requests in a minute")

    async def _serve(self, request: Request, mark: str) -> ScriptedReply:
        loop = asyncio.get_running_loop()
        chance = self.world.chance(f"{mark} {self.world.asked[mark]}")
        due = loop.time() + 10 ** chance.uniform(-1, 1) * (20 if self.mode == "slow" else 1)
        while (failure := self._failure()) is None and (self.mode in ("stuck", "mute") or loop.time() < due):
            left = None if self.mode in ("stuck", "mute") else due - loop.time()
            changed = self._changed
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                pass
        if failure is not None:
            return failure
        said = answer(request, self.world)
        return Cut(said) if self.mode == "cut" else said

    def _failure(self) -> Fail | Cut | Malformed | None:
        match self.mode:
            case "500" | "502" | "503" | "429":
                return Fail(int(self.mode))
            case "dead" | "reset":
                return Cut(Say(""), after_chunks=0)
            case "garbage":
                return Malformed(b"<html>It works!</html>")
        return None


class Disk:
    """How long things take that happen in threads, and whether a commit is possible."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._operations = 0
        self.busy_until = self.full_until = self.stalled_until = 0.0

    def seconds(self, now: float) -> float:
        self._operations += 1
        usual = self._world.chance(f"disk {self._operations}").uniform(0.0005, 0.01)
        return usual + max(0.0, self.busy_until - now)

    def was_held_up(self, since: float) -> bool:
        """Whether something that came at that time may have waited for long before it was written."""
        return max(self.busy_until, self.full_until, self.stalled_until) > since

    @property
    def is_full(self) -> bool:
        return asyncio.get_running_loop().time() < self.full_until


class World:
    """``provider`` has the batch API. ``wanted`` says how often each row is there, in any version of the inputs."""

    provider: JobProvider  # set when the world is made

    def __init__(self, seed: int, servers: int, capacity: int | None, rpm: int | None) -> None:
        self.seed = seed
        self.servers = [ModelServer(f"s{number}", self, capacity, rpm) for number in range(servers)]
        self.disk = Disk(self)
        self.tools: ToolMode = "good"
        self.wanted: Counter[Row] = Counter()
        self.usual: Counter[str] = Counter()  # answers of the undisturbed run
        self.problems: list[str] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.held: Counter[str] = Counter()  # answers in the record, after the latest session
        self.lost: Counter[str] = Counter()  # answers that did not reach it
        self.done: Counter[Row] = Counter()  # results that were delivered
        self.writes: Counter[str] = Counter()
        self.unsure: set[str] = set()  # writes that a model was told may not have been done
        self.tokens = 0  # that were paid for, with those of requests that were in flight at a kill
        self.max_tokens: int | None = None
        self.tokens_of: dict[str, int] = {}  # what each answer takes
        self.quiet_from = 0.0  # nothing goes wrong after this
        self.moves = 0  # answers, purchases, tool calls, writes and results: a run at work makes some now and then

    def chance(self, what: str) -> Random:
        """Randomness that depends on the seed and on what it is for, never on what happened before."""
        return Random(f"{self.seed} {what}")

    def complain(self, problem: str) -> None:
        self.problems.append(f"{asyncio.get_running_loop().time():.3f} s: {problem}")

    # What must not happen

    def note_request(self, mark: str) -> None:
        self.asked[mark] += 1
        row, wanted = row_of(mark), self.wanted_of(mark)
        if self.held[mark] >= wanted:
            self.complain(f"{mark} is on disk and is asked again")
        elif row is not None and self.done[row] >= wanted:
            self.complain(f"{mark} is asked although its row's result was delivered")

    def note_answer(self, mark: str, usage: Usage) -> None:
        self.moves += 1
        self.answered[mark] += 1
        self.tokens_of[mark] = usage.prompt_tokens + usage.completion_tokens
        self._pay(mark)

    def note_purchase(self, mark: str) -> None:
        """A request is paid for, and its answer will come."""
        self.note_request(mark)
        self.moves += 1
        self.answered[mark] += 1
        if self.answered[mark] > self.wanted_of(mark):
            self.complain(f"{mark} is bought {self.answered[mark]} times")

    def note_kill(self, inflight: Mapping[str, int]) -> None:
        """The servers go on with what the process had sent."""
        for mark, count in inflight.items():
            for _ in range(count):
                self._pay(mark)

    def _pay(self, mark: str) -> None:
        self.tokens += self.tokens_of.get(mark, 0)
        if self.max_tokens is not None and self.tokens > self.max_tokens:
            self.complain(f"{self.tokens} tokens are paid for, and {self.max_tokens} were allowed")

    def note_write(self, key: str) -> None:
        self.writes[key] += 1
        version, row = key.split(".")[:2]
        if self.writes[key] > max(1, self.wanted[int(version[1:]), row]):
            self.complain(f"{key} is written {self.writes[key]} times")

    def wanted_of(self, mark: str) -> int:
        """How many answers there should be."""
        row = row_of(mark)
        if row is not None:
            return max(1, self.wanted[row])
        return self.usual[mark] or max(self.wanted.values(), default=1)

    def note_told(self, key: str, written: bool) -> None:
        if not written:
            self.unsure.add(key)
        elif not self.writes[key]:
            self.complain(f"a model is told that {key} was written, and it was not")

    def want(self, rows: Mapping[Row, int]) -> None:
        for row, count in rows.items():
            self.wanted[row] = max(self.wanted[row], count)

    def missing_writes(self, rows: Mapping[Row, int]) -> list[str]:
        """Writes of these rows that were not done, although nothing disturbed them."""
        keys = {key: count for row, count in rows.items() for key in notes_of(*row)}
        return [key for key, count in keys.items() if self.writes[key] < count and key not in self.unsure]

    # What goes wrong

    def plan(self, faults: list[Timed], loop: SimulatedLoop) -> None:
        for fault in faults:
            self.quiet_from = max(self.quiet_from, fault.at + fault.seconds)
            match fault:
                case Outage():
                    server = self.servers[fault.server]
                    loop.call_at(fault.at, server.begin, fault)
                    loop.call_at(fault.at + fault.seconds, server.end, fault)
                case Stall():
                    loop.call_at(fault.at, self._stall, loop, fault.seconds)
                case BusyDisk():
                    loop.call_at(fault.at, self._set_busy, fault.at + fault.seconds)
                case FullDisk():
                    loop.call_at(fault.at, self._set_full, fault.at + fault.seconds)
                case ToolTrouble():
                    loop.call_at(fault.at, self._set_tools, fault.mode)
                    loop.call_at(fault.at + fault.seconds, self._set_tools, "good")

    @property
    def is_quiet(self) -> bool:
        return asyncio.get_running_loop().time() >= self.quiet_from

    def _stall(self, loop: SimulatedLoop, seconds: float) -> None:
        loop.stall(seconds)
        self.disk.stalled_until = loop.time()

    def _set_busy(self, until: float) -> None:
        self.disk.busy_until = until

    def _set_full(self, until: float) -> None:
        self.disk.full_until = until

    def _set_tools(self, mode: ToolMode) -> None:
        self.tools = mode


def row_of(mark: str) -> Row | None:
    version, *rest = mark.split()
    return (int(version[1:]), rest[0]) if len(rest) == 2 else None
