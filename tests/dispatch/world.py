"""Simulated servers and rows for the dispatcher, on a virtual clock.

A server has a mode, which may change at any time. Some rows break every server that they reach."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Literal

from batch_agent.backends.base import Backend, ModelRequest, OnToolCall, Probe
from batch_agent.dispatch.policy import Observer, Question
from batch_agent.errors import BackendError, BadResponse, RateLimited, Rejected, Unavailable
from batch_agent.messages import Reply
from batch_agent.scheduler.server_state import ServerState

Mode = Literal[
    "good",
    "slow",
    "dead",  # refuses connections
    "stuck",  # accepts requests and answers none; its probe fails
    "mute",  # the same, but its probe answers
    "500",  # its probe answers
    "502",  # its probe fails
    "503",  # too much to do, whatever is in flight; its probe answers
    "429",  # the same
    "garbage",  # also to its probe
]
MODES: tuple[Mode, ...] = ("good", "slow", "dead", "stuck", "mute", "500", "502", "503", "429", "garbage")
HIDDEN = ("mute", "500", "503")  # trouble that the probe does not show, and that may be a row's own
Kind = Literal["good", "refused", "breaks", "crashes"]

SECONDS, SLOW_SECONDS, RESTART_SECONDS = 0.2, 4.0, 5.0


class SimulatedServer:
    """``has_probe``: it has a page that says whether it is up."""

    def __init__(self, name: str, *, has_probe: bool = True) -> None:
        self.name, self.has_probe = name, has_probe
        self.known = ServerState(name)
        self.inflight = 0
        self.mode: Mode = "good"
        self.since = 0.0  # when the mode changed
        self.hidden_at = -1e9  # when it was last in trouble that its probe did not show
        self._back_at = 0.0  # it crashed, and restarts
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_dead(self) -> bool:
        return self.mode == "dead" or asyncio.get_running_loop().time() < self._back_at

    @property
    def is_hidden(self) -> bool:
        return self.mode in HIDDEN or (not self.has_probe and self.mode not in ("good", "slow", "dead"))

    def set_mode(self, mode: Mode) -> None:
        now = asyncio.get_running_loop().time()
        if self.is_hidden:
            self.hidden_at = now
        self.mode, self.since = mode, now
        self._wake()

    def _wake(self) -> None:
        """Requests in flight look again at what the server does."""
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    async def answer(self, kind: Kind) -> Reply:
        if self.is_dead:
            raise Unavailable("connection refused", unreached=True)
        self.inflight += 1
        try:
            return await self._serve(kind)
        finally:
            self.inflight -= 1

    async def _serve(self, kind: Kind) -> Reply:
        self._check()
        await asyncio.wait([self._changed], timeout=SLOW_SECONDS if self.mode == "slow" else SECONDS)
        while self.mode in ("stuck", "mute") and not self.is_dead:
            await asyncio.wait([self._changed])
        if kind == "crashes" and not self.is_dead:
            self._back_at = asyncio.get_running_loop().time() + RESTART_SECONDS
            self._wake()
        if self.is_dead:
            raise Unavailable("the connection was reset")
        self._check()
        if kind == "breaks":
            raise Unavailable("500", status=500)
        if kind == "refused":
            raise Rejected("400", status=400)
        return Reply("ok")

    def _check(self) -> None:
        match self.mode:
            case "500" | "502":
                raise Unavailable(self.mode, status=int(self.mode))
            case "503":
                raise Unavailable("503", status=503, overload=True)
            case "429":
                raise RateLimited("429", status=429)
            case "garbage":
                raise BadResponse("what came back is not valid HTTP")

    def probe(self) -> Probe:
        if self.is_dead:
            return Probe("down", "connection refused")
        if not self.has_probe:
            return Probe("unknown")
        return Probe("down" if self.mode in ("stuck", "502", "garbage") else "up")


class World(Backend):
    """The servers as a backend that is only probed: a row sends itself."""

    def __init__(self, servers: Iterable[SimulatedServer]) -> None:
        self.simulated = {server.name: server for server in servers}

    @property
    def name(self) -> str:
        return "world://"

    @property
    def servers(self) -> Mapping[str, ServerState]:
        return {name: server.known for name, server in self.simulated.items()}

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        raise NotImplementedError

    async def probe(self, endpoint: str = "") -> Probe:
        await asyncio.sleep(0.01)
        return self.simulated[endpoint].probe()


class Row(Question, Observer):
    """A Question, its Observer, and what became of it."""

    def __init__(self, world: World, kind: Kind = "good") -> None:
        self.kind = kind
        self.asked: list[str] = []  # endpoints, in order
        self.starts = self.ends = 0
        self.result: Reply | BaseException | None = None
        self._world = world

    async def send(self, endpoint: str) -> Reply:
        self.asked.append(endpoint)
        return await self._world.simulated[endpoint].answer(self.kind)

    def sent(self, queued: float) -> None:
        self.starts += 1

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        self.ends += 1

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        self.ends += 1
