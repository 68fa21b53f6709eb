"""Fleet: many servers as one Backend.

The engine grants each turn one of the fleet's endpoints (``scheduler.routing``), and this file sends it there. A fleet
owns its servers. They share one transport, are entered on first use, join and leave (``add``, ``remove``, a hostfile
that changes), and their slots are shared by all runs that use them.

The fleet has a capability only if every server has it: a run builds its requests once for all of them.

A standby is a server with a model of its own, which is asked only while all other servers are down. Its requests are
those of the run with another model, and its replies name that model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote
from weakref import WeakKeyDictionary

from batch_agent.backends.address import Address
from batch_agent.backends.base import (
    Backend,
    Capabilities,
    Facts,
    Listener,
    Load,
    ModelRequest,
    OnToolCall,
    Probe,
    RequestShape,
    total_inflight,
)
from batch_agent.backends.registry import open_backend
from batch_agent.compiler.prices import find_prices
from batch_agent.errors import BackendError, SpecError, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint, Hostfile, Select, Traits, changes, free_name
from batch_agent.http.transport import Transport
from batch_agent.messages import Reply
from batch_agent.scheduler.server import Standby
from batch_agent.scheduler.server_state import ServerState


class OneLoop:
    """Binds ``what`` to one event loop. ``forget`` drops its state when that loop was closed."""

    def __init__(self, what: str, forget: Callable[[], None]) -> None:
        self._what, self._forget = what, forget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # two threads may call at the same time

    def bind(self) -> None:
        """Bind to the running loop. Raises SpecError if another uses it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._release_from(loop)
            self._loop = loop

    def check(self) -> bool:
        """Check like ``bind``, without binding; it also works without a running loop. Returns True if the state was
        dropped."""
        with self._lock:
            return self._release_from(running_loop())

    def release(self) -> None:
        self._loop = None

    def _release_from(self, running: asyncio.AbstractEventLoop | None) -> bool:
        if self._loop is None or self._loop is running:
            return False
        if not self._loop.is_closed():
            raise SpecError(
                f"the {self._what} is in use in another event loop: close it there first, or make one for each loop"
            )
        self._loop = None
        self._forget()
        return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


logger = logging.getLogger("batch_agent")

MOST_NAMED = 5  # models in a warning
ASK_SECONDS = 2.0  # for the other servers to list their models, once one of them has
INSIDE = ("vllm", "sglang", "dynamo", "http")  # schemes of servers inside the cluster, never reached through a proxy
TRAITS = tuple(each.name for each in fields(Traits))
STANDBY = ("when", "prices")  # what only a standby has
UNREACHABLE = "unreachable"  # the only value of ``when``

Given = str | AgentEndpoint | Mapping[str, object] | Backend


