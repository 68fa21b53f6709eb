"""Whose fault a failed request is: the row's, its endpoint's, or not known yet.

An attempt is an immutable fact. ``judge`` is one pure function of an attempt and the history of its endpoint. Its
verdict says four things: whether the row is charged, what the endpoint is from now on, whether the row should be sent
elsewhere, and whether the endpoint should be probed.

A failure that either side may have caused is undecided until there is evidence:

- A good answer to a request that was sent no earlier, and that ended after the failure, charges the row: the endpoint
  works, this request does not. Evidence has a time: an answer proves nothing about requests that were sent after it.
- The endpoint goes down: its undecided failures are forgiven. A row with a failure that can crash a server collects a
  crash. A row with two crashes is a suspect. It is tried last and alone, and fails after a few more crashes.
- With too few rows to tell, the endpoint is probed. If the probe says that it is down, the rows are forgiven. If the
  probe says that it is up, the row is charged once it has used its retries and has been tried for ``LEAST_TRYING``.

A refusal for load is never charged while other requests hold slots at the endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from batch_agent.errors import BackendError, EmptyAnswer, Rejected, Timeout, Truncated

Outcome = Literal[
    "answered",  # a complete, readable answer
    "flawed",  # the server works; what it answered is of no use
    "refused",  # 400, 413, 422, context overflow, content filter
    "denied",  # 401, 403, 404: may concern every row
    "overloaded",  # 429, 503 with too much to do
    "broken",  # 500, 502, 504, reset, cut off, garbage
    "unreachable",  # connection refused, DNS, TLS handshake, connect timeout
    "silent",  # no complete answer in time
    "recalled",  # taken back by the dispatcher; says nothing about either side
]

SEVERAL = 3  # rows whose failures put an endpoint down without a probe
SUSPECT = 2  # crashes after which a row is tried last and alone
LEAST_TRYING = 20.0  # seconds of failures before a row is charged on the word of a probe alone
MOST_REFUSED = 20  # refusals for load of one row alone, while others were answered, before it fails
DENIED = frozenset({301, 302, 303, 307, 308, 401, 402, 403, 404, 405, 429})  # 429: a spent quota, raised as Rejected


def outcome_of(error: BackendError) -> Outcome:
    """What an error says about the attempt that ended in it."""
    if error.second_hand or isinstance(error, Truncated | EmptyAnswer):
        return "flawed"
    if error.overload:
        return "overloaded"
    if error.unreached:
        return "unreachable"
    if isinstance(error, Rejected):
        return "denied" if error.status in DENIED else "refused"
    return "silent" if isinstance(error, Timeout) else "broken"


@dataclass(slots=True, eq=False)
class RowHistory:
    """The failures of one turn, over all endpoints, since it was first sent."""

    charges: int = 0
    undecided: int = 0
    crashes: int = 0  # endpoints that went down right after a failure of this row that can crash a server
    refused: int = 0  # refusals for load, alone at the endpoint, while others were answered
    denials: int = 0
    failures: int = 0  # since it was last forgiven
    failing_since: float | None = None  # when the first of these was sent
    began: float | None = None  # when its first failed attempt was sent

    @property
    def suspect(self) -> bool:
        return self.crashes >= SUSPECT

    def settle(self, number: int, *, charge: bool) -> None:
        """Decide some of its undecided failures."""
        self.undecided -= number
        if charge:
            self.charges += number
        elif not self.undecided:
            self.failures, self.failing_since = 0, None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request that ended."""

    row: RowHistory
    sent_at: float
    ended_at: float
    outcome: Outcome
    trial: bool = False  # the endpoint was down; this request was sent to find out
    left_in_flight: int = 0  # other requests at the endpoint


@dataclass(frozen=True, slots=True)
class Verdict:
    row: Literal["clear", "charged", "undecided"]
    endpoint: Literal["", "healthy", "suspect", "down"] = ""  # "": as it was
    move: bool = False  # send the row to another endpoint
    probe: bool = False  # ask the endpoint whether it is there
    at_once: bool = False  # send the row again without a delay
    soon: bool = False  # send it again after a short delay: the endpoint holds everything back by itself


