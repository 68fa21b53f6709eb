"""Fleet: many servers as one Backend.

The engine grants each turn one of the fleet's endpoints (``scheduler.routing``), and this file sends it there. What a
fleet owns are the servers: they share one transport, are entered when they are first needed, come and go (``add``,
``remove``, a hostfile that changes), and their slots are shared by all runs that use them.

Only what every server can do is said to be the fleet's capability: a run makes its requests once, for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qsl, unquote

from batch_agent.backends.address import Address
from batch_agent.backends.base import (
    Backend,
    Capabilities,
    Listener,
    Load,
    ModelRequest,
    OnToolCall,
    Probe,
    RequestShape,
    total_inflight,
)
from batch_agent.backends.http.transport import Transport
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, SpecError, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint, parse_hostfile
from batch_agent.fleet.server import FACTS, Server, facts_of
from batch_agent.messages import Reply
from batch_agent.scheduler.server import Server as KnownServer

logger = logging.getLogger("batch_agent")

ASK_SECONDS = 2.0  # that servers have to say which models they serve, once one of them has
WATCH_SECONDS = 2.0  # between two looks at the hostfile
INSIDE = ("vllm", "sglang", "dynamo", "http")  # schemes of servers beside us, to which no proxy leads

Given = str | AgentEndpoint | Mapping[str, object] | Backend
Select = Mapping[str, Sequence[str]]


class Fleet(Backend):
    """``endpoints`` are URLs, hostfile lines, mappings with a ``url`` (and ``api_key``, ``headers``, ``model``,
    ``context``, ``weight``), or Backends. ``api_key`` and ``headers`` are for all that bring none of their own."""

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
        self._api_key, self._headers, self._environ, self._sends = api_key, dict(headers or {}), environ, sends
        self._inside, self._outside = Transport(proxies=False), Transport()
        self._servers: dict[str, Server] = {}
        self._listeners: list[Listener] = []
        self._users = 0
        self._hostfile: Path | None = None
        self._select: Select = {}
        self._tasks: set[asyncio.Task[None]] = set()
        if isinstance(endpoints, str):
            raise SpecError("a fleet is given a list of endpoints; for a hostfile write fleet://hosts.txt")
        for given in endpoints:
            self._add(given)
        if not self._servers:
            raise SpecError("a fleet without endpoints has nobody to ask: give at least one")
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
        """The endpoints of a hostfile, those with one of the wanted values for each tag of ``select``. While the fleet
        is in use the file is read again when it changes."""
        select = select or {}
        wanted = "&".join(f"{key}={value}" for key, values in select.items() for value in values)
        fleet = cls(
            _selected(parse_hostfile(path), select, str(path)),
            api_key=api_key,
            headers=headers,
            environ=environ,
            sends=sends,
            name=f"fleet://{path}{'?' if wanted else ''}{wanted}",
        )
        fleet._hostfile, fleet._select = Path(path), select
        return fleet

    def __repr__(self) -> str:
        return f"Fleet({self._name!r}, {len(self._present)} endpoints)"

    @property
    def name(self) -> str:
        return self._name

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
            default_inflight=total_inflight(self.servers.values()),
            reports_load=any(one.reports_load for one in able),
        )

    # Servers that come and go

    @property
    def _present(self) -> list[Server]:
        return [server for server in self._servers.values() if not server.leaving]

    @property
    def servers(self) -> Mapping[str, KnownServer]:
        return {server.name: server.known for server in self._present}

    def add(
        self,
        url: Given,
        *,
        model: str | None = None,
        context: int | None = None,
        weight: float | None = None,
    ) -> str:
        """One more server, from now on; what it is called. It is used by the runs under way, too."""
        server = self._add(url, {"model": model, "context": context, "weight": weight})
        self._tell()
        return server.name

    def remove(self, url: str) -> None:
        """The server gets nothing more and is let go when it has answered what it has. ``url`` is what it was added
        with, or what it is called."""
        gone = [server for server in self._present if url in (server.address, server.name)]
        if not gone:
            raise SpecError(f"the fleet has no endpoint {url.rpartition('@')[2]!r}")
        if len(gone) == len(self._present):
            raise SpecError("the last endpoint of a fleet cannot be removed: add another before")
        self._remove(gone)
        self._tell()

    def _add(self, given: Given, facts: Mapping[str, object] | None = None) -> Server:
        if given is None:  # elsewhere it means the backend that runs have by default
            raise SpecError("None is no endpoint of a fleet: give a URL")
        tags: dict[str, object] = {name: value for name, value in (facts or {}).items() if value is not None}
        if isinstance(given, AgentEndpoint):
            tags = {**given.tags, **tags}
            given = given.address
        key, headers = self._api_key, self._headers
        if isinstance(given, Mapping):
            tags = {**{name: given[name] for name in FACTS if given.get(name) is not None}, **tags}
            key, headers = None if given.get("api_key") else key, {}
            given = {
                "headers": self._headers,
                **{name: value for name, value in given.items() if name not in FACTS},
            }
            scheme = str(given.get("url")).partition("://")[0].lower()
        elif isinstance(given, str):
            scheme = given.partition("://")[0].lower()
            given = {"url": given, "headers": headers} if headers else given
        else:
            scheme, key = "", None
        if scheme == "fleet" or isinstance(given, list | tuple):
            raise SpecError("a fleet is made of servers, not of fleets: list their endpoints")
        transport = self._inside if scheme in INSIDE else self._outside
        backend, _ = open_backend(
            given, model=None, api_key=key, environ=self._environ, sends=self._sends, transport=transport
        )
        if isinstance(given, Mapping):
            given = str(given["url"])
        address = given if isinstance(given, str) else backend.name
        server = Server(address, self._unused(backend.name), backend, **cast(Any, facts_of(tags, backend.name)))
        self._servers[server.name] = server
        return server

    def _unused(self, name: str) -> str:
        """Two may be of one name: engines in this process, a server that was removed and is not yet gone."""
        number, free = 1, name
        while free in self._servers:
            number += 1
            free = f"{name}#{number}"
        return free

    def _remove(self, servers: Iterable[Server]) -> None:
        for server in servers:
            server.leaving = True
            if not server.inflight:
                self._let_go(server)

    def _let_go(self, server: Server) -> None:
        if self._servers.pop(server.name, None) is not None and server.entered:
            self._start(server.close())

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, path: Path) -> None:
        """A stat every few seconds; a file that cannot be read, or names nobody, changes nothing."""
        seen = await asyncio.to_thread(_stamp, path)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = await asyncio.to_thread(_stamp, path)
            if now is None or now == seen:
                continue
            seen = now
            try:
                hosts = await asyncio.to_thread(parse_hostfile, path)
                self._follow(_selected(hosts, self._select, str(path)))
            except SpecError as error:
                logger.warning("%s; the fleet stays as it was", error)

    def _follow(self, hosts: Sequence[AgentEndpoint]) -> None:
        """What the file says now: lines that are new join, those that are gone leave."""
        left = list(hosts)
        gone = []
        for server in self._present:
            line = next((host for host in left if host.address == server.address), None)
            if line is None:
                gone.append(server)
            else:
                left.remove(line)
        for host in left:
            self._add(host)
        self._remove(gone)
        if left or gone:
            logger.info("the hostfile has changed: %s endpoints joined, %s left", len(left), len(gone))
            self._tell()

    # Runs that share it

    def join(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def leave(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener.changed()

    # A Backend

    async def __aenter__(self) -> Self:
        if not self._users and self._hostfile is not None:
            self._start(self._watch(self._hostfile))
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users:
            return
        for task in list(self._tasks):
            task.cancel()
        for server in list(self._servers.values()):
            await server.close()
            if server.leaving:
                self._servers.pop(server.name, None)

    def check(self, shape: RequestShape) -> None:
        kinds = {type(server.backend): server.backend for server in self._present}
        for backend in kinds.values():
            backend.check(shape)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if request.endpoint:
            server = self._servers.get(request.endpoint)
            if server is None:
                raise Unavailable(f"{request.endpoint} is no longer part of {self._name}", unreached=True)
            return await self._infer(server, request, on_tool_call)
        # Nobody has granted an endpoint: the least busy one, and another where it is not reached.
        serving = [server for server in self._present if server.serves(request.shape.model)] or self._present
        for server in sorted(serving, key=lambda server: server.inflight / server.weight):
            try:
                return await self._infer(server, request, on_tool_call)
            except BackendError as failure:
                error = failure
                if not failure.unreached:
                    break
        raise error

    async def _infer(self, server: Server, request: ModelRequest, on_tool_call: OnToolCall | None) -> Reply:
        server.inflight += 1
        try:
            await server.enter()
            return await server.backend.infer(request, on_tool_call)
        finally:
            server.inflight -= 1
            if server.leaving and not server.inflight:
                self._let_go(server)

    async def models(self) -> list[str]:
        """Of all servers together; those that do not say so in time, once one has, are left out."""
        answers = await self._ask(self._present)
        if not any(isinstance(answer, list) for answer in answers.values()):
            raise next(answer for answer in answers.values() if isinstance(answer, BackendError))
        self._tell()
        return list(dict.fromkeys(name for answer in answers.values() if isinstance(answer, list) for name in answer))

    async def locate(self, model: str) -> None:
        unknown = [server for server in self._present if server.models is None]
        if unknown:
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    await self._ask(unknown)
            self._tell()

    async def _ask(self, servers: Sequence[Server]) -> dict[str, list[str] | BackendError]:
        """Which models they serve, all asked at once."""
        answers: dict[str, list[str] | BackendError] = {}

        async def ask(server: Server) -> None:
            try:
                await server.enter()
                names = answers[server.name] = await server.backend.models()
                server.found = frozenset(names) or None
            except BackendError as error:
                answers[server.name] = error

        tasks = {asyncio.get_running_loop().create_task(ask(server)) for server in servers}
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
            await server.enter()
        except BackendError as error:
            return Probe("down", str(error))
        return await server.backend.probe()

    async def load(self, endpoint: str = "") -> Load | None:
        server = self._servers.get(endpoint)
        if server is None or not server.backend.capabilities.reports_load:
            return None
        await server.enter()
        return await server.backend.load()


def _selected(hosts: Iterable[AgentEndpoint], select: Select, path: str) -> list[AgentEndpoint]:
    hosts = list(hosts)
    if not hosts:
        raise SpecError(f"the hostfile {path!r} names no endpoint")
    chosen = [host for host in hosts if all(host.tags.get(key) in values for key, values in select.items())]
    if not chosen:
        wanted = ", ".join(f"{key}={'|'.join(values)}" for key, values in select.items())
        raise SpecError(f"no endpoint of the hostfile {path!r} has {wanted}")
    return chosen


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def from_address(address: Address) -> Fleet:
    """``fleet://hosts.txt?role=worker``: a path, and tags that select."""
    path = unquote(address.url.netloc + address.url.path)
    if not path:
        raise SpecError("fleet:// names no hostfile: write fleet://hosts.txt or fleet:///path/to/hosts.txt")
    select: dict[str, list[str]] = {}
    for key, value in parse_qsl(address.url.query, keep_blank_values=True):
        select.setdefault(key, []).append(value)
    return Fleet.from_hostfile(
        path,
        select,
        api_key=address.api_key,
        headers=address.headers,
        environ=address.environ,
        sends=address.sends,
    )