class Fleet(Backend):
    """``endpoints`` are URLs, hostfile lines, mappings with a ``url`` (and ``api_key``, ``headers``, ``model``,
    ``context``, ``weight``), or Backends. ``api_key`` and ``headers`` apply to endpoints without their own. A mapping
    with ``when`` is a standby, and may have ``prices``."""

    def __init__(
        self,
        endpoints: Iterable[Given],
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        environ: Mapping[str, str] = os.environ,
        sends: bool = True,
        name: str | None = None,
    ) -> None:
        self._api_key = api_key
        self._headers = dict(headers or {})
        self._environ = environ
        self._sends = sends
        self._inside = Transport(proxies=False)
        self._outside = Transport()
        self._servers: dict[str, FleetServer] = {}
        self._listeners: dict[Listener, None] = {}
        self._loop = OneLoop("fleet", self._forget_loop)
        self._users = 0
        self.hostfile: Hostfile | None = None  # that it follows
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()  # closing servers that have left
        if isinstance(endpoints, str):
            raise SpecError("a fleet is given a list of endpoints; for a hostfile write fleet://hosts.txt")
        for given in endpoints:
            self._register(self._make(given))
        if not self._servers:
            raise SpecError("a fleet needs at least one endpoint")
        if not self._primaries:
            raise SpecError("every endpoint of the fleet is a standby: give at least one without when=")
        places = [server.name.partition("://")[2] for server in self._servers.values()]
        shown = places if len(places) <= 3 else [*places[:2], f"{len(places) - 2} more"]
        self._name = name or f"fleet://{','.join(shown)}"

    @classmethod
    def from_hostfile(
        cls,
        path: str | Path,
        select: Select | None = None,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        environ: Mapping[str, str] = os.environ,
        sends: bool = True,
    ) -> Self:
        """Return a fleet of the hostfile's endpoints that have one of the given values for each tag of ``select``.
        While it is in use it follows the file."""
        hostfile = Hostfile(path, select)
        wanted = "&".join(f"{key}={value}" for key, values in hostfile.select.items() for value in values)
        fleet = cls(
            hostfile.read(),
            api_key=api_key,
            headers=headers,
            environ=environ,
            sends=sends,
            name=f"fleet://{path}{'?' if wanted else ''}{wanted}",
        )
        fleet.hostfile = hostfile
        return fleet

    def __repr__(self) -> str:
        return f"Fleet({self._name!r}, {len(self._present)} endpoints)"

    @property
    def name(self) -> str:
        return self._name

    @property
    def wires(self) -> frozenset[str]:
        """Return the wires that all of its servers accept. A standby accepts none: a client's own request has the model
        that the client asks for."""
        wires = [server.backend.wires if server.standby is None else frozenset[str]() for server in self._present]
        return frozenset.intersection(*wires) if wires else frozenset()

    @property
    def capabilities(self) -> Capabilities:
        able = [server.backend.capabilities for server in self._present]
        return Capabilities(
            native_schema=all(one.native_schema for one in able),
            schema_with_tools=all(one.schema_with_tools for one in able),
            schema_proven=all(one.schema_proven for one in able),
            schema_note=next((one.schema_note for one in able if one.schema_note), ""),
            streaming=all(one.streaming for one in able),
            images=all(one.images for one in able),
            documents=frozenset.intersection(*(one.documents for one in able)) if able else frozenset(),
            default_inflight=total_inflight(self.servers.values()),
            reports_load=any(one.reports_load for one in able),
            logprobs=any(one.logprobs for one in able),
        )

    # Servers that join and leave

    @property
    def _present(self) -> list[FleetServer]:
        return [server for server in self._servers.values() if not server.leaving]

    @property
    def _primaries(self) -> list[FleetServer]:
        return [server for server in self._present if server.standby is None]

    @property
    def servers(self) -> Mapping[str, ServerState]:
        return {server.name: server.known for server in self._present}

    @property
    def standbys(self) -> Mapping[str, Standby]:
        return {server.name: server.standby for server in self._present if server.standby is not None}

    def add(
        self, url: Given, *, model: str | None = None, context: int | None = None, weight: float | None = None
    ) -> str:
        """Add a server, also to running runs. Returns its name."""
        self._loop.check()
        server = self._make(url, {"model": model, "context": context, "weight": weight})
        self._register(server)
        self._tell()
        return server.name

    def remove(self, url: str) -> None:
        """Remove a server by its name or address. It is closed after its last answer."""
        self._loop.check()
        gone = [server for server in self._present if url in (server.address, server.name)]
        if not gone:
            raise SpecError(f"the fleet has no endpoint {url.rpartition('@')[2]!r}")
        if all(server in gone for server in self._primaries):
            raise SpecError("the last endpoint of a fleet cannot be removed: add another one first")
        self._remove(gone)
        self._tell()

    def _make(self, given: Given, traits: Mapping[str, object] | None = None) -> FleetServer:
        """Return a server that is not yet part of the fleet. Raises SpecError for invalid input."""
        tags = {name: value for name, value in (traits or {}).items() if value is not None}
        if isinstance(given, AgentEndpoint):
            tags = {**given.tags, **tags}
            given = given.address
        if isinstance(given, str):
            given = {"url": given}
        if isinstance(given, list | tuple | None):  # valid as backend=, but not as a member of a fleet
            what = type(given).__name__
            raise SpecError(f"a {what} cannot be an endpoint of a fleet: give the URL of a server")
        key = None
        transport = self._outside
        address = ""
        condition: dict[str, object] = {}
        if isinstance(given, Mapping):
            address = str(given.get("url"))
            tags = {**{name: value for name, value in given.items() if name in TRAITS}, **tags}
            own = {name: value for name, value in given.items() if name not in (*TRAITS, *STANDBY)}
            condition = {name: given[name] for name in STANDBY if name in given}
            if condition:  # it is another provider's, which must not see the key of the others
                given = own
            else:
                given = {"headers": self._headers, **own}
                key = None if own.get("api_key") else self._api_key
            scheme = address.partition("://")[0].lower()
            if scheme == "fleet":
                raise SpecError("a fleet cannot contain a fleet: list its endpoints")
            transport = self._inside if scheme in INSIDE else self._outside
        backend, _ = open_backend(
            given, model=None, api_key=key, environ=self._environ, sends=self._sends, transport=transport
        )
        try:
            read = Traits.read(tags)
            standby = _standby(condition, read.model, backend)
        except ValueError as error:
            raise SpecError(f"{backend.name}: {error}") from None
        if standby is not None:
            read = replace(read, model=None)  # it answers with its own, whichever is asked
        return FleetServer(address or backend.name, backend.name, backend, read, standby)

    def _register(self, server: FleetServer) -> None:
        """Add the server under a unique name: in-process engines have the same name, and a removed server may still be
        in use."""
        server.name = free_name(server.name, self._servers)
        self._servers[server.name] = server

    def _remove(self, servers: Iterable[FleetServer]) -> None:
        for server in servers:
            server.leaving = True
            if not server.inflight:
                self._let_go(server)

    def _let_go(self, server: FleetServer) -> None:
        if self._servers.pop(server.name, None) is not None and server.entered:
            task = asyncio.get_running_loop().create_task(server.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _follow(self, hosts: Sequence[AgentEndpoint]) -> None:
        """Apply a new version of the hostfile. Running requests stay where they are."""
        kept, gone, lines = changes(self._present, hosts)
        new = [self._make(host) for host in lines]  # raises before anything has changed
        traits = [(server, Traits.read(host.tags)) for server, host in kept]
        updated = [(server, read) for server, read in traits if server.traits != read]
        for server, read in updated:
            server.traits = read
        for server in new:
            self._register(server)
        self._remove(gone)
        if updated or new or gone:
            counts = len(new), len(gone), len(updated)
            logger.info("the hostfile has changed: %s endpoints joined, %s left, %s were updated", *counts)
            self._tell()

    # Runs that share the fleet

    def join(self, listener: Listener) -> None:
        self._listeners[listener] = None

    def leave(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener.changed()

    # A Backend

    def _forget_loop(self) -> None:
        """Drop the state of a closed event loop."""
        self._users = 0
        self._listeners.clear()
        self._closing.clear()
        for server in self._servers.values():
            server.forget_loop()

    async def _enter(self, server: FleetServer) -> None:
        self._loop.bind()
        await server.enter()

    async def __aenter__(self) -> Self:
        self._loop.bind()
        if not self._users and self.hostfile is not None:
            self._watching = asyncio.get_running_loop().create_task(self.hostfile.follow(self._follow))
        self._users += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._loop.check():
            return
        self._users -= 1
        if self._users:
            return
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*self._closing, *filter(None, [self._watching]), return_exceptions=True)
        for server in list(self._servers.values()):
            await server.close()
            if server.leaving:
                self._servers.pop(server.name, None)
        self._loop.release()

    def check(self, shape: RequestShape) -> None:
        kinds = {type(server.backend): server for server in self._present}
        for server in kinds.values():
            server.backend.check(server.shape(shape))

    def answer_limit(self, shape: RequestShape) -> int | None:
        limits = [server.backend.answer_limit(server.shape(shape)) for server in self._present]
        return None if None in limits else max(filter(None, limits), default=None)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if request.endpoint:
            return await self._infer(self._named(request.endpoint), request, on_tool_call)
        # Without a granted endpoint: the least busy one, and the next if it is unreachable.
        serving = [server for server in self._present if server.serves(request.shape.model)] or self._present
        error: BackendError = Unavailable(f"{self.name} has no server")
        for server in sorted(serving, key=lambda each: (each.standby is not None, each.inflight / each.traits.weight)):
            try:
                return await self._infer(server, request, on_tool_call)
            except BackendError as failure:
                error = failure
                if not failure.unreached:
                    break
        raise error

    def _named(self, endpoint: str) -> FleetServer:
        server = self._servers.get(endpoint)
        if server is None:
            raise Unavailable(f"{endpoint} is no longer part of {self._name}", unreached=True)
        return server

    async def _infer(self, server: FleetServer, request: ModelRequest, on_tool_call: OnToolCall | None) -> Reply:
        server.inflight += 1
        try:
            await self._enter(server)
            if (standby := server.standby) is None:
                return await server.backend.infer(request, on_tool_call)
            reply = await server.backend.infer(_ForStandby(request, server.shape(request.shape)), on_tool_call)
            return replace(reply, answered_by=standby.model)
        finally:
            server.inflight -= 1
            if server.leaving and not server.inflight:
                self._let_go(server)

    async def models(self) -> list[str]:
        """Return the models of all servers. Servers that take much longer to answer than the first are left out."""
        await self._try_standbys()
        answers = await self.survey()
        if not any(isinstance(answer, list) for answer in answers.values()):
            raise next(answer for answer in answers.values() if isinstance(answer, BackendError))
        self._tell()
        return list(dict.fromkeys(name for answer in answers.values() if isinstance(answer, list) for name in answer))

    async def locate(self, model: str) -> None:
        await self._try_standbys()
        unknown = [server for server in self._primaries if server.models is None]
        if unknown:
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    await self.survey(unknown)
            self._tell()

    async def _try_standbys(self) -> None:
        """Warn about standbys that would not answer. The request is free; without it the problem would be noticed only
        when they are needed."""
        standbys = [server for server in self._present if server.standby is not None]
        if not standbys:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS):
                for name, answer in (await self.survey(standbys)).items():
                    standby = self.standbys[name]
                    why = str(answer) if isinstance(answer, BackendError) else ""
                    if isinstance(answer, list) and answer and standby.model not in answer:
                        why = f"it lists {', '.join(answer[:MOST_NAMED])}{', …' if len(answer) > MOST_NAMED else ''}"
                    if why:
                        logger.warning("the standby %s at %s would not answer now: %s", standby.model, name, why)

    async def survey(self, servers: Sequence[FleetServer] | None = None) -> dict[str, list[str] | BackendError]:
        """Return each server's models, or its error; a server that is much slower than the first is left out."""
        answers: dict[str, list[str] | BackendError] = {}

        async def ask(server: FleetServer) -> None:
            try:
                await server.enter()
                names = answers[server.name] = await server.backend.models()
                server.found = frozenset(names) or None
            except BackendError as error:
                answers[server.name] = error

        self._loop.bind()
        asked = self._primaries if servers is None else servers
        tasks = {asyncio.get_running_loop().create_task(ask(server)) for server in asked}
        try:
            pending = tasks
            while pending and not any(isinstance(answer, list) for answer in answers.values()):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=ASK_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    async def probe(self, endpoint: str = "") -> Probe:
        server = self._servers.get(endpoint)
        if server is None:
            return Probe("down", f"{endpoint} is no longer part of {self._name}") if endpoint else Probe("unknown")
        try:
            await self._enter(server)
        except BackendError as error:
            return Probe("down", str(error))
        return await server.backend.probe()

    async def facts(self, model: str) -> Facts:
        """Let each server learn about itself, such as whether it schedules by priority."""

        async def learn(server: FleetServer) -> None:
            with suppress(BackendError):
                await self._enter(server)
                await server.backend.facts(model)

        await asyncio.gather(*map(learn, self._primaries))
        return Facts()

    async def load(self, endpoint: str = "") -> Load | None:
        """Return the load of the endpoint, or the sum over all servers. None if it is not reported."""
        if endpoint:
            server = self._servers.get(endpoint)
            if server is None or not server.backend.capabilities.reports_load:
                return None
            await self._enter(server)
            return await server.backend.load()
        asked = [server.name for server in self._present if server.backend.capabilities.reports_load]
        answers = await asyncio.gather(*map(self.load, asked), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, BackendError):
                raise answer
        return _sum([answer for answer in answers if isinstance(answer, Load)])


