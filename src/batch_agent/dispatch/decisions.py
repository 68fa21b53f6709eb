"""Decides what happens to a row whose request failed, once there is enough evidence.

A row with retries left is retried at once. A row without retries left waits here until its undecided failures are
decided: by another row's answer, by an endpoint that goes down, or, if no other row can give evidence, by a probe and
a control request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from batch_agent.backends.base import Probe
from batch_agent.errors import Interrupted
from batch_agent.scheduler.blame import Attempt, Step, Verdict, next_step
from batch_agent.scheduler.core import Slot
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint

Found = Literal[
    "down",
    "up",  # says a probe; a control request cannot be sent
    "answered",  # a control request was answered, which has decided about the row
    "untold",  # a control request will decide
]


class Decisions:
    """``start_probe`` probes an endpoint and ``start_control`` sends it a control request; each returns None if that is
    not possible. ``can_ask`` returns whether a control request is possible, ``few_rows`` whether too few rows are left
    to tell a bad row from a bad endpoint."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        start_probe: Callable[[Endpoint], asyncio.Task[Probe] | None],
        start_control: Callable[[Endpoint], asyncio.Task[bool | None] | None],
        can_ask: Callable[[Endpoint], bool],
        few_rows: Callable[[], bool],
        pump: Callable[[], None],
    ) -> None:
        self._endpoints, self._start_probe, self._start_control = endpoints, start_probe, start_control
        self._can_ask, self._few_rows, self._pump = can_ask, few_rows, pump
        self.waiting: dict[Slot, tuple[asyncio.Future[bool], int]] = {}  # with the number of undecided failures
        self.under_way = 0  # rows whose own failures are still undecided

    async def step(
        self, slot: Slot, attempt: Attempt, verdict: Verdict, max_retries: int, *, retryable: bool, wait: bool
    ) -> Step:
        """Return what happens to the row. Without ``wait``, decide with the evidence so far. Raises Interrupted when
        the run is over."""
        endpoint, row = slot.endpoint, slot.ticket.row
        is_unclear = self._is_unclear(slot)
        step = next_step(row, max_retries, retryable=retryable, move=verdict.move)
        if wait and not endpoint.given_up and (verdict.hears_probe or step == "wait" or is_unclear):
            self.under_way += not is_unclear  # a denied row is no evidence about failures
            try:
                step = await self._decide(slot, endpoint, attempt, verdict, max_retries, retryable)
            finally:
                self.under_way -= not is_unclear
        if endpoint.given_up:
            return "retry"
        if step == "retry":
            row.excuse(max_retries)
        return "fail" if step == "wait" else step

    async def _decide(
        self,
        slot: Slot,
        endpoint: Endpoint,
        attempt: Attempt,
        verdict: Verdict,
        max_retries: int,
        retryable: bool,
    ) -> Step:
        """Wait for evidence, then return the next step."""
        row, history, alone = slot.ticket.row, endpoint.server.history, False
        if verdict.hears_probe:
            # One failure may be a chance. A row that has used up its retries gets no second one.
            step = next_step(row, max_retries, retryable=retryable, move=verdict.move)
            found = await self._examine(attempt, endpoint, asks=verdict.alone and (row.failures > 1 or step == "wait"))
            alone = found == "up" and verdict.alone and self._few_rows()  # more rows may have arrived meanwhile
            if alone:
                history.contradict(attempt)
        while not endpoint.given_up and not self._is_excused(slot):
            step = next_step(row, max_retries, retryable=retryable, move=verdict.move)
            if step == "wait" and alone:
                if max_retries and not any(each.server.history.is_ripe(attempt) for each in self._endpoints):
                    return "retry"
                for each in self._endpoints:
                    each.server.history.give_up_on(row)
                return "fail"
            if step == "retry" or (step == "fail" and (alone or not self._is_unclear(slot))):
                if step == "retry" or attempt.outcome != "denied" or row.denials < N.several or row.asked_again:
                    return step
                row.asked_again = True  # it may have been an outage, also if others were answered since
                return "retry"
            alone = await self._decided(slot)
            if alone and step == "wait":
                open_at = [each for each in self._endpoints if row in each.server.history.open]
                found = await self._examine(attempt, open_at[0] if open_at else endpoint, asks=True)
                alone = found == "up" and not endpoint.server.inflight
                if alone:
                    history.contradict(attempt)
        return "retry"

    async def _examine(self, attempt: Attempt, endpoint: Endpoint, *, asks: bool) -> Found:
        """Find out whether the endpoint is up: by a probe and then, with ``asks``, by a control request, whose answer
        decides about the row. If the row has crashed the endpoint, that is recorded."""
        row = attempt.row
        alone = attempt.trial or row.suspect or self._few_rows()
        can_crash = attempt.outcome == "broken" and alone and not attempt.left_in_flight
        probing = self._start_probe(endpoint)
        if probing is not None:
            await asyncio.wait([probing])
        found = None if probing is None or probing.cancelled() else probing.result()
        if found is None or found.state != "down":
            if attempt.trial and self._can_ask(endpoint):
                return "untold"  # a later trial
            asked = self._start_control(endpoint) if asks and not attempt.trial else None
            if asked is None:
                return "up"
            await asyncio.wait([asked])
            answered = None if asked.cancelled() else asked.result()
            if answered is not False:
                return "up" if answered is None else "answered"
            if not endpoint.health.is_down:
                return "untold"  # it denied the control request
        endpoint.server.history.alone.pop(row, None)
        if can_crash:
            row.crash(endpoint.server.history, attempt)
        return "down"

    async def _decided(self, slot: Slot) -> bool:
        """Wait for evidence. Returns True if no other row can give any."""
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting[slot] = decided, slot.ticket.row.undecided
        try:
            self._pump()
            return await decided
        finally:
            self.waiting.pop(slot, None)

    def _is_unclear(self, slot: Slot) -> bool:
        return slot.endpoint.server.denials.is_unclear(slot.ticket.progress)

    def _is_excused(self, slot: Slot) -> bool:
        """Return whether the row was denied by an endpoint that turned out to deny every row."""
        return slot.endpoint.health.is_denied and self._is_unclear(slot)

    def wake(self) -> None:
        """Wake the rows whose failures were decided."""
        for slot, (decided, undecided) in tuple(self.waiting.items()):
            row = slot.ticket.row
            changed = row.undecided < undecided or not (row.undecided or self._is_unclear(slot))
            if not decided.done() and (changed or slot.endpoint.given_up or self._is_excused(slot)):
                decided.set_result(False)

    def interrupt(self, over: Interrupted) -> None:
        for decided, _ in self.waiting.values():
            if not decided.done():
                decided.set_exception(over)

    def nobody_else(self) -> None:
        """Called when no further row will be sent: wake the rows that no request in flight can give evidence for."""
        for slot, (decided, _) in tuple(self.waiting.items()):
            told_by = [each for each in self._endpoints if slot.ticket.row in each.server.history.open]
            if not decided.done() and not any(each.server.inflight for each in told_by or [slot.endpoint]):
                decided.set_result(True)
