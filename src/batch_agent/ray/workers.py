"""The workers of a run, as actors of a Ray cluster.

A fixed number of actors is spread over the nodes. Ray restarts an actor if its process or node dies. With
``workers="auto"`` each node has one actor: a node that joins gets one, and the actor of a node that left is removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from batch_agent.errors import RunRejected, RunUnreachable, SpecError, StoreError
from batch_agent.files.compression import extra
from batch_agent.messages import JsonObject
from batch_agent.record.store import WorkStore
from batch_agent.record.store_server import Answer, Call, Connections, ServedStore, dump, load
from batch_agent.run.joined_worker import WAIT, JoinedWorker, open_store
from batch_agent.run.trust import Trust

if TYPE_CHECKING:
    from batch_agent.run.run import Run

logger = logging.getLogger("batch_agent")

NODES_SECONDS = 5.0  # between two checks of the nodes: Ray does not report nodes that join
REACH_SECONDS = 10.0  # for a cluster to accept a connection
HTTP2_SETTINGS = b"\4"  # type of the frame that begins a connection, in its fourth byte
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + bytes(5)
TOKEN_HINT = ". If the cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in submitted jobs, whose working_dir is on all nodes
BRIDGE = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 512}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LEAVE_SECONDS = 5.0  # for workers to leave when the run has ended; a dead worker must not block the end
TELEMETRY, SECRETS = "OTEL_", "HEADERS"  # begin of the variables that workers get, and end of those that they do not


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster to run on: ``BatchAgent.run(…, cluster=Ray("auto", workers=8))``.

    ``address`` is that of ``ray.init``: "auto" for the cluster of this machine, ``ray://host:10001`` for another
    cluster, "local" to start one on this machine. ``workers`` is a number, or "auto" for one per node. Each worker
    reserves ``worker_cpus`` and ``worker_memory`` (bytes). ``runtime_env`` is that of Ray; the modules that the run
    names are added to it.
    """

    address: str = "auto"
    workers: int | Literal["auto"] = "auto"
    worker_cpus: float = 1.0
    worker_memory: int | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers != "auto" and self.workers < 1:
            raise SpecError(f'workers: give a number of at least 1, or "auto", not {self.workers!r}')
        if self.worker_cpus < 0:
            raise SpecError(f"worker_cpus: a worker cannot reserve {self.worker_cpus:g} CPUs")
        if self.worker_memory is not None and self.worker_memory <= 0:
            raise SpecError(f"worker_memory: a worker cannot reserve {self.worker_memory} bytes")

    @asynccontextmanager
    async def at_work(self, run: Run[object]) -> AsyncIterator[None]:
        """Let actors of the cluster work on a run, while this context is entered. Workers reach a record in Redis at
        its URL, and the record of this process through an actor on this node."""
        async with AsyncExitStack() as extent:
            server = run.record_server
            assert server is not None, "a crew is started while its run works"
            if await asyncio.to_thread(self.connect, user_modules(server.specs())):
                extent.push_async_callback(asyncio.to_thread, ray_package().shutdown)
            target: object = server.url
            if target is None:
                target = await asyncio.to_thread(self._bridge, server.path)
                extent.push_async_callback(asyncio.to_thread, ray_package().kill, target)
            workers = await extent.enter_async_context(RayWorkers(self, target, server.fingerprint))
            async with asyncio.TaskGroup() as tasks:
                lost = tasks.create_task(workers.lost())
                yield
                lost.cancel()

    def _bridge(self, path: Path) -> object:
        """Start the actor through which workers reach the socket of this process."""
        if self.address.startswith("ray://"):
            raise SpecError(
                "a driver outside the cluster (ray://) cannot serve its record to workers: give run_dir as "
                "redis://host:6379/0/NAME, or start the driver on a node"
            )
        ray = ray_package()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        return ray.remote(Bridge).options(**BRIDGE, scheduling_strategy=here).remote(str(path))

    def connect(self, modules: Sequence[ModuleType] = ()) -> bool:
        """Connect this process to the cluster, with the modules that workers import. Returns False if the process was
        connected already: then the program that connected it has set the ``runtime_env``."""
        ray = ray_package()
        if ray.is_initialized():
            return False
        address = None if self.address == "local" else self.address
        self._look()
        environment = self._environment(modules)
        try:
            ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            # Ray's client reports a missing token as a timeout.
            token = TOKEN_HINT if self.address.startswith("ray://") else ""
            raise RunUnreachable(f"the Ray cluster at {self.address} is unreachable: {error}{token}") from None
        return True

    def _look(self) -> None:
        """Raise RunUnreachable if nothing listens at the address, or if it does not speak HTTP/2 and so is not Ray. Ray
        itself would try for many minutes."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            return
        try:
            with socket.create_connection((host, int(port)), REACH_SECONDS) as connection:
                if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                    connection.sendall(HTTP2_START)
                    if connection.recv(9)[3:4] != HTTP2_SETTINGS:
                        raise RunUnreachable(f"what listens at {self.address} is not a Ray cluster: no HTTP/2 answer")
        except OSError as error:
            raise RunUnreachable(f"the Ray cluster at {self.address} is unreachable: {error}") from None

    def _environment(self, modules: Sequence[ModuleType]) -> dict[str, Any]:
        environment = dict(self.runtime_env)
        paths = sorted({_travels(module) for module in modules})
        if paths and "working_dir" not in environment and SUBMITTED not in os.environ:
            environment["py_modules"] = [*environment.get("py_modules", ()), *paths]
        return environment


def ray_package() -> ModuleType:
    return extra("ray", "running on a Ray cluster")


def _travels(module: ModuleType) -> str:
    """Return the file or folder of a user's module."""
    path = Path(module.__file__ or "")
    return str(path.parent if path.name == "__init__.py" else path)


