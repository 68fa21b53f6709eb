"""Attributes a failed request: to its row, to its endpoint, or undecided.

An attempt is an immutable value. ``judge`` is a pure function of an attempt and the history of its endpoint. Its
verdict says whether the row is charged, the new state of the endpoint, whether the row should be sent elsewhere, and
whether the endpoint should be probed.

A failure that either side may have caused is undecided until there is evidence:

- A good answer to a request that was sent at the same time or later, and ended after the failure, charges the row: the
  endpoint works, this request does not. An answer proves nothing about requests that were sent after it.
- If the endpoint goes down, its undecided failures are forgiven. A row with a failure that can crash a server gets a
  hit. A row with two hits is a suspect, and is tried last and alone.
- If several rows fail and none is answered, or too few rows are left to decide, a control request decides: a few tokens
  that do not depend on any row. Its answer counts like the answer of a row. If it fails, the endpoint goes down.
- If the endpoint was up just before the row was sent and is down afterwards, the row may have crashed it. If each time
  another request had been answered since the last outage, the row fails after its retries, but not after the first
  crash. If only a probe had found it up, the row fails after a few crashes, but not before 20 s: a server
  with changing faults looks the same for a while.
- Without control requests (they are off, or the server refuses them) a probe that finds the endpoint up charges the
  row, also not before 20 s: a probe does not show every fault of a server.

A refusal for load is never charged while other requests hold slots at the endpoint. A kept connection that the server
closes before it answers is no evidence the first time: the row is sent again at once. If the endpoint turns out to be
down, this failure counts as one that may have crashed it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from batch_agent.errors import BackendError, EmptyAnswer, Rejected, Timeout, Truncated
from batch_agent.scheduler.numbers import N

Outcome = Literal[
    "answered",  # a complete, readable answer
    "flawed",  # the server works, but its answer is not usable
    "refused",  # 400, 413, 422, context overflow, content filter
    "denied",  # 401, 403, 404: may concern every row
    "overloaded",  # 429, or 503 because of load
    "stale",  # a kept connection was closed at once: the server may not have read the request
    "broken",  # 500, 502, 504, connection reset, incomplete or unreadable answer
    "unreachable",  # connection refused, DNS, TLS handshake, connect timeout
    "silent",  # no complete answer in time
    "recalled",  # withdrawn by the dispatcher; no evidence about either side
]

# What a refused status may concern beside its request: the key or its quota, the address, or the right to use it. This
# table alone decides it, for runs and for ``serve`` (``concern_of``). A 429 here is the spent quota that providers
# raise as Rejected. Any other status (400, 413, 422 …) concerns the request.
Concern = Literal["key", "place", "access"]
CONCERNS: dict[int, Concern] = {
    **dict.fromkeys((401, 402, 407, 429), "key"),
    **dict.fromkeys((301, 302, 303, 307, 308, 404, 405), "place"),
    **dict.fromkeys((403, 409), "access"),
}


def concern_of(status: int | None) -> Concern | None:
    """Return what a refusal with this status may concern beyond its request; None if it concerns only the request."""
    return None if status is None else CONCERNS.get(status)


# The conclusion about a server that denies every row, by what the denial concerns.
DENIED: dict[Concern | None, str] = {
    "key": "every request is denied: the key or its quota",
    "place": "every request is denied: the address or the model",
    "access": "every request is denied: the rights of the key",
    None: "every request is denied",
}


def outcome_of(error: BackendError) -> Outcome:
    """Return the outcome of the attempt that ended in this error."""
    if error.stale:
        return "stale"
    if error.second_hand or isinstance(error, Truncated | EmptyAnswer):
        return "flawed"
    if error.overload:
        return "overloaded"
    if error.unreached:
        return "unreachable"
    if isinstance(error, Rejected):
        return "refused" if concern_of(error.status) is None else "denied"
    return "silent" if isinstance(error, Timeout) else "broken"


class Crash(NamedTuple):
    """An endpoint that was up before the row was sent there alone, and down afterwards. ``proven``: it had answered
    another request since its last outage."""

    endpoint: EndpointHistory
    at: float
    proven: bool = False


@dataclass(slots=True, eq=False)
class RowHistory:
    """The failures of one turn, over all endpoints, since it was first sent."""

    charges: int = 0
    undecided: int = 0
    hits: int = 0  # endpoints that went down right after a failure of this row that can crash a server
    crashes: list[Crash] = field(default_factory=list)
    refused: int = 0  # refusals for load although the endpoint answered others: alone there, or while all left failed
    refused_since: float = inf  # when the first of these requests was sent
    refused_until: float = -inf  # when the latest of them failed
    unsettled: int = 0  # refusals that no answer has shown to be its own yet
    unsettled_until: float = -inf  # when the latest of them failed
    overloaded_at: float = inf  # when a request of it was sent that was refused for load
    passed_over: int = 0  # such refusals that were followed by the answer of a request sent no earlier
    stale: bool = False  # a kept connection was closed when it was sent; the next time this counts as broken
    tested: bool = False  # a request of it has failed
    denials: int = 0  # in a row by one endpoint
    asked_again: bool = False  # after as many as are its own fault, because they may have been an outage
    denied_by: EndpointHistory | None = None
    denied_at: dict[Denials, float] = field(default_factory=dict)  # when each server last denied it
    disproved: int = 0  # times that a server denied it again after it had answered others
    failures: int = 0  # since it was last forgiven; the delay grows with this number

    @property
    def suspect(self) -> bool:
        return self.hits + len(self.crashes) >= N.twice

    def is_poison(self, max_retries: int) -> bool:
        """Return whether the row crashes servers, as opposed to servers that fail by themselves."""
        if sum(crash.proven for crash in self.crashes) > max(1, max_retries):  # one may be a coincidence
            return True
        if len(self.crashes) <= max(1, max_retries - N.twice):
            return False
        lasted = self.crashes[-1].at - self.crashes[0].at
        return lasted >= N.least_trying or len({crash.endpoint for crash in self.crashes}) >= N.several

    def crash(self, endpoint: EndpointHistory, attempt: Attempt) -> bool:
        """Record that this request has crashed the endpoint. Each crash counts once. Returns False if there is no
        evidence for it: the endpoint may have been down before, or another request that failed with it may be the
        cause."""
        if not attempt.sound or attempt.beside:
            return False
        if not (self.crashes and self.crashes[-1].at == attempt.ended_at):
            self.crashes.append(Crash(endpoint, attempt.ended_at, not attempt.trial))
        return True

    def overloaded(self, attempt: Attempt, answered_sent: float, newest: float = -inf) -> bool:
        """Record a refusal for load. Returns whether the endpoint has accepted another request since the previous
        refusal. ``answered_sent``: when the newest answered row was sent; ``newest``: the same for rows and control
        requests."""
        if answered_sent > self.refused_since:  # a row had room: this one may have it later
            self.refused, self.refused_since = 0, inf
        passed_over = max(answered_sent, newest) >= self.overloaded_at
        self.passed_over += passed_over
        self.overloaded_at = attempt.sent_at if passed_over else min(attempt.sent_at, self.overloaded_at)
        return passed_over

    @property
    def is_alone_refused(self) -> bool:
        """Return whether refusals for load concern only this row, because the server accepted others meanwhile. They
        then say nothing about the load."""
        return self.passed_over >= N.twice

    def gives_way(self, delay: float) -> bool:
        """Return whether another row may start while this one waits ``delay`` seconds for its next attempt. It keeps
        its place after one failure, which may be the begin of an outage, and while refusals for load may concern all
        rows; but not for long."""
        if self.charges or self.is_alone_refused or delay > N.short_wait:
            return True
        return self.failures > 1 and self.overloaded_at == inf

    def is_too_much(self, max_retries: int) -> bool:
        """Return whether the row alone is too much for its rate limits, however long it waits."""
        return self.refused > max_retries and self.refused_until - self.refused_since >= N.least_refused

    def may_be_too_much(self, max_retries: int) -> bool:
        """Return whether the row would be too much for its rate limits if its undecided refusals were its own fault."""
        lasted = self.unsettled_until - self.refused_since
        return self.unsettled > 0 and self.refused + self.unsettled > max_retries and lasted >= N.least_refused

    def until_ripe(self, now: float) -> float:
        """Return the seconds until a refusal may fail the row; infinite if that is not known, or over."""
        left = self.refused_since + N.least_refused - now
        return left if left > 0 else inf

    def settle(self, number: int, *, charge: bool) -> None:
        """Decide ``number`` of the row's undecided failures."""
        number = min(number, self.undecided)
        self.undecided -= number
        if charge:
            self.charges += number
        elif not self.undecided:
            self.failures = 0

    def excuse(self, max_retries: int) -> None:
        """Allow one more attempt: count at most as many undecided failures as there are retries left."""
        self.undecided = min(self.undecided, max(0, max_retries - self.charges))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request that has ended."""

    row: RowHistory
    sent_at: float
    ended_at: float
    outcome: Outcome
    trial: bool = False  # the endpoint was down; this request tests it
    sound: bool = False  # the endpoint had just proved to be up when the request was sent
    left_in_flight: int = 0  # number of other requests at the endpoint
    beside: bool = False  # a request of another row, which may have crashed the endpoint, failed meanwhile or can
    control: bool = False  # a control request
    excessive: bool = False  # refused for load for so long that it may concern only this row


@dataclass(frozen=True, slots=True)
class Verdict:
    row: Literal["clear", "charged", "undecided"]
    # "": unchanged; "doubted": nothing is sent until a control request has decided
    endpoint: Literal["", "healthy", "suspect", "doubted", "down"] = ""
    move: bool = False  # send the row to another endpoint
    probe: bool = False  # probe the endpoint
    hears_probe: bool = False  # the result of the probe decides about the row too
    alone: bool = False  # no other row can give evidence
    at_once: bool = False  # send the row again without a delay
    soon: bool = False  # send it again after a short delay: the endpoint itself delays all requests


@dataclass(slots=True, eq=False)
class EndpointHistory:
    """The undecided failures at one endpoint. ``alone``: rows that failed while no other row could give evidence, and
    since when. Only a probe decides about these."""

    open: dict[RowHistory, list[Attempt]] = field(default_factory=dict)
    alone: dict[RowHistory, float] = field(default_factory=dict)
    controlled_at: float = -inf  # when the latest control request was answered
    broken: dict[RowHistory, float] = field(default_factory=dict)  # the latest rows that broke, and when

    def has_other_cause(self, row: RowHistory, sent_at: float) -> bool:
        """Return whether another row may have crashed the endpoint since this time. If the row is a suspect, only
        another suspect counts."""
        others = (other for other, at in self.broken.items() if other is not row and at >= sent_at)
        return any(other.suspect or not row.suspect for other in others)

    @property
    def witnesses(self) -> int:
        """Number of rows with a failure that the endpoint may have caused. Excludes refusals for load, and rows that
        failed before while others were answered."""
        return sum(not row.charges and _chargeable(attempts) > 0 for row, attempts in self.open.items())

    @property
    def refused_rows(self) -> int:
        """Number of rows with a refusal for load that is not settled."""
        return sum(row.unsettled > 0 for row in self.open)

    def add(self, attempt: Attempt, verdict: Verdict) -> None:
        """Record an attempt and its verdict, in the row's history and here."""
        row = attempt.row
        if attempt.outcome == "answered":
            if attempt.control:
                self.controlled_at = attempt.ended_at
            self._answered(attempt.sent_at, control=attempt.control)
            return
        if attempt.outcome == "overloaded" or (attempt.outcome == "unreachable" and not attempt.sound):
            self.alone.pop(row, None)
        if attempt.outcome in ("broken", "stale"):
            self.broken.pop(row, None)  # the latest is the last
            self.broken[row] = attempt.ended_at
            if len(self.broken) > N.enough:
                del self.broken[next(iter(self.broken))]
        row.tested = row.tested or attempt.outcome != "recalled"
        row.stale = row.stale or attempt.outcome == "stale"
        if attempt.outcome == "denied":
            row.denials = row.denials + 1 if row.denied_by is self else 1
            row.denied_by = self
        row.failures += verdict.row != "clear" and attempt.outcome != "stale"
        row.charges += verdict.row == "charged"
        if verdict.row == "undecided":
            row.undecided += _can_be_charged(attempt)
            self.open.setdefault(row, []).append(attempt)
            if attempt.outcome == "overloaded":
                row.unsettled += 1
                row.unsettled_until = attempt.ended_at
        if verdict.endpoint == "down":
            self.forgive()
        elif attempt.outcome in ("flawed", "refused"):
            self._answered(attempt.sent_at)

    def _answered(self, sent_at: float, *, control: bool = False) -> None:
        """Charge the failures of requests sent no later than a request with a good answer."""
        self.alone.clear()
        for row, attempts in list(self.open.items()):  # a hedge may end before the request that was sent first
            proven = [attempt for attempt in attempts if attempt.sent_at <= sent_at]
            if not proven:
                continue
            for attempt in proven:
                if attempt.outcome == "overloaded":
                    row.unsettled -= 1
                    if attempt.left_in_flight and not control:
                        continue  # a row had room: this one may have it later
                    row.refused += 1
                    if control:
                        row.passed_over += 1
                        row.overloaded_at = inf
                    row.refused_since = min(row.refused_since, attempt.sent_at)
                    row.refused_until = max(row.refused_until, attempt.ended_at)
            row.settle(_chargeable(proven), charge=True)
            if len(proven) == len(attempts):
                del self.open[row]
            else:
                self.open[row] = [attempt for attempt in attempts if attempt.sent_at > sent_at]

    def forgive(self) -> None:
        """Forgive undecided failures, because the endpoint is down. Rows that may have caused that get a hit. A suspect
        that was sent beside no other suspect gets a crash, if the endpoint had been up before."""
        for row, attempts in self.open.items():
            broken = [attempt for attempt in attempts if attempt.outcome in ("broken", "stale")]
            if broken and not (row.suspect and row.crash(self, broken[-1])):
                row.hits += 1
            row.unsettled = 0
            row.settle(_chargeable(attempts), charge=False)
        self.open.clear()

    def go_down(self) -> None:
        self.forgive()
        self.alone.clear()

    # Evidence from a probe, if no other row can give evidence

    def contradict(self, attempt: Attempt) -> None:
        """Record that a probe found the endpoint up. A row that fails as a trial is charged each time from now on."""
        self.alone.setdefault(attempt.row, attempt.sent_at)
        attempt.row.charges += attempt.trial and self.is_ripe(attempt)

    def is_ripe(self, attempt: Attempt) -> bool:
        """Return whether the row has failed alone for long enough to be charged."""
        return attempt.ended_at - self.alone.get(attempt.row, inf) >= N.least_trying

    def give_up_on(self, row: RowHistory) -> None:
        """Charge the row for all of its failures here."""
        self.alone.pop(row, None)
        row.unsettled = 0
        row.settle(_chargeable(self.open.pop(row, ())), charge=True)


