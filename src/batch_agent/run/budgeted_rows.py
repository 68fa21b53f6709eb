"""Starts the rows of a worker only as far as the budget pays for them until their ends.

``scheduler.row_budget`` decides which row may start. This module lets a row wait for that decision, and reports the
row's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from batch_agent.agent.dialogue import Resources
from batch_agent.compiler.plan import Plan
from batch_agent.dispatch.feed import Feed
from batch_agent.dispatch.spending import Spending
from batch_agent.job import AgentResult, Job, is_interrupted
from batch_agent.record.commits import Trail
from batch_agent.scheduler.row_budget import StageRows

TURNS = 8.0  # first requests that a row with tools is expected to cost, until a row has ended
REPAIRED = 2.0  # the same for a row whose answer may be repaired
# Seconds in which the output of a row reaches the next stage of a pipeline; with several workers, their reports too.
MOVING, MOVING_FAR = 0.5, 3.0


class BudgetedRows:
    """Starts the rows of a worker only as far as the budget pays for them until their ends."""

    def __init__(self, spending: Spending, resources: Resources, feed: Feed) -> None:
        assert spending.rows is not None
        self._spending = spending
        self._rows = spending.rows
        self._r = resources
        self._feed = feed
        self._stage: StageRows = spending.rows.stage_of(resources.run)
        self._stage.patient = resources.backend.capabilities.patient

    async def begin(
        self,
        job: Job,
        trails: Sequence[Trail],
        plan: Plan,
        is_over: Callable[[], bool],
        *,
        samples: int = 1,
        begun: bool = False,
    ) -> bool:
        """Wait until the row may start. Returns False if it never will. A row that needs no request may always start;
        so may a row with several ``samples`` that has ``begun``."""
        if trails and all(trail.ended for trail in trails):
            return True
        past = [past for trail in trails for past in (trail.past, trail.past.left) if past is not None]
        usages = [reply.usage for each in past for reply in each.replies]
        costs = [trail.past.spent.cost or 0.0 for trail in trails if trail.past.spent is not None]
        before = self._spending.part(usages, sum(costs)) if usages or costs else 0.0
        if not (self._stage.guess or self._stage.ended):
            prompts = sum(map(plan.tokens_of, job.parts or [job]))
            self._stage.guess = self._spending.guess(self._r.shapes.first, prompts, samples * self._turns)
        may_start = partial(self._spending.may_start, self._stage, before)
        if not begun and not may_start() and not await self._wait(may_start, is_over):
            return False
        self._stage.begin(job.index, before)
        return True

    async def _wait(self, may_start: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Wait until the row may start and there is room for it. Returns False if it never will."""
        feed = self._feed
        self._stage.gated = True
        try:
            while not may_start():
                self._spending.ask_for_rows()
                feed.set_reading(True)  # the row may depend on those that run, like an input that is not there yet
                try:
                    if not await feed.wait_gate(may_start, is_over):
                        return False
                finally:
                    feed.set_reading(False)
                if not await feed.wait_room(is_over):
                    return False
            return True
        finally:
            self._stage.gated = False

    @property
    def _turns(self) -> float:
        """The expected cost of a row, before any row has ended, in units of a first request. Later turns have longer
        prompts."""
        r = self._r
        if r.ends_with_answer and not r.shapes.first.tools:
            return REPAIRED if r.schema is not None and r.policy.max_retries else 1.0
        return TURNS if r.max_turns is None else min(TURNS, r.max_turns)

    def end(self, row: int, result: AgentResult[object] | None) -> None:
        slots = self._r.dispatcher.slots
        self._stage.end(row, counts=result is not None and not result.resumed and not is_interrupted(result))
        if result is not None and result.ok and not self._rows.is_last(self._stage):
            self._stage.moving += 1
            slots.loop.call_later(MOVING if self._rows.allowance is None else MOVING_FAR, self._arrived)
        slots.pump()  # another row may start now

    def _arrived(self) -> None:
        self._stage.moving -= 1
        self._r.dispatcher.slots.pump()