class Bridge:
    """An actor on the driver's node. It passes calls of workers on to the socket of the driver."""

    def __init__(self, path: str) -> None:
        self._connections = Connections(Path(path))

    def call(self, call: bytes) -> bytes:
        return dump(self._connections.exchange(cast(Call, load(call))))


def bridged(bridge: Any) -> WorkStore:
    """Return the record behind a bridge, for a worker."""

    def exchange(call: Call) -> Answer:
        ray = ray_package()
        try:
            return cast(Answer, load(ray.get(bridge.call.remote(dump(call)))))
        except ray.exceptions.RayTaskError as error:
            raise StoreError(reason_of(error)) from None
        except ray.exceptions.RayError as error:
            raise StoreError(f"the driver of this run is unreachable: {reason_of(error)}") from None

    return ServedStore(exchange)


def reason_of(error: BaseException) -> str:
    """Return what went wrong in an actor: the message of the exception, without Ray's traceback and colours."""
    cause = getattr(error, "cause", None)
    text = COLOURS.sub("", str(error if cause is None else f"{type(cause).__name__}: {cause}"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class WorkerActor:
    """One worker process."""

    def __init__(self) -> None:
        self._worker: JoinedWorker | None = None
        self._leaving = False

    async def work(self, target: object, fingerprint: str, telemetry: Mapping[str, str]) -> int:
        """Work until the run is done, or until ``leave``; return the number of finished rows. ``target`` is the URL of
        the run, or the bridge to the driver. ``fingerprint`` identifies what the run uses. ``telemetry`` are
        environment variables of the driver, for those that the node does not set."""
        if self._leaving:
            return 0
        for name, value in telemetry.items():
            os.environ.setdefault(name, value)
        trust = Trust(fingerprint=fingerprint, everything=not isinstance(target, str))
        store = await open_store(target, WAIT, trust) if isinstance(target, str) else bridged(target)
        self._worker = JoinedWorker(store, trust)
        try:
            return (await self._worker.work()).rows
        finally:
            store.close()

    async def leave(self) -> None:
        """Hand back every row, and end."""
        self._leaving = True
        if self._worker is not None:
            self._worker.cancel()


class RayWorkers:
    """The actors that work on one run, while this context is entered."""

    def __init__(self, cluster: Ray, target: object, fingerprint: str) -> None:
        self._cluster = cluster
        self._target = target
        self._fingerprint = fingerprint
        given = {name: value for name, value in os.environ.items() if name.startswith(TELEMETRY)}
        self._telemetry = {name: value for name, value in given.items() if not name.endswith(SECRETS)}
        self._actors: dict[str, Any] = {}  # by node, or by number
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._refused: set[str] = set()  # nodes or numbers that get no other actor
        self._reason = ""

    async def __aenter__(self) -> Self:
        if self._cluster.workers == "auto":
            await asyncio.to_thread(self._follow_nodes)
            self._watch_all()
            self._follower = asyncio.create_task(self._follow(), name="batch-agent ray nodes")
        else:
            for number in range(self._cluster.workers):
                self._actors[str(number)] = self._start("SPREAD")
            self._watch_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._follower is not None:
            self._follower.cancel()
        for actor in self._actors.values():
            actor.leave.remote()
        tasks = [*self._tasks.values(), *([] if self._follower is None else [self._follower])]
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)
        actors, self._actors = self._actors, {}
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(lambda: [ray_package().kill(actor) for actor in actors.values()])

    def _start(self, strategy: object) -> Any:
        cluster = self._cluster
        options: dict[str, Any] = {
            "num_cpus": cluster.worker_cpus,
            "scheduling_strategy": strategy,
            "max_restarts": -1,
            "max_task_retries": -1,
        }
        if cluster.worker_memory is not None:
            options["memory"] = cluster.worker_memory
        return ray_package().remote(WorkerActor).options(**options).remote()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(NODES_SECONDS)
            await asyncio.to_thread(self._follow_nodes)
            self._watch_all()

    def _follow_nodes(self) -> None:
        ray = ray_package()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        alive = [node for node in ray.nodes() if node["Alive"]]
        for node in alive:
            name, cpus = node["NodeID"], node["Resources"].get("CPU", 0)
            if name not in self._actors and name not in self._refused and cpus >= self._cluster.worker_cpus:
                self._actors[name] = self._start(affinity(name, soft=False))
        for name in self._actors.keys() - {node["NodeID"] for node in alive}:
            ray.kill(self._actors.pop(name))

    def _watch_all(self) -> None:
        for name, actor in self._actors.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._watch(name, actor), name=f"batch-agent worker {name}")

    async def _watch(self, name: str, actor: Any) -> None:
        """Let one actor work. If Ray restarts the actor, it repeats the call."""
        try:
            await actor.work.remote(self._target, self._fingerprint, self._telemetry)
        except ray_package().exceptions.RayError as error:
            if name not in self._actors:
                return
            self._reason = reason_of(error)
            logger.warning("a worker on Ray was lost: %s", self._reason)
            del self._actors[name]
            if self._cluster.workers != "auto" or isinstance(error, ray_package().exceptions.RayTaskError):
                self._refused.add(name)  # the worker itself failed, and another one there would too
            else:
                del self._tasks[name]  # the node gets another one
            if self._refused and not self._actors:
                self._lost.set()

    async def lost(self) -> None:
        """Wait until no worker is left, and none will come. Raises RunRejected with the reason."""
        await self._lost.wait()
        raise RunRejected(f"every worker on Ray was lost: {self._reason}")


def user_modules(specs: Sequence[JsonObject]) -> list[ModuleType]:
    """Return the user's own modules that specs name. Modules of installed packages are left out."""
    found: dict[str, ModuleType] = {}
    for spec in specs:
        named = [spec.get(name) for name in ("output_schema", "worker", "compaction", "runtime")]
        tools = spec.get("tools")
        for name in (*named, *(tools if isinstance(tools, list) else ())):
            if isinstance(name, str) and ":" in name:
                package = name.partition(":")[0].partition(".")[0]
                module = sys.modules.get(package)
                if module is not None and _is_users(module):
                    found[package] = module
    return list(found.values())


def _is_users(module: ModuleType) -> bool:
    path = Path(module.__file__ or "")
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(module.__file__) and not installed and module.__name__ not in ("batch_agent", *sys.stdlib_module_names)
