"""The requests in flight of one dispatcher: their time limits, and which of them are recalled.

A request is recalled (cancelled, and sent again) in four cases: its endpoint went down or is silent; a trial needs its
slot; it is far older than the slowest answer, so that it may be lost; or, at the end of a batch, a much slower endpoint
still works on it while others are idle. It then ends as a timeout that is charged to no side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from math import inf

from batch_agent.dispatch.deadlines import Deadline, Deadlines
from batch_agent.dispatch.policy import Question
from batch_agent.scheduler.core import Slot, Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.routing import Router

# A request moves to an idle endpoint if its remaining time is more than this many times what that endpoint takes.
COMPUTED, QUEUED = 1.5, 0.6
CONTEXT = 3.0  # times these, if the other endpoint has to compute the context of the agent again
SLOWER = 1.25  # times what others take: then answers wait in a queue, or the endpoint is slower than the others
SHORTEST_TAIL = 0.05  # seconds between two checks at the end of a batch
STREAM_SILENCE = 3.0  # seconds without a byte after which an answer that has begun is recalled
SHORTEST_GAIN = 0.1  # seconds that a move must save at least: less may be a delay of our own event loop
# An endpoint that never answered loses its requests after this factor of the usual time or ``SLOWER`` times the slowest
# answer of others, whichever is sooner, and at least these seconds.
UNKNOWN_FACTOR, UNKNOWN_SECONDS = 3.0, 0.5
# A request may be lost after this factor of the slowest answer, and at least these seconds, without a byte.
LOST_FACTOR, LOST_SECONDS = 20.0, 30.0


class Flights:
    """Calls ``look_again`` when the end of a batch has to be checked again."""

    def __init__(self, router: Router, look_again: Callable[[], None]) -> None:
        self._router, self._look_again = router, look_again
        self._at: dict[Endpoint, dict[Slot, tuple[Deadline, Question]]] = {}  # the oldest first
        self._patient: dict[Endpoint, Slot] = {}  # the trial that continues beside later ones
        self._deadlines = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self.draining = False  # no new agents start

    def close(self) -> None:
        self._deadlines.close()
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, slot: Slot, question: Question, seconds: float | None, now: float) -> Deadline:
        """Return the time limit of one request; ``end`` must follow. A trial must be answered within the usual time."""
        endpoint = slot.endpoint
        if slot.ticket.control:
            seconds = endpoint.health.control_seconds(now)
        elif slot.trial:
            seconds = self._trial_seconds(slot, endpoint, seconds)
        deadline = Deadline(self._deadlines, inf if seconds is None else now + seconds)
        flights = self._at.get(endpoint)
        if flights is None:
            flights = self._at[endpoint] = {}
        flights[slot] = deadline, question
        return deadline

    def _trial_seconds(self, slot: Slot, endpoint: Endpoint, seconds: float | None) -> float | None:
        """Return the time limit of a trial. While other endpoints work, it is at most their allowed silence."""
        health, limit = endpoint.health, inf if seconds is None else seconds
        trial = health.trial_seconds(slot.sent_at)
        if trial is not None and self._patient.setdefault(endpoint, slot) is slot:
            trial = health.patient_seconds(slot.sent_at)
        if trial is not None:
            limit = min(limit, trial)
        if self._router.others_work(endpoint) and not health.patient:
            limit = min(limit, self._router.longest_silence)
        return None if limit == inf else limit

    def within(self, seconds: float) -> Deadline:
        """Return a time limit for a part of a request."""
        return self._deadlines.after(seconds)

    def end(self, slot: Slot) -> None:
        endpoint = slot.endpoint
        flights = self._at[endpoint]
        flights.pop(slot, None)
        if not flights and endpoint.leaving:
            del self._at[endpoint]
        if slot.trial and self._patient.get(endpoint) is slot:
            del self._patient[endpoint]

    def at(self, endpoint: Endpoint) -> Collection[Slot]:
        """Return the requests in flight at the endpoint."""
        return tuple(self._at.get(endpoint, ()))

    def has(self, slot: Slot) -> bool:
        """Return whether the request was sent and has not ended."""
        return slot in self._at.get(slot.endpoint, ())

    def patient(self, endpoint: Endpoint) -> Slot | None:
        """Return the trial that may continue beside later ones."""
        return self._patient.get(endpoint)

    # Recalls

    def recall(self, slot: Slot, at: float) -> None:
        """Recall the request at that time, if it is not answered before."""
        deadline, _ = self._at[slot.endpoint][slot]
        if not deadline.expired:
            slot.recalled = True
            if slot.heard_at:
                at = max(at, slot.heard_at + STREAM_SILENCE)
            deadline.reschedule(min(deadline.when, at))

    def heard(self, ticket: Ticket, now: float) -> None:
        """Note that a piece of the answer arrived. From now on only a pause without data recalls the request."""
        slot = ticket.slot
        if slot is None:
            return
        slot.heard_at = now
        if slot.recalled:
            self._at[slot.endpoint][slot][0].reschedule(now + STREAM_SILENCE)

    def keep(self, slot: Slot) -> None:
        """Cancel a pending recall. An answer that has begun has no time limit."""
        slot.recalled = False
        self._at[slot.endpoint][slot][0].reschedule(inf)

    def withdraw_all(self, now: float) -> list[tuple[str, float]]:
        """Recall all requests for good. Returns the row of each, as far as it is known, and when it was sent."""
        left: list[tuple[str, float]] = []
        for flights in self._at.values():
            for slot, (deadline, question) in flights.items():
                slot.withdrawn = slot.recalled = True
                deadline.reschedule(min(deadline.when, now))
                left.append(("" if question.request is None else question.request.job_id, slot.sent_at))
        return left

    def recall_all(self, endpoint: Endpoint, now: float) -> None:
        for slot in self.at(endpoint):
            self.recall(slot, now)

    def recall_down(self, now: float) -> None:
        """Recall all requests at endpoints that are down."""
        for endpoint in tuple(self._at):
            if endpoint.health.is_down:
                self.recall_all(endpoint, now)

    def recall_oldest(self, endpoint: Endpoint, now: float, *, once: bool = False) -> None:
        """Recall one request from before the outage, so that a trial gets its slot. ``once``: no turn twice."""
        began = endpoint.health.down_since if endpoint.health.is_down else now
        waiting = [slot for slot in self.at(endpoint) if slot.sent_at < began and not slot.recalled]
        waiting = [slot for slot in waiting if not (slot.ticket.control or (once and slot.ticket.lost))]
        if waiting:
            oldest = min(waiting, key=lambda slot: slot.sent_at)
            oldest.ticket.lost = True
            self.recall(oldest, now)

    # Lost requests

    def heard_at(self, slot: Slot) -> float:
        """Return when a piece of the answer last arrived; 0 if none has."""
        return max(slot.heard_at, self._at[slot.endpoint][slot][1].heard_at)

    def lost_at(self, endpoint: Endpoint) -> float:
        """Return when the next request there will be so old that it may be lost."""
        patience = self._lost_after(endpoint)
        if patience == inf:
            return inf
        return min(
            (self._age_from(slot) + patience for slot in self._at.get(endpoint, ()) if _may_be_lost(slot)), default=inf
        )

    def recall_lost(self, endpoint: Endpoint, room: float, now: float) -> None:
        """Recall requests that may be lost, each once, as far as there is ``room`` for them. They need no room beside
        their own if the endpoint has answered nothing for as long, or has answered requests that were sent later: then
        they do not wait in its queue."""
        patience, server = self._lost_after(endpoint), endpoint.server
        silent = now - server.answered_at >= patience
        if not self._slowest(endpoint):
            endpoint.health.sounded = True
            room, silent = min(room, 1), False
        for slot in self.at(endpoint):
            if not _may_be_lost(slot) or now - self._age_from(slot) < patience:
                continue
            if room <= 0 and not silent and slot.sent_at >= server.answered_sent:
                continue
            room -= 1
            slot.ticket.lost = True
            self.recall(slot, now)

    def _age_from(self, slot: Slot) -> float:
        return max(slot.sent_at, self.heard_at(slot))

    def _lost_after(self, endpoint: Endpoint) -> float:
        """Return the seconds after which a request may be lost. If only control requests were answered, it is not known
        how long a row takes: then this holds for one request, whose second attempt shows it."""
        health, slowest = endpoint.health, self._slowest(endpoint)
        if health.patient or health.is_down or not (slowest or (health.answered and not health.sounded)):
            return inf
        return max(LOST_SECONDS, LOST_FACTOR * slowest)

    def _slowest(self, endpoint: Endpoint) -> float:
        return endpoint.health.slowest or self._router.slowest

    def loaded(self, endpoint: Endpoint, waiting: int, now: float) -> None:
        """If the run is being drained, withdraw the first turns that wait in the server's queue: the newest."""
        if self.draining and waiting > 0:
            first = [
                each
                for each in self.at(endpoint)
                if each.ticket.progress.turns == 0 and not (each.heard_at or each.trial)
            ]
            for slot in sorted(first, key=lambda each: -each.sent_at)[:waiting]:
                slot.withdrawn = True
                self.recall(slot, now)

    # The end of a batch

    def even_out(self, now: float) -> None:
        """Recall requests of a much slower endpoint while slots are idle, once per turn. Schedule the next check."""
        if self._timer is not None:
            return
        best = self._router.best()
        fast = 0.0 if best is None else self._router.seconds(best)
        if not fast:
            return
        slow = [
            (left, slot)
            for endpoint in self._at
            if endpoint is not best and not (endpoint.health.is_down or endpoint.health.patient)
            for place, slot in enumerate(self.at(endpoint), start=1)
            if (left := self._seconds_left(endpoint, slot, place, fast, now) / _cost_of_moving(slot))
            > fast + SHORTEST_GAIN
            and _may_move(slot)
        ]
        slow.sort(key=lambda item: -item[0])
        for _, slot in slow[: int(min(self._router.spare, len(slow)))]:
            slot.ticket.moves += 1
            self._recall_slow(slot, now)
        self._timer = asyncio.get_running_loop().call_later(max(SHORTEST_TAIL, fast / 2), self._ring)

    def _recall_slow(self, slot: Slot, now: float) -> None:
        server = slot.endpoint.server
        if not server.seconds:
            server.unanswered = max(server.unanswered, now - slot.sent_at)
        self.recall(slot, now)

    def _ring(self) -> None:
        self._timer = None
        self._look_again()

    def _seconds_left(self, endpoint: Endpoint, slot: Slot, place: int, fast: float, now: float) -> float:
        """Return the seconds that the request is still expected to take where it is, from the usual time and from its
        place in the server's queue. Each is corrected for the cost of moving: a request being computed has made more
        progress than a queued one."""
        waited, server = now - slot.sent_at, endpoint.server
        if server.seconds:
            if server.seconds <= SLOWER * fast:
                return (server.seconds - waited) / COMPUTED
            # A server that computes many requests together sends no answer between two rounds.
            silent = now - server.answered_at if waited > server.seconds else 0.0
            return max((server.seconds - waited) / COMPUTED, max(place * server.gap, silent) / QUEUED)
        # The wait doubles with each move: of two endpoints that never answered, one may be slow and the other dead.
        patience = min(UNKNOWN_FACTOR * self._router.usual, SLOWER * self._router.slowest)
        return inf if waited > max(UNKNOWN_SECONDS, patience) * 2.0 ** min(slot.ticket.moves, 30) else 0.0


def _may_be_lost(slot: Slot) -> bool:
    return not (slot.ticket.lost or slot.ticket.control or slot.trial or slot.recalled)


def _cost_of_moving(slot: Slot) -> float:
    """Return a factor: the context of an agent that has taken turns is computed again at another endpoint."""
    return CONTEXT if slot.ticket.progress.turns else 1.0


def _may_move(slot: Slot) -> bool:
    """Return whether the request may be moved: once, or without limit from endpoints that have never answered."""
    moved = slot.ticket.moves > 0 and slot.endpoint.server.seconds > 0
    return not (slot.trial or slot.ticket.pinned or moved or slot.recalled or slot.heard_at)
