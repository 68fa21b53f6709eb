"""All that is known of one server: one state, changed by events, which answers with effects.

    endpoints.py ── Sent, Answered, Failed, Reading, ProbeEnded, Tick … ──▶ ServerState.on(event, now) ──▶ effects

There is one object per server and process. The backend or fleet owns it and lends it to every dispatcher that uses the
server, so that two runs at one server share one rate limit and see one outage. Each dispatcher uses it through an
``Endpoint`` of its own.

``on`` is pure: a recorded or simulated life of a server is a table of events. It decides an attempt's outcome once,
from the error and this state, and then whether the server is up, doubted, held or down, whose fault the failure was,
and how many requests the server may have. The dispatcher carries the effects out and decides nothing. ``why`` says
which rule made each conclusion, from which evidence, and since when.

The parts: ``health`` (up or down, trials, silence), ``blame`` (whose fault), ``capacity`` (requests at once), ``rates``
(requests per minute), ``cache_size`` (tokens of the KV cache). They never read each other; only this module does.

A dispatcher with endless patience is that of a service. Its server is never given up: every refusal of all requests is
an outage with trials, whatever the status, and the first good answer ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from batch_agent.errors import BackendError, ContextOverflow, RateLimited, Rejected
from batch_agent.scheduler.blame import (
    DENIED,
    Attempt,
    Denials,
    EndpointHistory,
    Outcome,
    RowHistory,
    Scope,
    Verdict,
    concern_of,
    judge,
    outcome_of,
)
from batch_agent.scheduler.cache_size import CacheSize
from batch_agent.scheduler.capacity import MOST, Capacity, LimitSearch
from batch_agent.scheduler.health import Health
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.rates import LONGEST_DROUGHT, MINUTE, LearntRate, Rates, is_spent
from batch_agent.scheduler.server_events import (
    About,
    Answered,
    Around,
    CameUp,
    Control,
    Effects,
    Failed,
    GiveUp,
    Judged,
    Limit,
    ProbeEnded,
    Reading,
    ReadingLost,
    Ready,
    Reason,
    Recall,
    SendProbe,
    Sent,
    ServerEvent,
    Tick,
    TrialEnded,
    Unasked,
    Wake,
    WentDown,
)

if TYPE_CHECKING:
    from batch_agent.scheduler.core import Slot
    from batch_agent.scheduler.server import Endpoint

ALL_REFUSED = "the run stopped because every row is refused: {error}"
MOST_REASONS = 50  # that are remembered
NONE: Effects = []
WAKE, PROBE, CONTROL = Wake(), SendProbe(), Control()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a dispatcher states about a server before its first request. ``start``: where the search for the limit of
    requests in flight begins; None if the limit is known, and is ``ceiling``."""

    ceiling: int | None = None
    start: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    by_clock: bool = True  # the search may take its first steps before there are answers
    given: bool = False  # the user gave ``ceiling``, so the server's own number is ignored
    timeout: float | None = None  # time limit of a request in seconds


