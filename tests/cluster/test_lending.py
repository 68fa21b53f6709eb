"""One worker's shares: its limits follow what the table grants, and what others learnt is checked at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

from batch_agent.backends.base import Backend, ModelRequest, Probe, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.spending import Spending
from batch_agent.errors import StoreError
from batch_agent.messages import Conversation, JsonObject, Message, Usage
from batch_agent.record.memory import MemoryStore
from batch_agent.record.store import Store, WorkStore
from batch_agent.run.control import Controls
from batch_agent.run.lending import Lending
from batch_agent.run.shared_state import SharedState
from batch_agent.scheduler.server_state import ServerState, Terms
from batch_agent.share.table import SLOTS, Allotment, Claim, Learnt, Steering, Table, steered
from batch_agent.spec import BatchSpec
from batch_agent.testing import ScriptedBackend, virtual_clock

OTHER = "other"
POT = f"{SLOTS}backend"


class TableInMemory:
    """The part of a store that has the table. ``away`` makes it unreachable."""

    def __init__(self) -> None:
        self.table_, self.away = Table(), False
        self.wait, self.group, self.gathering, self.writes = 1.0, 1, 0.024, True

    def blocks(self, call: str) -> bool:
        return True

    def beat(
        self,
        worker: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        if self.away:
            raise StoreError("away")
        json.dumps(status)
        return self.table_.beat(worker, time.monotonic(), seconds, claims, learnt, status)

    def resign(self, worker: str) -> None:
        self.table_.leave(worker, time.monotonic())

    def followed_rows(self) -> list[str]:
        return []

    def steer(self, request: JsonObject) -> Steering:
        self.table_.steering = steered(self.table_.steering, request)
        return self.table_.steering


class Probed:
    """What a dispatcher probes; it counts, and finds everything down."""

    name = "backend"

    def __init__(self) -> None:
        self.probes = 0

    async def probe(self, endpoint: str = "") -> Probe:
        self.probes += 1
        return Probe("down", "it refuses connections")


class Steerable:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def status(self) -> JsonObject:
        return {"state": "running"}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.asked.append(" ".join([name, *map(str, arguments)]))


def worker(store: TableInMemory, seconds: float = 15.0) -> tuple[Lending, SharedState, Dispatcher, Probed]:
    backend = Probed()
    dispatcher = Dispatcher(cast(Any, backend), 8, servers={"backend": ServerState("backend")}, terms=Terms(8))
    spending = Spending(BatchSpec(inputs=["a"], task="{input}"), None, lambda _: None, lambda _: None)
    shared = SimpleNamespace(dispatchers={"backend": dispatcher}, spending=spending)
    return Lending(Store(cast(WorkStore, store)), "me", seconds), cast(SharedState, shared), dispatcher, backend


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_uses_its_share_and_leaves_nothing_behind() -> None:
    store = TableInMemory()
    lending, shared, dispatcher, _ = worker(store)
    store.beat(OTHER, 60.0, {POT: Claim(8, 0, 5)}, {}, {})
    dispatcher.feed(lambda: None)  # which could always start another agent
    controls = Steerable()
    async with lending.at_work(shared, cast(Controls, controls), cast(Backend, ScriptedBackend([]))):
        first = dispatcher.scheduler.allotted
        store.steer({"do": "pause"})
        store.steer({"do": "cancel-row", "row": "7"})
        store.resign(OTHER)
        lending.soon()
        await until(lambda: dispatcher.scheduler.allotted == 8)
    dispatcher.close()

    assert first == 3
    assert controls.asked == ["pause", "cancel_row 7"]
    assert store.table_.members == {}


async def test_a_worker_that_is_cut_off_stops_using_its_share() -> None:
    store = TableInMemory()
    lending, shared, dispatcher, _ = worker(store, seconds=0.3)
    dispatcher.feed(lambda: None)  # which could always start another agent
    async with lending.at_work(shared, cast(Controls, Steerable()), cast(Backend, ScriptedBackend([]))):
        assert dispatcher.scheduler.allotted == 8
        store.away = True
        await until(lambda: dispatcher.scheduler.allotted == 0)
        store.away = False
        await until(lambda: dispatcher.scheduler.allotted == 8)
    dispatcher.close()


async def test_an_endpoint_that_another_worker_found_down_is_probed() -> None:
    store = TableInMemory()
    lending, shared, dispatcher, backend = worker(store)
    async with lending.at_work(shared, cast(Controls, Steerable()), cast(Backend, ScriptedBackend([]))):
        store.beat(OTHER, 60.0, {}, {"backend": Learnt(down=True, reason="it refuses connections")}, {})
        lending.soon()
        await until(lambda: dispatcher.scheduler.endpoints[0].health.is_down)
    dispatcher.close()

    assert backend.probes >= 1


@virtual_clock
async def test_workers_whose_next_calls_fit_the_budget_only_alone_take_turns() -> None:
    """Nothing bounds the first answers, so no two of them fit the budget together."""
    clock = asyncio.get_running_loop().time
    store, answered = MemoryStore(clock, clock), []
    request = ModelRequest(RequestShape("m"), Conversation([Message("user", "x" * 100)]), "0", 1)

    async def ask_three_times(spending: Spending, name: str) -> None:
        for _ in range(3):
            call = await spending.reserve(request)
            await asyncio.sleep(2.0)
            spending.settle(call, request, Usage(30, completion_tokens=20))
            answered.append(name)

    async with AsyncExitStack() as members, asyncio.timeout(120), asyncio.TaskGroup() as workers:
        for name in ("1", "2", "3"):
            spec = BatchSpec(inputs=["a"], task="{input}", max_total_tokens=15_000)
            spending = Spending(spec, None, lambda _: None, lambda _: None)
            lending = Lending(Store(store), name)
            spending.start(commit=lending.soon, shared=True)
            shared = cast(SharedState, SimpleNamespace(dispatchers={}, spending=spending))
            at_work = lending.at_work(shared, cast(Controls, Steerable()), cast(Backend, ScriptedBackend([])))
            await members.enter_async_context(at_work)
            workers.create_task(ask_three_times(spending, name))
    assert sorted(answered) == ["1", "1", "1", "2", "2", "2", "3", "3", "3"]