def _sum(loads: Sequence[Load]) -> Load | None:
    if not loads:
        return None
    sums: dict[str, Any] = {}
    for each in fields(Load):
        known = [value for load in loads if (value := getattr(load, each.name)) is not None]
        sums[each.name] = sum(known) if known else None
    if sums["kv_usage"] is not None:  # a fraction: use the mean
        sums["kv_usage"] /= sum(load.kv_usage is not None for load in loads)
    return Load(**sums)


def from_address(address: Address) -> Fleet:
    """Create the fleet of ``fleet://hosts.txt?role=worker``: a path, and tags that select."""
    path = unquote(address.url.netloc + address.url.path)
    if not path:
        raise SpecError("fleet:// names no hostfile: write fleet://hosts.txt or fleet:///path/to/hosts.txt")
    select: dict[str, list[str]] = {}
    for key, value in parse_qsl(address.url.query, keep_blank_values=True):
        select.setdefault(key, []).append(value)
    return Fleet.from_hostfile(
        path, select, api_key=address.api_key, headers=address.headers, environ=address.environ, sends=address.sends
    )


def _standby(given: Mapping[str, object], model: str | None, backend: Backend) -> Standby | None:
    """Return the standby that this endpoint describes; None if it describes a normal server. Raises ValueError for
    invalid input."""
    if not given:
        return None
    if "when" not in given:
        raise ValueError(f'prices are for a standby, with "when": "{UNREACHABLE}"; for others give the option prices')
    if given["when"] != UNREACHABLE:
        raise ValueError(f'when is {given["when"]!r}; the only condition is "{UNREACHABLE}"')
    if model is None:
        raise ValueError("a standby needs the model that answers there: give its model")
    if backend.capabilities.patient:
        raise ValueError("a batch API cannot be a standby: its answers take hours")
    prices = given.get("prices")
    if not isinstance(prices, Mapping | None):
        raise ValueError("prices is not a mapping of names to numbers")
    found = find_prices(prices, model=model, backend=backend.name)
    if found is not None and found.per_second:
        raise ValueError("a standby is paid by the token: its prices are those of input and output")
    if found is not None and prices is None:
        found = found if backend.capabilities.price == 1.0 else found.times(backend.capabilities.price)
    return Standby(model, found)


