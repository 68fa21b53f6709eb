"""The dispatcher on a real event loop: grants, cancellations and resizes in any order."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.errors import RateLimited
from batch_agent.scheduler.core import Slot
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.scheduler.server_state import ServerState, Terms
from batch_agent.testing import virtual_clock


async def hold(dispatcher: Dispatcher, turns: int = 0) -> Slot:
    dispatcher.scheduler.start_agent()
    return await dispatcher.slots.hold(dispatcher.slots.claim(AgentForecast(), turns))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_cancelled_waiter_gives_its_place_up() -> None:
    dispatcher = Dispatcher(None, 1)
    first = await hold(dispatcher)
    waiter = asyncio.create_task(hold(dispatcher))
    await settle()
    waiter.cancel()
    await settle()
    assert dispatcher.scheduler.waiting == 0
    dispatcher.slots.release(first)
    assert (await hold(dispatcher)).ticket.slot is not None


async def test_a_slot_granted_in_the_moment_of_cancellation_is_not_lost() -> None:
    dispatcher = Dispatcher(None, 1)
    first = await hold(dispatcher)
    waiter = asyncio.create_task(hold(dispatcher))
    await settle()
    dispatcher.slots.release(first)  # the slot is the waiter's now, but the waiter has not run yet
    waiter.cancel()
    await settle()
    assert waiter.cancelled()
    assert dispatcher.scheduler.inflight == 0


async def test_the_feed_is_woken_when_a_slot_would_stay_idle() -> None:
    dispatcher = Dispatcher(None, 1)
    ticket = dispatcher.start_agent(AgentForecast())
    feed = asyncio.create_task(dispatcher.feed(lambda: None).wait_room())
    await settle()
    assert not feed.done()
    dispatcher.slots.withdraw(ticket)
    assert await feed is True


@virtual_clock
async def test_a_turn_that_has_waited_long_enough_for_its_endpoint_waits_for_a_slot_without_spinning() -> None:
    servers = {name: ServerState(name) for name in ("own", "other")}
    dispatcher = Dispatcher(None, 3, servers=servers, terms=Terms(2))
    own, other = dispatcher.scheduler.endpoints
    busy = [dispatcher.slots.claim(AgentForecast(), 0, pinned=endpoint) for endpoint in (own, own, other)]
    dispatcher.slots.withdraw(busy.pop())
    progress = AgentForecast()
    progress.home, progress.tokens = own, 10_000
    turn = asyncio.create_task(dispatcher.slots.hold(ticket := dispatcher.slots.claim(progress, 0)))
    busy.append(dispatcher.slots.claim(AgentForecast(), 0, pinned=other))
    await asyncio.sleep(60)  # longer than its prefix is worth; the clock stands still while something is due
    dispatcher.slots.withdraw(busy[0])
    assert (await turn).ticket is ticket


async def test_draining_tells_the_feed_that_no_room_will_come() -> None:
    dispatcher = Dispatcher(None, 1)
    dispatcher.start_agent(AgentForecast())
    feed = asyncio.create_task(dispatcher.feed(lambda: None).wait_room())
    await settle()
    dispatcher.slots.drain()
    assert await feed is False


async def test_a_paused_dispatcher_grants_nothing_until_resumed() -> None:
    dispatcher = Dispatcher(None, 2)
    dispatcher.pause()
    waiter = asyncio.create_task(hold(dispatcher))
    await settle()
    assert not waiter.done()
    dispatcher.resume()
    assert (await waiter).ticket.slot is not None


@virtual_clock
async def test_a_turn_that_has_waited_long_enough_for_its_endpoint_rings_no_alarm_while_paused() -> None:
    dispatcher = Dispatcher(None, servers={"a": ServerState("a"), "b": ServerState("b")}, terms=Terms(1))
    home = dispatcher.scheduler.endpoints[0]
    progress = [AgentForecast(), AgentForecast()]
    for each in progress:
        dispatcher.scheduler.start_agent()
        each.home, each.tokens = home, 100_000  # its prefix is worth some seconds
    home.server.learn(0.001, 0.0)
    first = dispatcher.slots.claim(progress[0], 0).slot
    assert first is not None and first.endpoint is home
    second = dispatcher.slots.claim(progress[1], 0)
    assert dispatcher.scheduler.due > 0
    dispatcher.pause()
    await asyncio.sleep(3600)  # the clock would stand still if an alarm rang again and again
    dispatcher.resume()
    assert second.slot is not None and second.slot.endpoint is dispatcher.scheduler.endpoints[1]


async def test_retry_after_holds_everyone_back_and_then_lets_them_go() -> None:
    dispatcher = Dispatcher(None, 8)
    slot = await hold(dispatcher)
    dispatcher.endpoints.failed(slot, RateLimited("later", retry_after=0.01))
    dispatcher.slots.release(slot)
    waiter = asyncio.create_task(hold(dispatcher))
    await settle()
    assert not waiter.done()
    assert (await waiter).ticket.slot is not None
    dispatcher.close()


async def test_a_changed_limit_is_reported_with_its_reason() -> None:
    changes: list[tuple[int | None, str]] = []
    dispatcher = Dispatcher(
        None, 8, on_limit=lambda endpoint, reason: changes.append((endpoint.capacity.limit, reason))
    )
    dispatcher.resize(4)
    dispatcher.endpoints.failed(await hold(dispatcher), RateLimited("later"))
    assert [limit for limit, _ in changes] == [4, 1]
    dispatcher.close()


operations = st.lists(
    st.tuples(st.sampled_from(["start", "finish", "cancel", "resize", "pause", "resume", "tick"]), st.integers(0, 50)),
    max_size=120,
)


@settings(max_examples=examples(100), deadline=None)
@given(operations)
def test_in_any_interleaving_of_grant_cancel_and_resize_no_slot_is_lost(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher(None, 3)
        finish: dict[asyncio.Task[None], asyncio.Event] = {}
        inside = 0

        async def agent(done: asyncio.Event, turns: int) -> None:
            nonlocal inside
            slot = await hold(dispatcher, turns)
            inside += 1
            limit = dispatcher.scheduler.max_inflight
            assert limit is None or inside <= max(limit, allowed)
            try:
                await done.wait()
            finally:
                inside -= 1
                dispatcher.slots.release(slot)

        allowed = 3  # the largest limit so far: those inside when it fell may stay
        for step, number in steps:
            if step == "start":
                done = asyncio.Event()
                finish[asyncio.create_task(agent(done, number % 5))] = done
            elif step == "resize":
                dispatcher.resize(1 + number % 6)
                allowed = max(allowed, 1 + number % 6)
            elif step == "pause":
                dispatcher.pause()
            elif step == "resume":
                dispatcher.resume()
            elif step == "tick":
                await asyncio.sleep(0)
            elif finish:
                task = list(finish)[number % len(finish)]
                task.cancel() if step == "cancel" else finish[task].set()
            assert dispatcher.scheduler.inflight >= inside
        dispatcher.resume()
        for event in finish.values():
            event.set()
        ends = await asyncio.gather(*finish, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        assert dispatcher.scheduler.inflight == dispatcher.scheduler.waiting == inside == 0

    asyncio.run(scenario())