def _can_be_charged(attempt: Attempt) -> bool:
    return attempt.outcome not in ("overloaded", "stale")


def _chargeable(attempts: Iterable[Attempt]) -> int:
    return sum(map(_can_be_charged, attempts))


def judge(
    attempt: Attempt,
    history: EndpointHistory,
    *,
    is_down: bool,
    others_healthy: bool,
    few_rows: bool,
    can_ask: bool = False,
    all_tested: bool = False,
) -> Verdict:
    """Return the verdict on one attempt. ``few_rows``: too few to tell a bad row from a bad endpoint. ``can_ask``: a
    control request can be sent to the endpoint. ``all_tested``: no row is left that has not failed yet."""
    outcome = attempt.outcome
    if outcome == "recalled":
        return Verdict("clear", move=others_healthy, at_once=True)
    if attempt.control and outcome not in ("answered", "flawed", "refused", "denied"):
        return Verdict("clear", "down")
    if outcome == "stale" and not is_down:
        return Verdict("undecided", move=others_healthy, at_once=True)
    if outcome in ("answered", "flawed", "refused", "denied"):
        return Verdict("charged" if outcome in ("flawed", "refused") else "clear", "healthy")
    if outcome == "unreachable":
        return Verdict("clear", "down", move=others_healthy)
    if outcome == "overloaded":
        row = attempt.row
        alone = not is_down and (attempt.left_in_flight == 0 or (row.is_alone_refused and all_tested))
        ripe = attempt.ended_at - row.refused_since >= N.least_refused
        due = ripe or attempt.sent_at >= history.controlled_at + N.control_pause or history.refused_rows >= N.several
        asks = alone and can_ask and due and row.tested
        decidable = alone or (attempt.excessive and not is_down)
        return Verdict("undecided" if decidable else "clear", "doubted" if asks else "", others_healthy, soon=True)
    row = attempt.row
    alone = few_rows and not others_healthy
    if is_down and attempt.trial:
        return Verdict("clear", "down", others_healthy, probe=True, hears_probe=True, alone=alone)
    if is_down:  # the request was in flight when the endpoint went down, and may have caused that
        return Verdict("undecided", "down", move=others_healthy)
    witnesses = history.witnesses + (not row.charges and row not in history.open)
    if (
        not row.charges and witnesses >= N.several and attempt.left_in_flight <= 2 * witnesses
    ):  # requests in flight may still be answered
        if not can_ask:
            return Verdict("undecided", "down", move=others_healthy)
        if attempt.left_in_flight <= witnesses:  # a doubt costs time: with more in flight, one of them will tell
            return Verdict("undecided", "doubted", move=others_healthy)
    hears = row.suspect or alone
    probe = hears or others_healthy or outcome == "silent"
    return Verdict("undecided", "suspect", others_healthy, probe, hears_probe=hears, alone=alone)


