"""The workers of a run, as actors of a Ray cluster.

A fixed number of actors is spread over the nodes. Ray restarts an actor if its process or node dies. With
``workers="auto"`` each node has one actor: a node that joins gets one, and the actor of a node that left is removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from batch_agent.cluster.worker import WAIT, Worker, open_store
from batch_agent.errors import RunUnreachable, SpecError
from batch_agent.files.extras import extra
from batch_agent.ray.relay import relayed

if TYPE_CHECKING:
    from pydantic import JsonValue

    from batch_agent.agent.prepare import Prepared
    from batch_agent.cluster.fed_stages import FedStages
    from batch_agent.events import Sink
    from batch_agent.run.run import Run
    from batch_agent.run.steering import Controls

logger = logging.getLogger("batch_agent")

NODES_SECONDS = 5.0  # between two checks of the nodes: Ray does not report nodes that join
REACH_SECONDS = 10.0  # for a cluster to accept a connection
TOKEN_HINT = ". If the cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in submitted jobs, whose working_dir is on all nodes
LEAVE_SECONDS = 5.0  # for workers to leave when the run has ended; a dead worker must not block the end


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster to run on: ``BatchAgent.run(…, cluster=Ray("auto", workers=8))``.

    ``address`` is that of ``ray.init``: "auto" for the cluster of this machine, ``ray://host:10001`` for another one,
    "local" to start one on this machine. ``workers`` is a number, or "auto" for one per node. Each worker reserves
    ``worker_cpus`` and ``worker_memory`` (bytes). ``runtime_env`` is that of Ray; the modules that the run names are
    added to it.
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

    def open_run(
        self, prepared: Prepared, command: Mapping[str, JsonValue] | None = None, sinks: Sequence[Sink] = ()
    ) -> Run[Any]:
        """Return the run of the driver. Raises SpecError for options that workers cannot use."""
        from batch_agent.ray.run import RayRun

        return RayRun(prepared, self, sinks, command)

    def open_stages(
        self,
        prepared: Prepared,
        stages_work: Callable[[], Awaitable[object]],
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        controls: Controls,
    ) -> FedStages:
        """Return the driver's run around the stages of a pipeline, which is kept in Redis. Raises SpecError."""
        from batch_agent.ray.run import RayStages

        return RayStages(prepared, self, stages_work, sinks, command, controls=controls)

    def connect(self, modules: Sequence[ModuleType] = ()) -> bool:
        """Connect this process to the cluster, with the modules that workers import.

        Returns False if it was connected already. Then the program that connected it has set the ``runtime_env``.
        """
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
        """Raise RunUnreachable if nothing listens at the address. Ray itself would try for many minutes."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            return
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
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


class WorkerActor:
    """One worker process."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._leaving = False

    async def work(self, target: object) -> int:
        """Work until the run is done, or until ``leave``; return the number of finished rows.

        ``target`` is the URL of the run, or the relay of the driver.
        """
        if self._leaving:
            return 0
        store = await open_store(target, WAIT) if isinstance(target, str) else relayed(target)
        self._worker = Worker(store)
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

    def __init__(self, cluster: Ray, target: object) -> None:
        self._cluster, self._target = cluster, target
        self._actors: dict[str, Any] = {}  # by node, or by number
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._follower: asyncio.Task[None] | None = None

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
            if name not in self._actors and cpus >= self._cluster.worker_cpus:
                self._actors[name] = self._start(affinity(name, soft=False))
        for name in self._actors.keys() - {node["NodeID"] for node in alive}:
            ray.kill(self._actors.pop(name))

    def _watch_all(self) -> None:
        for name, actor in self._actors.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._watch(name, actor), name=f"batch-agent worker {name}")

    async def _watch(self, name: str, actor: Any) -> None:
        """Let one actor work. Ray repeats the call after it restarts an actor."""
        try:
            await actor.work.remote(self._target)
        except ray_package().exceptions.RayError as error:
            if name in self._actors:
                logger.warning("a worker on Ray was lost: %s", str(error).splitlines()[0])
