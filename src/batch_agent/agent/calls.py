"""Runs the tool calls of one answer. All start together; each is recorded and reported when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from batch_agent.agent.early_calls import EarlyCalls
from batch_agent.agent.resources import Resources
from batch_agent.errors import StoreError
from batch_agent.events import ToolFinished, ToolStarted
from batch_agent.job import Job
from batch_agent.messages import ToolCall
from batch_agent.record.steps import Begun, Outcome
from batch_agent.record.trail import Trail
from batch_agent.tools.pool import ToolOutcome


async def run_calls(
    r: Resources,
    trail: Trail,
    job: Job,
    turn: int,
    calls: Mapping[int, ToolCall],
    known: dict[int, str],
    early: EarlyCalls | None,
) -> None:
    """Run these calls of an agent's turn, by position in its answer, until the last one ends. Outcomes are added to
    ``known`` as they arrive. ``early`` has the calls that started while the answer was streamed."""
    writes = tuple(place for place, call in calls.items() if not r.tools.can_start_early(call.name))
    if writes and trail.records:
        # A begun write must never be mistaken for one that did not start.
        trail.add(Begun(writes))
        await trail.settle()
    index = job.index
    every, left = r.dispatcher.slots.loop.create_future(), len(calls)

    def ended(place: int, call: ToolCall, outcome: ToolOutcome | Exception) -> None:
        nonlocal left
        if isinstance(outcome, Exception):
            if not every.done():
                every.set_exception(outcome)
            return
        known[place] = outcome.text
        # Recorded at once: another call of the same answer may run for hours.
        with suppress(StoreError):  # the agent gets the error at its next step
            trail.add(Outcome(place, outcome.text))
        seconds, ok, source = outcome.seconds, outcome.ok, outcome.source
        r.emit(ToolFinished(r.clock(), r.run, index, turn, place, call.id, call.name, seconds, ok, source))
        left -= 1
        if not left and not every.done():  # it is done if the agent was cancelled
            every.set_result(None)

    now = r.clock()
    for place, call in calls.items():
        r.emit(ToolStarted(now, r.run, index, turn, place, call.id, call.name))
    begun = early.started if early is not None else {}
    pending = {place: begun.get(call.id) or r.start_tool(call, job, turn) for place, call in calls.items()}
    if r.prewarm is not None:
        r.prewarm.asked(index, calls.values())
    try:
        for place, waiting in pending.items():
            waiting.on_end(partial(ended, place, calls[place]))
        # A begun write is always waited for, because its outcome must be known.
        await (every if writes else r.dispatcher.wait_for_tools(every))
    finally:
        for waiting in pending.values():
            waiting.abandon()