Step = Literal["fail", "retry", "wait"]


def next_step(row: RowHistory, max_retries: int, *, retryable: bool, move: bool = False) -> Step:
    """Return what to do with a row whose attempt failed. ``wait``: if the undecided failures used up its retries, it
    waits until they are decided. ``move``: it will be sent to another endpoint, which gives evidence too."""
    if not retryable or row.charges > max_retries:
        return "fail"
    if row.is_poison(max_retries) or row.is_too_much(max_retries):
        return "fail"
    if row.may_be_too_much(max_retries):
        return "wait"
    if not row.undecided or row.charges + row.undecided <= max_retries:
        return "retry"
    return "retry" if move and row.failures == 1 else "wait"


Scope = Literal["row", "confirm", "unclear", "all"]

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Denial(NamedTuple):
    """A denial of a row. ``number``: how often the row was denied, this time included."""

    sent_at: float
    arrived_at: float
    number: int = 1


class Denials:
    """Decides whether a denial (401, 403, 404 and similar) concerns one row, or every row of the run.

    A wrong key concerns all rows. So does a path or a model that does not exist, if the server has never given a good
    answer. After good answers a denial is first confirmed, because a gateway may deny requests by mistake, or for the
    moment in which it loads its configuration. Only a request that was sent a while after the first denial arrived
    confirms it: requests that were in flight together are denied together, by one mistake. If there is no good answer
    in between, it concerns all rows. That is not the end: the endpoint counts as down, and is tried again
    (``server_state``).

    Anything else (a bad image, a prompt that a filter refuses) may concern only the row. It is unclear until a request
    sent at the same time or later gets a good answer, or until other rows are denied too. The same denial of several
    rows with no such answer between them concerns all rows, unless many more requests are in flight: a denial often
    arrives sooner than an answer. The same holds for a forbidden or missing thing where no control request can be sent:
    only such a request can tell, at the end of a batch, that the last row is at fault.
    """

    def __init__(self) -> None:
        self.answered_sent = -inf  # when the newest of the requests that it has answered was sent
        self._kind: tuple[int, str] | None = None  # of the unclear denials, which all have the same kind
        self._rows: dict[Hashable, float] = {}  # row → when its request was sent
        self._denied_at: float | None = None  # arrival of the first denial that no answer has disproved

    def answered(self, sent_at: float) -> None:
        """Record a good answer to a request sent at ``sent_at``."""
        if sent_at > self.answered_sent:
            self.answered_sent = sent_at
        if self._rows:
            unclear = {row: sent for row, sent in self._rows.items() if sent > sent_at}
            if len(unclear) < len(self._rows) or (self._denied_at is not None and sent_at > self._denied_at):
                self._denied_at = None
            self._rows = unclear

    def denial(self, row: RowHistory, sent_at: float, now: float) -> Denial:
        """Return the denial of a row that arrives now. A row at fault may be sent to another server each time. So
        denials by all servers count, if they follow a good answer of the same server."""
        row.disproved += self.answered_sent > row.denied_at.get(self, inf)
        row.denied_at[self] = now
        return Denial(sent_at, now, max(row.denials, row.disproved + 1))

    def is_unclear(self, row: Hashable) -> bool:
        return row in self._rows

    def scope(
        self,
        row: Hashable,
        status: int | None,
        message: str,
        denial: Denial,
        left_in_flight: int,
        *,
        can_ask: bool = False,
    ) -> Scope:
        """Return which rows a denial concerns. ``confirm``: send the same request again, a quarter of a second later at
        the earliest. ``can_ask``: a control request can be sent."""
        if status is None:  # a filter stopped the answer; the request itself was accepted
            return "row"
        concern = concern_of(status)
        wrong_key, by_status, has_answered = concern == "key", concern is not None, self.answered_sent > -inf
        if concern in ("key", "place") and not has_answered:
            return "all"
        kind = (status, "" if by_status else _VARIABLE.sub("…", message))
        if kind != self._kind:
            self._kind = kind
            self._rows.clear()
        confirms = wrong_key or (can_ask and by_status and has_answered)
        if confirms and denial.number >= N.several and row not in self._rows:
            return "row"  # other rows were answered meanwhile
        if not self._rows or self._denied_at is None:
            self._denied_at = denial.arrived_at
        self._rows[row] = denial.sent_at
        if confirms:
            confirmed = sum(sent >= self._denied_at + N.moment for sent in self._rows.values())
            if confirmed >= N.twice or (confirmed and not left_in_flight):
                return "all"
            return "confirm" if denial.number < N.several else "unclear"
        refused = len(self._rows)
        if by_status and not has_answered and refused >= N.several and left_in_flight <= refused:
            return "all"
        return (
            "all"
            if refused >= (N.learnt if by_status else N.many_denied) and left_in_flight <= 2 * refused
            else "unclear"
        )
