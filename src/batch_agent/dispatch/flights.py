"""The requests in flight of one dispatcher: their time limits, and those that are taken back.

A request is taken back when its endpoint went down or is silent, when a trial needs its slot, and at the end of a batch
when a much slower endpoint still has it while others idle. It then ends as a timeout that is nobody's fault, and is
sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from math import inf

from batch_agent.dispatch.deadlines import Deadline, Deadlines
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.routing import Router

COMPUTED, QUEUED = 1.5, 0.6  # times what an idle endpoint takes, that a request must still take to be moved there
SLOWER = 1.25  # times what an idle endpoint takes: its answers wait in a queue
SHORTEST_TAIL = 0.05  # seconds between two looks at the end of a batch
STREAM_SILENCE = 3.0  # seconds without a byte, after which an answer that has begun is taken back
UNKNOWN_FACTOR = 3.0  # times the usual seconds, after which a request at an endpoint that never answered is taken back


class Flights:
    """``look_again`` is called when the end of a batch is to be looked at again."""

    def __init__(self, router: Router, look_again: Callable[[], None]) -> None:
        self._router, self._look_again = router, look_again
        self._at: dict[Endpoint, dict[Ticket, Deadline]] = {}
        self._patient: dict[Endpoint, Ticket] = {}  # the trial that is waited for beside the next ones
        self._deadlines = Deadlines()
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._deadlines.close()
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, ticket: Ticket, seconds: float | None) -> Deadline:
        """The time limit of one request; ``end`` must follow. A trial has to be answered in the time that the endpoint
        usually takes."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        deadline = self._deadlines.after(self._trial_seconds(ticket, endpoint, seconds) if ticket.trial else seconds)
        flights = self._at.get(endpoint)
        if flights is None:
            flights = self._at[endpoint] = {}
        flights[ticket] = deadline
        return deadline

    def _trial_seconds(self, ticket: Ticket, endpoint: Endpoint, seconds: float | None) -> float | None:
        """Time limit of a trial. While other endpoints work, it is not waited for longer than they may be silent."""
        health, limit = endpoint.health, inf if seconds is None else seconds
        trial = health.trial_seconds(ticket.sent_at)
        if trial is not None and self._patient.setdefault(endpoint, ticket) is ticket:
            trial = health.patient_seconds(ticket.sent_at)
        if trial is not None:
            limit = min(limit, trial)
        if self._router.others_work(endpoint) and not health.patient:
            limit = min(limit, self._router.longest_silence)
        return None if limit == inf else limit

    def within(self, seconds: float) -> Deadline:
        """A time limit for a part of a request."""
        return self._deadlines.after(seconds)

    def end(self, ticket: Ticket) -> None:
        endpoint = ticket.endpoint
        assert endpoint is not None
        flights = self._at[endpoint]
        flights.pop(ticket, None)
        if not flights and endpoint.leaving:
            del self._at[endpoint]
        if ticket.trial and self._patient.get(endpoint) is ticket:
            del self._patient[endpoint]

    def at(self, endpoint: Endpoint) -> Collection[Ticket]:
        """The requests that are in flight there."""
        return tuple(self._at.get(endpoint, ()))

    def has(self, ticket: Ticket) -> bool:
        """Whether its request was sent, and has not ended."""
        return ticket.endpoint is not None and ticket in self._at.get(ticket.endpoint, ())

    def patient(self, endpoint: Endpoint) -> Ticket | None:
        """The trial that may be waited for beside the next ones."""
        return self._patient.get(endpoint)

    # Taking back

    def recall(self, ticket: Ticket, at: float) -> None:
        """Take the request back at that time, if it is not answered before."""
        assert ticket.endpoint is not None
        deadline = self._at[ticket.endpoint][ticket]
        if not deadline.expired:
            ticket.recalled = True
            if ticket.heard_at:
                at = max(at, ticket.heard_at + STREAM_SILENCE)
            deadline.reschedule(min(deadline.when, at))

    def heard(self, ticket: Ticket, now: float) -> None:
        """A piece of its answer was passed on. From now on it is taken back only if no more comes for a while."""
        assert ticket.endpoint is not None
        ticket.heard_at = now
        if ticket.recalled:
            self._at[ticket.endpoint][ticket].reschedule(now + STREAM_SILENCE)

    def keep(self, ticket: Ticket) -> None:
        """Do not take it back after all. An answer that has begun has no time limit."""
        assert ticket.endpoint is not None
        ticket.recalled = False
        self._at[ticket.endpoint][ticket].reschedule(inf)

    def recall_all(self, endpoint: Endpoint, now: float) -> None:
        for ticket in self.at(endpoint):
            self.recall(ticket, now)

    def recall_down(self, now: float) -> None:
        """Take back everything at endpoints that are down."""
        for endpoint in tuple(self._at):
            if endpoint.health.is_down:
                self.recall_all(endpoint, now)

    def recall_oldest(self, endpoint: Endpoint, now: float) -> None:
        """Take back one request from before the outage, to be the trial: all slots may be theirs."""
        began = endpoint.health.down_since
        waiting = [ticket for ticket in self.at(endpoint) if ticket.sent_at < began and not ticket.recalled]
        if waiting:
            self.recall(min(waiting, key=lambda ticket: ticket.sent_at), now)

    # The end of a batch

    def even_out(self, now: float) -> None:
        """Slots stay idle: take back what a much slower endpoint still has, once for each turn, and look again soon."""
        if self._timer is not None:
            return
        best = self._router.best()
        fast = 0.0 if best is None else self._router.seconds(best)
        if not fast:
            return
        slow = [
            (left, ticket)
            for endpoint in self._at
            if endpoint is not best and not (endpoint.health.is_down or endpoint.health.patient)
            for place, ticket in enumerate(self.at(endpoint), start=1)
            if (left := self._seconds_left(endpoint, ticket, place, fast, now)) > fast and _may_move(ticket)
        ]
        slow.sort(key=lambda item: -item[0])
        for _, ticket in slow[: int(min(self._router.spare, len(slow)))]:
            ticket.moves += 1
            self.recall(ticket, now)
        self._timer = asyncio.get_running_loop().call_later(max(SHORTEST_TAIL, fast / 2), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._look_again()

    def _seconds_left(self, endpoint: Endpoint, ticket: Ticket, place: int, fast: float, now: float) -> float:
        """What a request is still expected to take where it is: by the usual time, and by its place in the server's
        queue. Each is corrected for what moving it costs: one that is being computed has come further than one that is
        in the queue."""
        waited, server = now - ticket.sent_at, endpoint.server
        if server.seconds:
            queued = place * server.gap / QUEUED if server.seconds > SLOWER * fast else 0.0
            return max((server.seconds - waited) / COMPUTED, queued)
        # Twice as long after each move: between two that have never answered, one may be slow and the other dead.
        return inf if waited > UNKNOWN_FACTOR * self._router.usual * 2.0 ** min(ticket.moves, 30) else 0.0


def _may_move(ticket: Ticket) -> bool:
    """Once, but as often as needed from endpoints that have never answered."""
    assert ticket.endpoint is not None
    moved = ticket.moves > 0 and ticket.endpoint.server.seconds > 0
    return not (ticket.trial or ticket.pinned or moved or ticket.recalled or ticket.heard_at)
