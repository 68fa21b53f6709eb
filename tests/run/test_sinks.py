"""Events on their way from a run to its sinks."""

from __future__ import annotations

import asyncio
import logging

import pytest

from batch_agent.events import HELD_SECONDS, MOST_HELD, DrainStarted, Event, Held, ListSink, ModelChosen, Sinks
from batch_agent.testing import virtual_clock

DRAIN = DrainStarted(1.0, "run")


class Seen(ListSink):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.handlers = {DrainStarted: self.events.append}


class Raises(ListSink):
    def __init__(self) -> None:
        self.calls = 0
        self.handlers = {DrainStarted: self._fail}

    def _fail(self, event: DrainStarted) -> None:
        self.calls += 1
        raise RuntimeError("broken")


@virtual_clock
async def test_a_held_event_arrives_within_a_second_and_of_many_at_once() -> None:
    seen, held = Seen(), Held()
    held.add(seen)
    emit = Sinks([held])
    for _ in range(MOST_HELD + 1):
        emit(DRAIN)
    assert len(seen.events) == MOST_HELD
    await asyncio.sleep(HELD_SECONDS)
    assert len(seen.events) == MOST_HELD + 1
    emit(DRAIN)
    held.flush()
    assert len(seen.events) == MOST_HELD + 2


@virtual_clock
async def test_a_sink_gets_only_the_types_that_it_has_handlers_for() -> None:
    seen, held, everything = Seen(), Held(), list[Event]()
    held.add(seen)
    emit = Sinks([held, everything.append])
    for event in (DRAIN, ModelChosen(2.0, "run", "m")):
        emit(event)
    held.flush()
    assert seen.events == [DRAIN] and len(everything) == 2


@virtual_clock
async def test_a_sink_that_raises_gets_no_more_events_and_the_others_do(caplog: pytest.LogCaptureFixture) -> None:
    seen, broken, held, direct = Seen(), Raises(), Held(), Raises()
    held.add(broken)
    held.add(seen)
    emit = Sinks([direct, held])
    with caplog.at_level(logging.CRITICAL):
        for _ in range(3):
            emit(DRAIN)
            held.flush()
    assert (direct.calls, broken.calls, len(seen.events)) == (1, 1, 3)