@dataclass(slots=True, eq=False)
class EndpointHistory:
    """The undecided failures of one endpoint: all that is known against it."""

    open: dict[RowHistory, list[Attempt]] = field(default_factory=dict)

    @property
    def witnesses(self) -> int:
        """Rows with a failure that the endpoint may have caused. A refusal for load is none, and neither is a row that
        has failed before while others were answered."""
        return sum(not row.charges and _not_refused(attempts) > 0 for row, attempts in self.open.items())

    def add(self, attempt: Attempt, verdict: Verdict) -> None:
        """Record an attempt and its verdict with the row and here."""
        row = attempt.row
        if attempt.outcome == "answered":
            self._answered(attempt.sent_at)
            return
        row.failures += 1
        row.denials += attempt.outcome == "denied"
        row.failing_since = attempt.sent_at if row.failing_since is None else row.failing_since
        row.began = attempt.sent_at if row.began is None else row.began
        row.charges += verdict.row == "charged"
        if verdict.row == "undecided":
            row.undecided += attempt.outcome != "overloaded"
            self.open.setdefault(row, []).append(attempt)
        if verdict.endpoint == "down":
            self.forgive()
        elif attempt.outcome in ("flawed", "refused"):
            self._answered(attempt.sent_at)

    def _answered(self, sent_at: float) -> None:
        """A request that was sent then was answered: what was sent no later has failed by itself."""
        for row in [row for row, attempts in self.open.items() if attempts[0].sent_at <= sent_at]:
            attempts = self.open[row]
            proven = [attempt for attempt in attempts if attempt.sent_at <= sent_at]
            failed = _not_refused(proven)
            row.refused += len(proven) - failed
            row.settle(failed, charge=True)
            if len(proven) == len(attempts):
                del self.open[row]
            else:
                self.open[row] = [attempt for attempt in attempts if attempt.sent_at > sent_at]

    def forgive(self) -> None:
        """The endpoint is down: its undecided failures were its own, though a suspect may have caused that."""
        for row, attempts in self.open.items():
            row.crashes += any(
                attempt.outcome == "broken" and (row.suspect or not attempt.trial) for attempt in attempts
            )
            row.settle(_not_refused(attempts), charge=False)
        self.open.clear()

    def give_up_on(self, row: RowHistory) -> None:
        """Charge the row on the word of a probe: the endpoint is up and there are no other rows to tell."""
        row.settle(_not_refused(self.open.pop(row, ())), charge=True)


def _not_refused(attempts: Iterable[Attempt]) -> int:
    return sum(attempt.outcome != "overloaded" for attempt in attempts)


def judge(
    attempt: Attempt, history: EndpointHistory, *, is_down: bool, others_healthy: bool, few_rows: bool
) -> Verdict:
    """The verdict on one attempt. ``few_rows``: too few rows are left to tell a bad row from a bad endpoint."""
    outcome = attempt.outcome
    if outcome == "recalled":
        return Verdict("clear", move=others_healthy, at_once=True)
    if outcome in ("answered", "flawed", "refused", "denied"):
        return Verdict("charged" if outcome in ("flawed", "refused") else "clear", "healthy")
    if outcome == "unreachable":
        return Verdict("clear", "down", move=others_healthy)
    if outcome == "overloaded":
        alone = attempt.left_in_flight == 0 and not is_down
        return Verdict("undecided" if alone else "clear", move=others_healthy, soon=True)
    if is_down:
        # What was in flight when the endpoint went down may have caused that. Of trials only a suspect's count.
        counts = attempt.row.suspect or not attempt.trial
        return Verdict("undecided" if counts else "clear", "down", move=others_healthy)
    row = attempt.row
    witnesses = history.witnesses + (not row.charges and row not in history.open)
    if (
        not row.charges and witnesses >= SEVERAL and attempt.left_in_flight <= 2 * witnesses
    ):  # those in flight may yet be answered
        return Verdict("undecided", "down", move=others_healthy)
    return Verdict("undecided", "suspect", move=others_healthy, probe=others_healthy or few_rows)


Step = Literal["fail", "retry", "wait"]


def next_step(row: RowHistory, max_retries: int, *, retryable: bool) -> Step:
    """What becomes of a row whose attempt failed. ``wait``: its retries are used up, as far as they are its own; so
    wait until its undecided failures are decided."""
    if not retryable or row.charges > max_retries:
        return "fail"
    if row.crashes > max(SUSPECT, max_retries) or row.refused > MOST_REFUSED:
        return "fail"
    return "wait" if row.undecided and row.charges + row.undecided > max_retries else "retry"


def broke_alone(row: RowHistory, now: float) -> None:
    """Note that a row's trial broke at an endpoint whose probe says that it is up, with too few rows to tell."""
    if row.began is not None and now - row.began >= LEAST_TRYING:
        row.charges += 1


def after_probe(row: RowHistory, max_retries: int, now: float) -> Step:
    """The same once the endpoint was probed and is up, and no other row can tell."""
    began = now if row.failing_since is None else row.failing_since
    return "retry" if max_retries and now - began < LEAST_TRYING else "fail"