class ServerState:
    """``weight``: its share; ``models``: those it serves (None: unknown), ``stated`` by the user or listed by the
    server, which may serve others too; ``context``: in tokens.

    Slots are not reserved: a dispatcher takes the next free one, but no more than an even share while another one
    waits. When the last dispatcher leaves, everything learnt is dropped except stated rate limits, because the next one
    may come an hour later."""

    def __init__(
        self,
        name: str = "",
        *,
        weight: float = 1.0,
        models: frozenset[str] | None = None,
        context: int | None = None,
        default_inflight: int | None = None,
    ) -> None:
        self.name = name
        self.weight, self.models, self.context = weight, models, context
        self.stated = False
        self.default_inflight = default_inflight  # requests in flight if the user gives no number; None: searched
        self.rates: Rates | None = None  # None while no rate limit is known
        self.endpoints: list[Endpoint] = []  # of the dispatchers that use it now
        self._terms: list[Terms] = []
        self._thread = 0  # thread of the dispatchers that use it now
        self._forget()

    def _forget(self) -> None:
        if self.rates is not None:
            self.rates.learnt = None
        self.capacity = Capacity(None)
        self._searches = False  # the number of requests in flight is searched, or was found by a search
        self.memory = CacheSize()
        self.health = Health()
        self.history = EndpointHistory()
        self.denials = Denials()
        self.reasons: dict[str, Reason] = {}  # of the present conclusions, by what they are about
        self.past: deque[Reason] = deque(maxlen=MOST_REASONS)  # that do not hold any more
        self.inflight = 0  # of all dispatchers
        self.most_in_flight = 0  # since the end of the last outage
        self.held_until = 0.0  # the server asked to wait until this time
        self.held_for = inf  # one refusal asked for that: the answer of a request sent no earlier than this ends it
        # The row that it asked for a long wait (None: more than one), and when; None if it has answered a request that
        # was sent since.
        self.excessive: tuple[RowHistory | None, float] | None = None
        self.refused_since: float | None = None  # it has refused every request for load since then
        self.seconds = 0.0  # per turn; 0 until it has answered
        self.usual = 0.0  # half of its answers take longer
        self.controlled = False  # a control request waits for it or is in flight
        self.takes_controls = True  # it has not refused one
        self.unanswered = 0.0  # longest time that a request waited here in vain before the first answer
        self.gap = 0.0  # seconds between two answers
        self.answered_at = -inf  # time of its latest answer
        self.began_at = inf  # when the first request was sent
        self.answers = 0
        self.answered_sent = -inf  # when the newest row that it has answered was sent
        self._quiet: float | None = None  # when it was last heard, as seen at the first look into its silence
        self._look_at = inf  # when it is looked at again

    # Its dispatchers

    def lent_to(self, thread: int) -> ServerState:
        """Return this server; or, if dispatchers of another thread use it now, a new object for the same server. A
        dispatcher can only be woken in its own thread."""
        if self.endpoints and self._thread != thread:
            weight, models, context, most = self.weight, self.models, self.context, self.default_inflight
            return ServerState(self.name, weight=weight, models=models, context=context, default_inflight=most)
        self._thread = thread
        return self

    def join(self, endpoint: Endpoint, terms: Terms) -> None:
        if not self.endpoints:
            self._forget()
        self.endpoints.append(endpoint)
        self._terms.append(terms)
        self._set_rates()
        self.capacity.patience = min(terms.timeout or inf for terms in self._terms)
        self._set_ceiling()

    def leave(self, endpoint: Endpoint) -> None:
        place = self.endpoints.index(endpoint)
        del self.endpoints[place], self._terms[place]
        if self.endpoints:
            self._set_ceiling()

    def _set_ceiling(self) -> None:
        """Set the limit of requests in flight. If a dispatcher has none, it is searched, and what is found stays when
        others join or leave. Otherwise it is the sum over all dispatchers: each bounds its own requests."""
        searching = next((terms for terms in self._terms if terms.start is not None), None)
        if searching is None:
            ceilings = [terms.ceiling for terms in self._terms]
            total = None if None in ceilings else sum(ceiling for ceiling in ceilings if ceiling is not None)
            if self._searches or (self.capacity.search is None and self.capacity.ceiling != total):
                self.capacity.resize(total)
        elif not self._searches:
            assert searching.start is not None
            most = MOST if searching.ceiling is None else min(MOST, searching.ceiling)
            self.capacity.resize(most)
            self.capacity.start_search(LimitSearch(searching.start, most=most, by_clock=searching.by_clock))
        self._searches = searching is not None

    def _set_rates(self) -> None:
        """Apply the strictest limits of all dispatchers to all of them together."""
        rpm = min((terms.rpm for terms in self._terms if terms.rpm is not None), default=None)
        tpm = min((terms.tpm for terms in self._terms if terms.tpm is not None), default=None)
        if self.rates is None and (rpm is not None or tpm is not None):
            self.rates = Rates()
        if self.rates is not None:
            self.rates.limit(rpm, tpm)

    def share(self, endpoint: Endpoint) -> int | None:
        """Return the most requests that one dispatcher may have in flight now; None for no limit."""
        limit, allotted = self.capacity.limit, endpoint.allotted
        if limit is not None and len(self.endpoints) > 1:
            hungry = sum(other.is_hungry() for other in self.endpoints if other is not endpoint)
            fair = -(-limit // (1 + hungry))
            limit = min(fair, limit - self.inflight + endpoint.inflight)
        if limit is None or allotted is None:
            return allotted if limit is None else limit
        return min(limit, allotted)

    # Conclusions and their reasons

    def why(self) -> list[Reason]:
        """Return why the server is down, held back or limited, and why its cache has its size."""
        return list(self.reasons.values())

    def rule_of(self, about: About) -> str:
        """Return the rule of a conclusion that holds now, or ""."""
        return reason.rule if (reason := self.reasons.get(about)) is not None else ""

    def _conclude(self, about: About, rule: str, evidence: str, now: float) -> None:
        before = self.reasons.get(about)
        if before is not None and before.rule == rule:
            now = before.since
        elif before is not None:
            self.past.append(before)
        self.reasons[about] = Reason(about, rule, evidence, now)

    def _end(self, about: About) -> None:
        """End a conclusion that no longer holds."""
        if (ended := self.reasons.pop(about, None)) is not None:
            self.past.append(ended)

    def _conclude_cache(self, now: float) -> None:
        rule, evidence = self.memory.conclusion
        if rule != self.rule_of("cache"):
            if rule:
                self._conclude("cache", rule, evidence, now)
            else:
                self._end("cache")

    def _limit(self, reason: str, now: float, effects: Effects) -> None:
        if reason:
            self._conclude("limit", reason, f"at most {self.capacity.limit} at once", now)
            effects.append(Limit(reason))

    def _hold(self, until: float, held_for: float, evidence: str, now: float) -> None:
        self.held_until, self.held_for = until, held_for
        self._conclude("hold", "the server asked to wait", evidence, now)

    def _end_hold(self) -> None:
        self.held_until = 0.0
        self._end("hold")

    # Events

    def on(self, event: ServerEvent, now: float) -> Effects:
        """Learn from an event, and return the effects that the dispatcher must carry out."""
        if type(event) is Answered:
            return self._answered(event, now)
        effects: Effects = []
        match event:
            case Sent(slot):
                search = self.capacity.search
                if search is not None and search.ramp_at is None:
                    self._limit(self.capacity.ramp(self.inflight, slot.sent_at), now, effects)
            case Failed():
                self._failed(event, now, effects)
            case Reading(load):
                self._limit(self.capacity.loaded(load, self.inflight), now, effects)
                self.memory.read(load, self.answers, self.inflight, now)
                self._conclude_cache(now)
                if load.generated is not None:
                    self.health.counted(load.generated, self.began_at, now)
            case ReadingLost():
                self.capacity.unread()
                self.memory.unread()
                self._conclude_cache(now)
            case ProbeEnded():
                self._probed(event, now, effects)
            case Unasked(around):
                self._unasked(around, now, effects)
            case Tick():
                self._tick(event, now, effects)
        return effects

    # Answers

    def _answered(self, event: Answered, now: float) -> Effects:
        slot, seconds, usage = event
        control, effects = slot.ticket.control, NONE
        self.refused_since = None
        if control:
            self.excessive, seconds = None, 0.0  # it says nothing about the time that rows take
            effects = [WAKE]
        else:
            self.learn(seconds, now)
            if slot.sent_at > self.answered_sent:
                self.answered_sent = slot.sent_at
            if self.excessive is not None and slot.sent_at >= self.excessive[1]:
                self.excessive = None
        if self.held_until and self.held_for <= slot.sent_at:
            self._end_hold()
            effects = [WAKE]
        if self.health.state != "healthy":
            effects = effects or []
            self._is_alive(slot, seconds, now, effects)
        else:
            self.health.answer(seconds, slot.sent_at, now)
        self.denials.answered(slot.sent_at)
        history = self.history
        if history.open or history.alone or control:
            history.add(Attempt(slot.ticket.row, slot.sent_at, now, "answered", slot.trial, control=control), CLEAR)
        if control or self.health.is_down:
            return effects
        if self.capacity.causes:
            self.capacity.confirm(slot.ticket.row)
        meanwhile = self.answers - slot.answers_before
        reason = self.capacity.succeeded(slot.sent_at, seconds, usage.completion_tokens, now, meanwhile)
        if reason:
            effects = effects or []
            self._limit(reason, now, effects)
        return effects

    def learn(self, seconds: float, now: float) -> None:
        """Learn the speed from an answer that took ``seconds``."""
        self.seconds += (N.weight if self.seconds else 1.0) * (seconds - self.seconds)
        self.usual = seconds if not self.answers else self.usual * (1 + N.weight) ** (1 if seconds > self.usual else -1)
        self.answers += 1
        self.gap += max(N.weight, 1 / self.answers) * (min(seconds, now - self.answered_at) - self.gap)
        self.answered_at = now

    def _is_alive(self, slot: Slot, seconds: float, now: float, effects: Effects) -> None:
        """Learn from an answer, or from a refusal that only a working server can send."""
        health = self.health
        learnt = None if self.rates is None else self.rates.learnt
        lasted = slot.sent_at - health.down_since
        if health.is_limited and learnt is not None and N.control_pause <= lasted <= LONGEST_DROUGHT:
            learnt.learn(slot.sent_at)
        if health.answer(seconds, slot.sent_at, now):
            # If it only denied rows, it has lost none of the other requests.
            denied = self.rule_of("health") in DENIED.values()
            self._end_hold()
            self._end("health")
            effects.append(CameUp(was_slow=denied or slot.sent_at < health.down_since))
        elif not health.is_down:
            self._end("health")

    # Failures

    def _failed(self, event: Failed, now: float, effects: Effects) -> None:
        slot, error, around, beside = event
        health, row, control = self.health, slot.ticket.row, slot.ticket.control
        outcome = self._outcome(slot, error, around.patience, now, effects)
        excessive = self.is_excessive(error, around.patience)
        beside = beside or self.history.has_other_cause(row, slot.sent_at)
        attempt = Attempt(
            row,
            slot.sent_at,
            now,
            outcome,
            trial=slot.trial,
            sound=slot.sound,
            left_in_flight=self.inflight - 1,
            beside=beside,
            control=control,
            excessive=excessive,
        )
        newest = self.denials.answered_sent
        if outcome == "overloaded" and row.overloaded(attempt, self.answered_sent, newest):
            self._limit(self.capacity.pardon(row, newest), now, effects)
        verdict = judge(
            attempt,
            self.history,
            is_down=health.is_down,
            others_healthy=around.others_work and slot.ticket.pinned is None,
            few_rows=around.few_rows,
            can_ask=around.can_ask,
            all_tested=not around.has_untested,
        )
        if not control:
            self.history.add(attempt, verdict)
        self._apply(event, outcome, verdict, now, effects)
        effects.append(Judged(attempt, verdict, self._scope(event, now, effects)))

    def _outcome(self, slot: Slot, error: BackendError, patience: float, now: float, effects: Effects) -> Outcome:
        """Return how the attempt ended; no other place decides this. ``recalled``: neither side is at fault."""
        outcome, health, control = outcome_of(error), self.health, slot.ticket.control
        if slot.recalled:
            return "recalled"
        if outcome == "stale":  # the second time, the row closes every connection
            return "broken" if slot.ticket.row.stale or health.is_down else outcome
        if outcome == "overloaded":
            certain = not self.capacity.was_full_with(self.inflight - 1)
            spent = self.rates is not None and self.rates.is_spent(slot.sent_at, now, certain=certain)
            if spent or is_spent(error.quota):
                return "recalled"  # a rate limit with a known end
            # One request alone cannot be too many: the server or this row has another problem.
            alone = self.inflight == 1 and not isinstance(error, RateLimited) and not error.retry_after
            return "broken" if alone else outcome
        if outcome != "silent" or health.is_down:
            return outcome
        if slot.trial:
            return "recalled"  # the server is back; a trial's time limit is not the row's fault
        if self.is_queued(slot):  # it waited behind others that were answered: too many were sent
            if not control:  # whose time limit is shorter than that of rows
                meanwhile = self.answers - slot.answers_before
                self._limit(self.capacity.timed_out(meanwhile, now - slot.sent_at), now, effects)
            outcome = "recalled"
        if control and health.asks_again(patience):
            effects.append(Control(again=True))
            outcome = "recalled"
        return outcome

    def is_queued(self, slot: Slot) -> bool:
        """Return whether a request that timed out was in the server's queue: requests sent before it were answered
        meanwhile, and none that was sent after it."""
        return self.answers > slot.answers_before and self.answered_sent <= slot.sent_at + N.instant

    def _apply(self, event: Failed, outcome: Outcome, verdict: Verdict, now: float, effects: Effects) -> None:
        """Apply the verdict to the server."""
        slot, error, around, _ = event
        health = self.health
        if outcome == "recalled":
            return
        if outcome not in ("unreachable", "silent") or (outcome == "silent" and now - slot.sent_at > N.never_reached):
            health.reached = True  # in the second case a connection was made
        health.replies = health.replies or outcome in ("broken", "overloaded")
        if outcome in ("denied", "refused") and health.is_denied and health.is_down:
            self._is_still_denied(event, now, effects)
            return
        if verdict.endpoint == "healthy":
            self._is_alive(slot, now - slot.sent_at, now, effects)
            return
        health.is_denied = False
        if verdict.endpoint == "doubted":
            self._doubt(error, now, effects)
            return
        if outcome == "overloaded":
            self._overloaded(event, now, effects)
            if slot.ticket.control:  # it refuses every request, so no row is charged
                self.history.go_down()
                health.in_doubt = False
                effects.append(WAKE)
            if not slot.trial:
                return
        if not health.is_down:
            health.fail(str(error), now)
            if verdict.endpoint == "down":
                rule = _RULES.get(outcome, "requests fail")
                self._go_down(rule, str(error), now, effects, silent=outcome == "silent")
        else:
            health.reason, health.heard = str(error), now
            self._trial_failed(slot, around, now, effects)
        if verdict.probe:
            effects.append(PROBE)

    def _go_down(
        self, rule: str, evidence: str, now: float, effects: Effects, *, silent: bool = False, denied: bool = False
    ) -> None:
        """Let the server count as down. ``silent``: it may only be slow; any answer shows that it works. ``denied``: it
        denies every row, which says nothing about how many requests it accepts afterwards."""
        health = self.health
        health.reason = evidence
        health.go_down(now, silent=silent)
        health.is_denied = denied
        self._conclude("health", rule, evidence, now)
        self.history.go_down()
        if not denied:
            self.capacity.restart(self.most_in_flight)
            self.most_in_flight = 0
            self._limit("the server is down", now, effects)
        effects.append(WentDown())

    def _trial_failed(self, slot: Slot, around: Around, now: float, effects: Effects) -> None:
        if slot.trial and not slot.overdue:
            self.health.trial_over()
            self._no_trial(around, now, effects)

    def _no_trial(self, around: Around, now: float, effects: Effects) -> None:
        """Wait for the next trial, unless the patience of the dispatcher is over."""
        health = self.health
        health.next_trial = max(health.next_trial, now + health.pause(now))
        effects.append(TrialEnded())
        if not health.is_denied and now >= self._patience_ends(around):
            self._lose_patience(around, now, effects)

    def _patience_ends(self, around: Around) -> float:
        return self.health.down_since + (around.patience if self.health.reached else around.first_patience)

    def _lose_patience(self, around: Around, now: float, effects: Effects) -> None:
        if not around.others_work:  # else it is tried from time to time
            effects.append(GiveUp("unreachable", self.health.what_was_tried(now, around.patience)))

    # Denials

    def _scope(self, event: Failed, now: float, effects: Effects) -> Scope:
        """Return which rows a denial concerns; ``confirm`` means that the request is sent again. If it concerns all
        rows, the server counts as down: it may deny rows only for a while, as a gateway does while it restarts."""
        slot, error, around, _ = event
        if not isinstance(error, Rejected) or isinstance(error, ContextOverflow):
            return "row"
        if slot.ticket.chore and (slot.ticket.control or around.first_patience < inf):
            return "row"  # but a person's request to a service is worth as much as a row
        if self.health.is_denied:
            return "all"
        denial = self.denials.denial(slot.ticket.row, slot.sent_at, now)
        left, progress = self.inflight - 1, slot.ticket.progress
        scope = self.denials.scope(progress, error.status, str(error), denial, left, can_ask=around.can_ask)
        if scope == "all" and not self.health.is_down:
            self._go_down(DENIED[concern_of(error.status)], str(error), now, effects, denied=True)
        return scope

    def _is_still_denied(self, event: Failed, now: float, effects: Effects) -> None:
        """Apply a denial of a server that denies every row. If no other server works, it is given up after a while. If
        it has never given a good answer, it is given up at the second denial while no other request is in flight
        there."""
        slot, error, around, _ = event
        health = self.health
        health.reason, health.heard = str(error), now
        self._trial_failed(slot, around, now, effects)
        lasts, alone = now - health.down_since >= N.minute, self.inflight <= 1
        is_over = lasts if self.denials.answered_sent > -inf else slot.trial and alone
        if is_over and not around.others_work and around.first_patience < inf:
            effects.append(GiveUp("failed", ALL_REFUSED.format(error=error)))

    # Refusals for load

    def is_excessive(self, error: BackendError, patience: float = inf) -> bool:
        """Return whether a refusal for load that asks for a long wait may concern only its row."""
        may_work = self.denials.answered_sent > -inf or self.inflight > 1
        return error.overload and (error.retry_after or 0.0) > min(N.minute, patience) and may_work

    def _is_confirmed(self, slot: Slot, around: Around, now: float) -> bool:
        """Return whether a long wait concerns all rows: the server has asked another row for it too, without an answer
        since the first. A control request counts as another row. If none can be sent, a second refusal of the same row
        is enough."""
        row = slot.ticket.row
        if self.excessive is None:
            self.excessive = row, now
        first, since = self.excessive
        alone = around.few_rows and not around.can_ask
        if slot.sent_at <= since or (row is first and not alone):
            return False
        self.excessive = None, since  # until the server answers, a long wait of any row concerns all
        return True

    def _overloaded(self, event: Failed, now: float, effects: Effects) -> None:
        """Halve the limit, and send nothing until the server accepts requests again."""
        slot, error, around, _ = event
        wait, capacity, row, control = error.retry_after or 0.0, self.capacity, slot.ticket.row, slot.ticket.control
        excessive = self.is_excessive(error, around.patience)
        if excessive and not self._is_confirmed(slot, around, now):
            return  # the next request shows whether it concerns all rows
        others_tell = self.inflight > 1 or around.has_untested or around.can_ask
        if row.is_alone_refused and others_tell:
            return
        if self.refused_since is None:
            self.refused_since = now
        if self.inflight > 1:
            self._limit(capacity.overloaded(slot.generation, self.inflight, wait, now, cause=row), now, effects)
            proven = self.answers >= N.learnt
            if capacity.tolerates and not control and not excessive and (not wait or proven):
                return  # the server takes other requests meanwhile; only this one waits
            if wait > N.short_wait and proven and not self._is_confirmed(slot, around, now):
                return  # the next request shows whether it concerns all rows
            if control and wait <= N.busy:
                return  # those in flight may be as many as it takes at once
            if wait > N.short_wait and not control and around.can_ask:
                if slot.sent_at >= self.history.controlled_at + N.control_pause:
                    self._doubt(error, now, effects)  # if it concerns all rows, the control request gets it too
                return
        elif not control and not excessive and wait <= around.patience and around.can_ask:
            return  # the row may be the cause; if it is refused again, or others are, a control request decides
        elif wait or self.health.is_down:
            # Even one request alone is refused: this says nothing about how many the server takes later.
            capacity.restart(self.most_in_flight)
        else:
            self._go_down("every request is refused", str(error), now, effects)
            self.health.is_limited = isinstance(error, RateLimited) and self._dry_up(now)
        self.health.reason = str(error)
        if wait > 0.0:
            self._asked_to_wait(slot, error, wait, now, effects)
        if max(now + wait, self.held_until) - self.refused_since > around.patience and not around.others_work:
            limit = f"max_outage, {around.patience:g} s"
            why = f"the server refuses every request for longer than {limit}: {error}"
            effects.append(GiveUp("unreachable", why))

    def _asked_to_wait(self, slot: Slot, error: BackendError, wait: float, now: float, effects: Effects) -> None:
        """Send nothing for the time that the server asks for. A long time is an outage, with trials in between."""
        one = self.inflight > 1 and (self.capacity.tolerates or wait > N.short_wait)
        if is_long := wait > N.longest_hold:
            if not self.health.is_down:
                self._go_down("the server asks for a long wait", str(error), now, effects)
            wait = min(N.longest_hold, N.busy * 2.0 ** min(self.health.trials, N.most_doubled))
            wait *= 1 - N.jitter * self.health.chance()
        if now + wait <= self.held_until:
            return
        self._hold(now + wait, slot.sent_at if one else inf, str(error), now)
        if isinstance(error, RateLimited) and (slot.ticket.control or not one) and not is_long:
            self._dry_up(now, wait)  # a limit per minute lets requests through again sooner
        effects.append(WAKE)

    def _dry_up(self, now: float, wait: float = 0.0) -> bool:
        """Record that the server refuses every request. ``wait``: for how long, if the server says so. Returns whether
        its rate limit may be used up. The refused request still counts as in flight."""
        if self.rates is None:
            self.rates = Rates()
        learnt = self.rates.learnt = self.rates.learnt or LearntRate()
        lasted = now - self.began_at
        taken = (self.answers + self.inflight - 1) * MINUTE / max(MINUTE, lasted)
        if not learnt.dry_up(round(taken), min(MINUTE, lasted), now):
            return False
        if N.control_pause <= wait <= MINUTE:
            learnt.learn(now + wait)
        return True

    # Doubt

    def _doubt(self, error: BackendError, now: float, effects: Effects) -> None:
        """Send nothing but a control request, which shows whether the server or its rows are bad."""
        self.health.doubt(str(error), now)
        self._conclude("health", "a control request decides between rows and server", str(error), now)
        # A Retry-After of rows may concern these rows alone. If it concerns all, the control request gets it too.
        self._end_hold()
        effects += (WAKE, CONTROL)

    def _unasked(self, around: Around, now: float, effects: Effects) -> None:
        """Continue without control requests: a server in doubt counts as down, and rows are its trials."""
        if self.health.in_doubt:
            self._go_down("no control request can be sent", self.health.reason, now, effects)
        elif self.health.is_down:
            self._try_next(around, effects)

    def _try_next(self, around: Around, effects: Effects) -> None:
        """Let the next row be the trial. If all rows have failed, every other trial is a control request: if all rows
        are bad, no row can show that the server is back. The trial is also a control request while only suspects wait,
        and before the server's first reply."""
        health = self.health
        health.trial_over()
        health.ready = True
        all_failed = around.few_rows or not around.has_untested
        is_next = health.trials % 2 == 1 or not around.wants_slot
        if ((all_failed and is_next) or not health.replies) and around.can_ask:
            effects.append(CONTROL)
        effects.append(Ready())

    # Probes, silence, time

    def _probed(self, event: ProbeEnded, now: float, effects: Effects) -> None:
        state, reason, around, trusted = event
        health, is_up = self.health, state != "down"
        health.reached = health.reached or state == "up"
        if health.is_down and is_up and trusted:
            health.reached = True
            health.recover()
            self._end("health")
            effects.append(CameUp())
        elif not health.is_down:
            if not is_up:
                self._is_silent(around, now, effects, f"a probe failed: {reason}")
            elif health.is_silent(self.inflight, now) and around.others_work:
                self._is_silent(around, now, effects)  # it answers probes, but not requests as others do
            else:
                health.heard = now  # it is slow
        elif health.state == "on trial" and health.probing:
            if not is_up and around.others_work:
                health.reason = reason or health.reason
                health.trials += 1
                health.trial_over()
                self._no_trial(around, now, effects)
            else:
                self._try_next(around, effects)
        if not is_up and trusted:
            health.reason = reason or health.reason
            effects.append(Recall("all"))
        health.up_at = now if is_up else -inf
        effects.append(WAKE)

    def _is_silent(self, around: Around, now: float, effects: Effects, why: str = "") -> None:
        health = self.health
        evidence = why or f"{self.inflight} requests are in flight, and no answer has arrived"
        self._go_down("a probe failed" if why else "the server is silent", evidence, now, effects, silent=True)
        if around.others_work:
            effects.append(Recall("all"))
        elif health.is_learnt or not around.can_ask:
            effects.append(Recall("oldest"))
        elif around.is_full:  # no slot is free for a control request
            effects.append(Recall("oldest", once=True))

    def _silent_at(self, silence: float) -> float:
        """Return when the server is silent by its own answers; if these are too few, by those of others."""
        if self.health.is_learnt or self.health.patient or silence == inf:
            return self.health.silent_at
        return max(self.health.heard + silence, self.health.cold_until)

    def due(self, inflight: int, patience: tuple[float, float], silence: float, now: float) -> float:
        """Return when a dispatcher with ``inflight`` requests here needs the next Tick. ``patience``: the dispatcher's
        patience, and its patience before the server's first reply. ``silence``: how long the other servers allow
        silence."""
        health = self.health
        free_at = inf if self.rates is None else self.rates.free_at(now)
        if health.state == "on trial":
            dues: Iterable[float] = (health.trial_ends,)
        elif health.state == "down":
            ends = health.down_since + patience[0 if health.reached else 1]
            dues = health.next_trial, self.held_until, ends, free_at
        else:
            search = self.capacity.search
            ramp_at = inf if search is None or search.ramp_at is None else search.ramp_at
            dues = self.held_until, ramp_at, free_at
            if inflight:
                dues = *dues, self._silent_at(silence), self._look_at
        return min((due for due in dues if due > now), default=inf)

    def _tick(self, event: Tick, now: float, effects: Effects) -> None:
        around, health = event.around, self.health
        if self.held_until and self.held_until <= now:
            self._end_hold()
        self._limit(self.capacity.ramp(self.inflight, now), now, effects)
        if health.state == "on trial":
            slot = event.patient
            if now >= health.trial_ends and slot is not None and not slot.overdue:
                slot.overdue = True  # it continues if allowed, while other rows are tried
                health.trial_over()
                effects.append(Recall("oldest"))
                self._no_trial(around, now, effects)
        elif health.state == "down":
            # Nothing was tried before the first trial.
            tried = (health.trials or self.held_until) and not health.is_denied
            if tried and now >= self._patience_ends(around):
                self._lose_patience(around, now, effects)
            if now >= max(health.next_trial, self.held_until) and event.probes:
                health.try_now(now, probing=True)
                effects.append(PROBE)
        elif event.inflight and now >= min(self._silent_at(around.silence), self._look_at):
            self._look_into(event, now, effects)

    def _look_into(self, event: Tick, now: float, effects: Effects) -> None:
        """Find out why nothing arrives. A stream that sends counts as an answer on its way."""
        around, health, self._look_at = event.around, self.health, inf
        if event.heard > health.heard:
            health.heard = event.heard
        elif self._quiet != health.heard:  # after a stall of the loop, read pending answers first
            self._quiet, self._look_at = health.heard, now + N.moment
        elif now < self._silent_at(around.silence):
            return
        elif around.others_work:
            effects.append(PROBE)
        elif health.is_silent(self.inflight, now) and not self._may_be_slow_rows(event):
            self._is_silent(around, now, effects)
        else:  # too few requests or answers to tell
            looks, asks_now = health.look(now), health.is_learnt and not around.is_full and around.can_ask
            if not asks_now:
                effects.append(PROBE)
            # If no slot is free, one row is sent again to make room. Its second attempt shows how long a row takes.
            if asks_now or (looks and around.can_ask):
                if around.is_full and health.sounded and not event.second:
                    return
                effects.append(CONTROL)
                if around.is_full:
                    effects.append(Recall("room"))

    def _may_be_slow_rows(self, event: Tick) -> bool:
        """Return whether the few requests in flight may be rows that take long, and a control request can show it."""
        around = event.around
        few = self.inflight <= N.few or not (around.wants_slot or around.has_untested)
        has_slot = not around.is_full or not self.health.sounded or event.second
        return few and has_slot and around.can_ask


CLEAR = Verdict("clear", "healthy")
_RULES: dict[Outcome, str] = {
    "unreachable": "the server is unreachable",
    "silent": "the server is silent",
    "broken": "requests break",
    "overloaded": "every request is refused",
}
