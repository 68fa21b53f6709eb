"""What a worker in this process works with: tools, models, prices, readings of the engine's load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from batch_agent.agent.agent import InnerWorker, tool_loop
from batch_agent.agent.cascade import union_of_tools
from batch_agent.agent.compaction import open_compactor
from batch_agent.agent.dialogue import Resources
from batch_agent.agent.fingerprint import rows_under
from batch_agent.agent.prefix_leader import lead_of
from batch_agent.agent.prepare import Prepared
from batch_agent.agent.tool_prewarm import ToolPrewarm, open_tool_prewarm
from batch_agent.agent.touches import Touches
from batch_agent.agent.user_worker import RunModels, open_worker
from batch_agent.dispatch.calibration import calibration
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.load_poller import poll_load
from batch_agent.dispatch.policy import Policy
from batch_agent.errors import SpecError
from batch_agent.record.commits import Commits, ShapeDigests
from batch_agent.record.keys import Keys
from batch_agent.run.cache_watch import cache_watch, touches_for
from batch_agent.run.cascade import EntryDesk
from batch_agent.run.feeder import Feeder
from batch_agent.run.leases import Leases
from batch_agent.run.worker import Worker
from batch_agent.tools.pool import ToolPool

if TYPE_CHECKING:
    from batch_agent.run.opened import Setup


class RunResources:
    """What a worker works with. ``feeder`` is None if another process feeds the run. ``prewarm`` is set if tool calls
    are started before a model asks for them."""

    def __init__(self, setup: Setup, leases: Leases, commits: Commits, feeder: Feeder | None) -> None:
        self._setup = setup
        self._leases = leases
        self._commits = commits
        self._feeder = feeder
        self._prepared, self._shared = setup.prepared, setup.shared
        self._worker: Worker | None = None  # since it was opened
        self.prewarm: ToolPrewarm | None = None

    @property
    def has_begun(self) -> bool:
        return self._worker is not None

    @property
    def worker(self) -> Worker:
        """The worker. Raises SpecError before the run has begun its first row."""
        if self._worker is None:
            raise SpecError("the run has not begun its first row")
        return self._worker

    @asynccontextmanager
    async def opened(self, inner: InnerWorker | None, hold: Callable[[bool], None]) -> AsyncIterator[Worker]:
        """Open the resources, and yield the worker. ``inner`` is a built-in worker that replaces the tool loop.
        ``hold`` is called with whether the engine's queue is too long to start agents."""
        prepared = self._prepared
        shared = self._shared
        spec = self._prepared.spec
        loops = inner is None and spec.worker is None  # the tool loop processes the rows
        touches = touches_for(prepared, shared.dispatcher) if loops else None
        emit, run = self._setup.emit, self._setup.id
        watch = cache_watch(prepared.plan, shared.dispatcher.scheduler, emit, run, shared.clock, touches)
        async with (
            self._tools() as pool,
            open_tool_prewarm(spec, pool) as self.prewarm,
            poll_load(prepared.backend, shared.dispatcher, spec.backpressure_ceiling, hold, watch),
            calibration(prepared.backend, shared.dispatcher, prepared.model or "", wanted=spec.calibrate_backend),
            AsyncExitStack() as extent,
        ):
            shared.pool = pool
            resources = self._resources(pool, touches, prepared, shared.dispatcher, loops=loops)
            resources.compactor = await extent.enter_async_context(open_compactor(prepared, resources))
            function = await extent.enter_async_context(open_worker(prepared, inner, shared.spending))
            pool.models = await extent.enter_async_context(RunModels(resources, prepared, shared.spending))
            if shared.ladder is not None:
                await extent.enter_async_context(shared.ladder.opened(partial(self._desk, pool)))
            feeder = self._feeder
            self._worker = Worker(
                self._leases,
                self._commits,
                prepared.plan,
                resources,
                self._setup.feed,
                function,
                asks_first=loops,
                keys=Keys(rows_under(prepared, inner)),
                part_keys=Keys(rows_under(prepared, inner, part=True)),
                left=(lambda: None) if feeder is None else feeder.left,
                begun=set() if feeder is None else feeder.begun,
                retry_from=spec.retry_from,
                voting=prepared.voting if loops else None,
                ladder=shared.ladder,
            )
            if feeder is None:
                self._worker.tell_ends()
            yield self._worker
            watch.tell()

    @asynccontextmanager
    async def _desk(self, pool: ToolPool, prepared: Prepared, dispatcher: Dispatcher) -> AsyncIterator[EntryDesk]:
        """Yield what the agents of a later entry of a cascade work with. They share the tools of the run."""
        shapes, name = prepared.shapes, prepared.backend.name
        self._shared.spending.set_terms((shapes.first, shapes.later, shapes.repair), prepared.prices, prepared.backend)
        if prepared.model is not None:
            self._shared.models.setdefault(name, set()).add(prepared.model)
        async with (
            poll_load(prepared.backend, dispatcher, None, lambda full: None),
            calibration(prepared.backend, dispatcher, prepared.model or "", wanted=prepared.spec.calibrate_backend),
        ):
            resources = self._resources(pool, None, prepared, dispatcher, loops=True)
            async with open_compactor(prepared, resources) as resources.compactor:
                yield EntryDesk(resources, tool_loop, True, prepared.voting)

    def _resources(
        self, pool: ToolPool, touches: Touches | None, prepared: Prepared, dispatcher: Dispatcher, *, loops: bool
    ) -> Resources:
        shared = self._shared
        spec = prepared.spec
        is_first = prepared is self._prepared
        capabilities = prepared.backend.capabilities
        can_start_early = any(pool.can_start_early(tool.name) for tool in prepared.tools)
        usual = max(endpoint.health.slowest for endpoint in dispatcher.scheduler.endpoints)
        return Resources(
            backend=prepared.backend,
            dispatcher=dispatcher,
            policy=Policy(
                spec.max_retries,
                timeout=prepared.turn_limit_seconds,
                timeout_option="timeout_per_turn",
                hedge=spec.hedge,
            ),
            tools=pool,
            schema=prepared.schema,
            shared=prepared.plan.shared,
            shapes=prepared.shapes,
            emit=self._setup.emit,
            run=self._setup.id,
            clock=shared.clock,
            max_turns=spec.turn_limit if loops else spec.max_turns,
            timeout_per_agent=spec.timeout_per_agent,
            sees_images=None if capabilities.images else False,
            early_tools=spec.streaming_tool_dispatch and capabilities.streaming and can_start_early,
            ends_with_answer=loops,
            keeps_cut_text=spec.truncated == "keep",
            prewarm=self.prewarm if is_first else None,
            touches=touches if dispatcher.scheduler.parts.touch else None,
            # A user's worker may send other requests first, or none.
            lead=lead_of(prepared.plan, capabilities, prepared.max_inflight, usual) if loops else None,
            traces=shared.observers.traces,
            hints=spec.nvext_agent_hints,
            digests=ShapeDigests(),
            doubted=prepared.doubted if loops else None,
            offered=None if shared.ladder is None else frozenset(tool.name for tool in prepared.tools),
        )

    def _tools(self) -> ToolPool:
        spec, lender = self._prepared.spec, self._shared.lender
        return ToolPool(
            self._prepared.tools if self._prepared.cascade is None else union_of_tools(self._prepared),
            timeout=spec.timeout_per_tool,
            spawn=asyncio.get_running_loop().create_task,
            on_waiting=self._shared.dispatcher.set_at_tools,
            prewarm_max_age=spec.prewarm_max_age if spec.predictive_prewarm else None,
            once=None if lender is None else lender.once,
        )
