"""Runs at an engine whose KV cache is small, or shared with others: what is sent to keep contexts there, and what is
reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from batch_agent import BatchAgent, Fleet, Tool
from batch_agent.backends.base import Load, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.errors import Rejected
from batch_agent.events import CacheRead, Event, HealthChanged
from batch_agent.messages import Conversation, Message, Reply
from batch_agent.observe.prometheus import RunNumbers
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.summary import summary_lines
from batch_agent.run.cache_watch import PrefixWatch
from batch_agent.scheduler.admission import KvCounts
from batch_agent.scheduler.ordering import KvParts
from batch_agent.testing import run_virtual

MODEL = EngineModel(
    prefill_tokens_per_second=5_000,
    step_seconds=0.02,
    kv_tokens=32_768,
    context_tokens=16_384,
    answer_tokens=20,
    tool_calls_per_agent=3,
    name="m",
)


class Engine(SimulatedBackend):
    """A simulated engine that can refuse touches, and notes them."""

    def __init__(self, model: EngineModel = MODEL, *, refuses: bool = False) -> None:
        super().__init__(model)
        self.refuses = refuses
        self.touches: list[ModelRequest] = []

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if request.shape.max_tokens == 1:
            self.touches.append(request)
            if self.refuses:
                raise Rejected("the last message must not be the assistant's", status=400)
        return await super().infer(request, on_tool_call)

    async def disturb(self, tokens: int) -> None:
        """Another client computes this many tokens."""
        for number in range(tokens // 8_000):
            talk = Conversation((Message("user", f"{number} {asyncio.get_running_loop().time()} ".ljust(32_000, "x")),))
            await super().infer(ModelRequest(RequestShape("m", max_tokens=2_000), talk, "other"))


def play(
    engine: SimulatedBackend | Fleet,
    parts: KvParts,
    *,
    agents: int = 2,
    tool_seconds: float = 30.0,
    system_prompt: str = "",
    beside: Callable[[], Awaitable[None]] | None = None,
    sinks: tuple[Callable[[Event], None], ...] = (),
    always_touch: bool = False,
) -> tuple[Statistics, KvCounts]:
    """A run of agents that read with a slow tool, and maybe something beside it while the tools run."""

    @Tool.define()
    async def read(document: str) -> str:
        """Read a document."""
        await asyncio.sleep(tool_seconds)
        return document.ljust(8_000, ".")

    async def go() -> tuple[Statistics, KvCounts]:
        run = BatchAgent.open(
            task="Read {n}", inputs=[{"n": str(n)} for n in range(agents)], tools=[read], backend=engine, model="m",
            system_prompt=system_prompt, sinks=list(sinks),
        )  # fmt: skip
        scheduler = run.shared.dispatcher.scheduler
        scheduler.use(parts)
        if always_touch:
            scheduler.admission.may_touch = lambda *_: True  # type: ignore[method-assign]
        other = asyncio.ensure_future(beside()) if beside is not None else None
        async with run:
            results = [result async for result in run.results()]
        if other is not None:
            other.cancel()
        assert len(results) == agents and all(result.ok for result in results)
        return run.statistics(), scheduler.admission.counts

    return run_virtual(go())


def test_an_engine_with_room_is_never_touched() -> None:
    engine = Engine()
    play(engine, KvParts.of(True))
    assert not engine.touches


def test_a_touched_context_is_in_the_cache_when_its_agent_goes_on() -> None:
    def recomputed(*, touch: bool) -> int:
        engine = Engine()

        async def disturb() -> None:  # shortly after each answer, long before the tools end
            for _ in range(4):
                await asyncio.sleep(8.0)
                await engine.disturb(40_000)
                await asyncio.sleep(22.0)

        parts = KvParts(touch=touch)
        _, counts = play(engine, parts, tool_seconds=30.0, beside=disturb, always_touch=touch)
        assert bool(engine.touches) == bool(counts.touches) == touch
        roles = {each.conversation.messages[-1].role for each in engine.touches}
        assert roles <= {"assistant"}  # up to the calls whose results are awaited
        return counts.recomputed

    assert recomputed(touch=True) < 0.7 * recomputed(touch=False)


def test_touches_that_fail_harm_no_row_and_are_given_up() -> None:
    engine = Engine(refuses=True)
    _, counts = play(engine, KvParts(touch=True), agents=8, always_touch=True)
    assert 0 < len(engine.touches) <= 8
    assert counts.touches == 0


def test_the_shared_prefix_is_touched_while_others_use_the_engine() -> None:
    engine = Engine()

    async def disturb() -> None:
        for _ in range(20):
            await asyncio.sleep(2.0)
            await engine.disturb(16_000)

    prompt = "You are careful. " * 300
    _, counts = play(engine, KvParts(keep_alive=True), system_prompt=prompt, beside=disturb)
    assert counts.kept_alive
    alone = Engine()
    _, counts = play(alone, KvParts(keep_alive=True), system_prompt=prompt)
    assert not counts.kept_alive and not alone.touches


def test_a_prefix_is_due_when_others_have_computed_half_of_the_free_memory() -> None:
    watch = PrefixWatch()

    def load(computed: int) -> Load:
        return Load(kv_tokens=10_000, kv_usage=0.2, prefix_queries=computed + 500, prefix_hits=500)

    assert not watch.is_due(load(0), 1)
    assert not watch.is_due(load(50_000), 2)  # ours are in flight, and use it
    assert not watch.is_due(load(53_000), 0)
    assert watch.is_due(load(54_000), 0)
    assert not watch.is_due(load(55_000), 0)  # it was touched
    assert not watch.is_due(Load(), 0)


def test_the_cache_is_reported_in_events_statistics_summary_and_metrics() -> None:
    events: list[Event] = []
    numbers = RunNumbers()
    engine = Engine(replace(MODEL, kv_tokens=16_384))
    statistics, _ = play(engine, KvParts(), agents=12, tool_seconds=1.0, sinks=(events.append, numbers))
    told = [event for event in events if isinstance(event, CacheRead)]
    assert any(event.held for event in told)
    assert statistics.kv == told[-1]
    assert statistics.kv.tokens == 16_384 and statistics.kv.held == 0 and statistics.kv.held_seconds > 0
    assert any("held back" in line for line in summary_lines(statistics))
    assert "batch_agent_kv_capacity_tokens 16384" in numbers.page()


def test_nothing_is_reported_where_kvflow_is_off() -> None:
    statistics, _ = play(Engine(), KvParts.of(False))
    assert statistics.kv is None


def test_an_engine_that_generates_is_not_taken_for_silent() -> None:
    """Long prompts keep an engine busy for longer than its answers took before."""
    events: list[Event] = []
    model = replace(MODEL, prefill_tokens_per_second=4_000, max_batched_tokens=4_096, kv_tokens=65_536)
    fleet = Fleet([SimulatedBackend(model), SimulatedBackend(model)])
    play(fleet, KvParts.of(False), agents=32, tool_seconds=1.0, sinks=(events.append,))
    assert not [event for event in events if isinstance(event, HealthChanged) and event.state == "down"]
