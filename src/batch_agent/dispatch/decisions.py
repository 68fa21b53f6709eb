"""Decides what happens to a row whose request failed, once there is enough evidence.

A row with retries left is retried at once. A row without retries left waits here until its undecided failures are
decided: by another row's answer, by an endpoint that goes down, or by a probe if no other row can give evidence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from batch_agent.backends.base import Probe
from batch_agent.errors import Interrupted
from batch_agent.scheduler.blame import Attempt, Crash, Step, Verdict, next_step
from batch_agent.scheduler.core import Slot
from batch_agent.scheduler.endpoint import Endpoint


class Decisions:
    """``start_probe`` probes an endpoint and returns None if it cannot be probed. ``few_rows`` returns whether too few
    rows are left to tell a bad row from a bad endpoint."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        start_probe: Callable[[Endpoint], asyncio.Task[Probe] | None],
        few_rows: Callable[[], bool],
        pump: Callable[[], None],
    ) -> None:
        self._endpoints, self._start_probe, self._few_rows, self._pump = endpoints, start_probe, few_rows, pump
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
            is_up = await self._ask_probe(attempt, endpoint)
            alone = is_up and verdict.alone and self._few_rows()  # more rows may have arrived meanwhile
            if alone:
                history.contradict(attempt)
        while not endpoint.given_up:
            step = next_step(row, max_retries, retryable=retryable, move=verdict.move)
            if step == "wait" and alone:
                if max_retries and not any(each.server.history.is_ripe(attempt) for each in self._endpoints):
                    return "retry"
                for each in self._endpoints:
                    each.server.history.give_up_on(row)
                return "fail"
            if step == "retry" or (step == "fail" and (alone or not self._is_unclear(slot))):
                return step
            alone = await self._decided(slot)
            if alone and step == "wait":
                is_up = await self._ask_probe(attempt, endpoint)
                alone = is_up and not endpoint.server.inflight
                if alone:
                    history.contradict(attempt)
        return "retry"

    async def _ask_probe(self, attempt: Attempt, endpoint: Endpoint) -> bool:
        """Return whether a probe finds the endpoint up. Records that the row has crashed it, if so."""
        row = attempt.row
        can_crash = attempt.outcome == "broken" and attempt.sound and (attempt.trial or row.suspect)
        probing = self._start_probe(endpoint)
        if probing is not None:
            await asyncio.wait([probing])
        found = None if probing is None or probing.cancelled() else probing.result()
        if found is None or found.state != "down":
            return True
        endpoint.server.history.alone.pop(row, None)
        if can_crash:
            row.crashes.append(Crash(endpoint.server.history, attempt.ended_at))
        return False

    async def _decided(self, slot: Slot) -> bool:
        """Wait for evidence. Returns True if no other row can provide it."""
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting[slot] = decided, slot.ticket.row.undecided
        try:
            self._pump()
            return await decided
        finally:
            self.waiting.pop(slot, None)

    def _is_unclear(self, slot: Slot) -> bool:
        return slot.endpoint.server.refusals.is_unclear(slot.ticket.progress)

    def wake(self) -> None:
        """Wake the rows whose failures were decided."""
        for slot, (decided, undecided) in tuple(self.waiting.items()):
            row = slot.ticket.row
            changed = row.undecided < undecided or not (row.undecided or self._is_unclear(slot))
            if not decided.done() and (changed or slot.endpoint.given_up):
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