class _ForStandby(ModelRequest):
    """A request with the shape for a standby. The time at which its answer was last heard is noted in the original
    request."""

    __slots__ = ("_original",)

    def __init__(self, original: ModelRequest, shape: RequestShape) -> None:
        self._original = original
        for each in fields(ModelRequest):
            if each.name != "heard_at":
                setattr(self, each.name, getattr(original, each.name))
        self.shape = shape

    @property
    def heard_at(self) -> float:
        return self._original.heard_at

    @heard_at.setter
    def heard_at(self, at: float) -> None:
        self._original.heard_at = at


@dataclass(slots=True, eq=False)
class FleetServer:
    """``address`` is as the user gave it; ``name`` is unique in the fleet. The backend is entered on first use."""

    address: str
    name: str
    backend: Backend
    traits: Traits = field(default_factory=Traits)
    standby: Standby | None = None
    found: frozenset[str] | None = None  # the models that the server lists; None: unknown
    inflight: int = 0
    leaving: bool = False
    entered: bool = False
    _entering: asyncio.Lock = field(default_factory=asyncio.Lock)
    _shapes: WeakKeyDictionary[RequestShape, RequestShape] = field(default_factory=WeakKeyDictionary)

    @property
    def models(self) -> frozenset[str] | None:
        if self.standby is not None:
            return None  # it takes the requests for every model
        return self.found if self.traits.model is None else frozenset({self.traits.model})

    @property
    def known(self) -> ServerState:
        """Return what is known about the server, with the traits given to the fleet."""
        found = None if self.standby is not None else self.found
        return self.traits.apply(self.backend.servers[""], self.backend.capabilities.default_inflight, found)

    def shape(self, asked: RequestShape) -> RequestShape:
        """Return the shape of requests to this server."""
        if self.standby is None:
            return asked
        if asked not in self._shapes:
            self._shapes[asked] = replace(asked, model=self.standby.model)
        return self._shapes[asked]

    def serves(self, model: str) -> bool:
        return not model or self.models is None or model in self.models

    async def enter(self) -> None:
        if not self.entered:
            async with self._entering:
                if not self.entered:
                    await self.backend.__aenter__()
                    self.entered = True

    async def close(self) -> None:
        async with self._entering:
            if self.entered:
                self.entered = False
                await self.backend.__aexit__(None, None, None)

    def forget_loop(self) -> None:
        """Drop the state of a closed event loop."""
        self.entered = False
        self.inflight = 0
        self._entering = asyncio.Lock()
