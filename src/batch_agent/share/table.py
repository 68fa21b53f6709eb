"""Divides slots, rate limits and the budget among the workers of one run.

Each of these is a pot with a limit. Every worker holds an amount of it and uses no more than that, so single requests
need no permission. About once a second a worker reports what it holds and wants, and gets a new amount. The sum of what
all workers hold never exceeds the limit. A worker that should hold less first uses less, then reports it with its next
beat, so two workers never hold the same part.

There are four kinds of pots:

- Slots are divided evenly among the workers that want them. The slots of a dead worker are free when its membership
ends. If the number of slots is searched, the first worker searches for all of them, and its number is the limit.
- Rate limits (``rpm``, ``tpm``) are divided in the same way. What a worker may have used stays counted for a minute.
- The budget is consumed. What a dead worker held and did not return counts as spent. If running time costs, it is
charged once for all workers: a little ahead of the time, so that a kill of all of them cannot hide any of it.
- The rest of the budget (``ROWS``) is divided like slots: each worker holds what its rows will still cost, so that only
as many start as the budget can finish. It is free when a worker has died: its rows start again.

The table is one value of plain JSON, which the store of the run holds; ``Table`` has no clock and no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache

from pydantic import JsonValue, TypeAdapter

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.scheduler.capacity import Progress
from batch_agent.scheduler.rates import MINUTE, SLACK

# Prefixes of the names of pots.
BUDGET = "budget "
RATE = "rate "
SLOTS = "slots "
ROWS = "rows "
BUDGET_TOKENS, BUDGET_COST = f"{BUDGET}tokens", f"{BUDGET}cost"
DOLLAR = 10**9  # costs are counted in units of 1e-9 $
ROTATION = MINUTE  # seconds after which another worker is served first, if there is not enough for all

FOREVER = 1e9  # seconds of a membership that ends with its process
MOST_ROWS = 20  # number of the latest requests for single rows that are kept


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker holds and wants of one pot. ``limit`` is the limit for all workers together. ``part`` is the
    smallest useful amount, such as the tokens of one request. ``spent`` is the part of a budget that was consumed.
    ``search`` is the state of the search for the limit; None if the limit was given. ``rate`` is the cost of a second
    of running time; ``want`` is then what is charged ahead. ``alone``: more of a budget helps only while no other
    worker holds any, because the request may need all that is left."""

    limit: int
    held: int
    want: int
    part: int = 1
    spent: int = 0
    search: Progress | None = None
    rate: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """What a worker holds from now on. ``fair`` is lower than ``held`` if the worker should use less because others
    want some. For a budget, ``others_spent`` is what other workers have spent, and ``others_open`` what they hold and
    have not spent. For a searched limit, ``search`` is the search of the worker that ``leads``. ``even``: all workers
    together hold as much as the limit, or as they want. For running time, ``held`` is what is charged ahead of now, and
    ``fair`` what is left of the budget after that."""

    held: int
    fair: int
    others_spent: int = 0
    others_open: int = 0
    search: Progress | None = None
    leads: bool = False
    even: bool = True


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a worker knows about an endpoint. Under the name ``BUDGET``, ``down`` means that the budget is used up.
    Under ``ROWS`` and the name of a stage, ``costs`` has three numbers about the rows that ended: how many, the sum of
    their costs, and the sum of the squares of their costs."""

    down: bool = False
    reason: str = ""
    costs: tuple[float, float, float] = (0.0, 0.0, 0.0)


NO_REPORT: Mapping[str, Learnt] = {}


@dataclass(frozen=True, slots=True)
class Steering:
    """Requests to all workers. ``number`` grows with each request; ``rows`` are the requests for single rows."""

    number: int = 0
    session: int = 0  # the number at which the session began
    paused: bool = False
    ending: str = ""  # "drain" or "cancel"
    max_inflight: int | None = None
    rows: tuple[tuple[int, str, str], ...] = ()  # number, action, row


@dataclass(frozen=True, slots=True)
class Allotment:
    """The answer to a worker's report. ``learnt`` is what each other worker knows, by endpoint."""

    grants: Mapping[str, Grant]
    learnt: Mapping[str, Sequence[Learnt]]
    steering: Steering
    workers: int


@dataclass(slots=True)
class Member:
    until: float
    claims: dict[str, Claim] = field(default_factory=dict)
    learnt: dict[str, Learnt] = field(default_factory=dict)
    status: dict[str, JsonValue] = field(default_factory=dict)  # shown to users


@dataclass(slots=True)
class Table:
    """The shared state of all pots. At any time, only one worker changes it."""

    members: dict[str, Member] = field(default_factory=dict)
    steering: Steering = field(default_factory=Steering)
    spent: dict[str, int] = field(default_factory=dict)  # amounts spent by workers that have left
    lingering: list[tuple[str, int, float]] = field(default_factory=list)  # pot, amount, end of counting
    charged: float = 0.0  # time up to which running time is charged
    exhausted: tuple[int, str] = (0, "")  # session in which the budget was too small for a worker's next call; reason
    # Amounts that the record counts outside of the table; the store sets them, and they are not written with it.
    outside: dict[str, int] = field(default_factory=dict)

    # Workers

    def beat(
        self,
        worker: str,
        now: float,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt] = NO_REPORT,
        status: JsonObject | None = None,
    ) -> Allotment:
        """Record a worker's report, and grant what it may hold. Its membership ends ``seconds`` from now."""
        self._expire(now)
        member = self.members.setdefault(worker, Member(now))
        before = dict(member.claims)
        member.until = now + seconds
        member.learnt = dict(learnt)
        member.status = status or {}
        gone = member.claims.keys() - claims.keys()
        for name in gone:
            self._let_go(name, member.claims.pop(name), now)
        member.claims.update(claims)
        grants: dict[str, Grant] = {}
        for name, claim in claims.items():
            if claim.rate:
                was = before.get(name)
                grants[name] = self._charge(name, claim, now, is_new=was is None or not was.rate)
                continue
            grants[name] = grant = self._grant(worker, name, claim, now)
            member.claims[name] = replace(claim, held=grant.held)
        others = [each for name, each in self.members.items() if name != worker and each.until]
        known = {name: [each.learnt[name] for each in others if name in each.learnt] for name in learnt}
        if (told := learnt.get(BUDGET)) is not None and told.down:
            self.exhausted = (self.steering.session, told.reason)
        if self.exhausted[1] and self.exhausted[0] == self.steering.session:
            known[BUDGET] = [Learnt(down=True, reason=self.exhausted[1])]
        return Allotment(grants, known, self.steering, 1 + len(others))

    def leave(self, worker: str, now: float) -> None:
        """Remove a worker. The unspent part of its budget is returned."""
        member = self.members.pop(worker, None)
        for name, claim in {} if member is None else member.claims.items():
            self._let_go(name, claim, now)
            others = any(name in each.claims for each in self.live(now).values())
            if claim.rate and not others and self.charged > now:  # time that was charged ahead and is not used
                self.spent[name] -= int((self.charged - now) * claim.rate)
                self.charged = now

    def forget_members(self, now: float) -> None:
        """Remove all workers of an earlier session. They cannot report again, and new workers will have their names.
        What they held of a budget counts as spent."""
        for member in self.members.values():
            for name, claim in member.claims.items():
                self._let_go(name, replace(claim, spent=claim.held), now)
        self.members.clear()

    def spent_of(self, name: str) -> int:
        """Return what is spent of a budget, including what dead workers did not return."""
        members = self.members.values()
        return self._spent_before(name) + sum(
            each.claims[name].spent if each.until else each.claims[name].held for each in members if name in each.claims
        )

    def _spent_before(self, name: str) -> int:
        """Return the amount of a budget that was spent by workers that have left, and by those who do not use the
        table."""
        return self.spent.get(name, 0) + self.outside.get(name, 0)

    def live(self, now: float) -> dict[str, Member]:
        return {name: member for name, member in self.members.items() if member.until > now}

    def _expire(self, now: float) -> None:
        """End expired memberships. What a dead worker held of a budget stays reserved, because the worker may only be
        disconnected."""
        for worker, member in tuple(self.members.items()):
            if member.until and member.until <= now:
                for name in [name for name in member.claims if not name.startswith(BUDGET)]:
                    self._let_go(name, member.claims.pop(name), now)
                member.until = 0.0
                member.learnt = {}
                member.status = {}
            if not member.until and not member.claims:
                del self.members[worker]
        self.lingering = [each for each in self.lingering if each[2] > now]

    def _let_go(self, name: str, claim: Claim, now: float) -> None:
        if name.startswith(BUDGET):
            self.spent[name] = self.spent.get(name, 0) + claim.spent
        elif name.startswith(RATE) and claim.held:
            self.lingering.append((name, claim.held, now + MINUTE + SLACK))

    # Shares

    def _charge(self, name: str, claim: Claim, now: float, *, is_new: bool) -> Grant:
        """Charge running time up to now, and what the claim wants ahead. Time in which no worker lived costs nothing. A
        worker that reports again counts as alive since its latest report."""
        begun = max(self.charged, now) if is_new else self.charged
        past = max(0, math.ceil((now - begun) * claim.rate))
        left = max(0, claim.limit - self.spent_of(name) - past)
        ahead = max(0, min(left, claim.want - int(max(0.0, begun - now) * claim.rate)))
        self.spent[name] = self.spent.get(name, 0) + past + ahead
        self.charged = max(begun, now) + ahead / claim.rate
        return Grant(int((self.charged - now) * claim.rate), left - ahead, self.spent_of(name) - claim.spent)

    def _grant(self, worker: str, name: str, claim: Claim, now: float) -> Grant:
        members = {each: member for each, member in self.members.items() if name in member.claims}
        leader = _leader(name, members)
        search = None if leader is None else members[leader].claims[name].search
        if search is not None:
            claim = replace(claim, limit=search[0])
        others = [member for each, member in members.items() if each != worker]
        past = self._spent_before(name) + sum(amount for pot, amount, _ in self.lingering if pot == name)
        held = past + sum(member.claims[name].held for member in others)
        order = in_turn((each for each, member in members.items() if member.until), now)
        claims = [members[each].claims[name] for each in order]
        if name.startswith(BUDGET):
            free = claim.limit - held - claim.held
            more = shares(free, claim.limit, [(max(0, each.want - each.held), max(0, each.part)) for each in claims])
            fair = claim.held + more[order.index(worker)]
        else:
            fair = shares(claim.limit - past, claim.limit, [(each.want, each.part) for each in claims])[
                order.index(worker)
            ]
        spent = self.spent_of(name) - claim.spent if name.startswith(BUDGET) else 0
        granted = max(claim.held, min(fair, claim.limit - held))
        if claim.alone and held > spent:  # two workers that hold what each can only use alone would wait forever
            granted = claim.held
        total = held + granted
        wanting = any(each.claims[name].want > each.claims[name].held for each in others)
        even = total == claim.limit or (total < claim.limit and not wanting and claim.want <= granted)
        return Grant(granted, fair, spent, held - spent, search, leader == worker, even)

    # As JSON

    def to_json(self) -> JsonObject:
        return {name: value for name, value in asdict(self).items() if name != "outside"}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Table:
        """Return the table that ``to_json`` wrote; an empty one for {}."""
        return _adapter().validate_python(value)


@cache
def _adapter() -> TypeAdapter[Table]:
    return TypeAdapter(Table)


def _leader(pot: str, members: Mapping[str, Member]) -> str | None:
    """Return the first live worker that can search for the limit of a pot; None if there is none."""
    able = [name for name, each in members.items() if each.until and each.claims[pot].search is not None]
    return min(able, key=lambda name: (len(name), name), default=None)


def of_stage(pot: str, stage: str) -> str:
    """Return the name under which the spending of one stage of a pipeline is reported; "" stands for the whole
    pipeline."""
    return f"{pot} {stage}" if stage else pot


def steered(now: Steering, request: JsonObject) -> Steering:
    """Return the requests to all workers with ``request`` added. Raises SpecError for an unknown request."""
    number, action = now.number + 1, str(request.get("do"))
    match action:
        case "begin":
            return Steering(number, number)
        case "pause" | "resume":
            return replace(now, number=number, paused=action == "pause")
        case "drain" | "cancel":
            return replace(now, number=number, ending=action)
        case "resize":
            inflight = request.get("inflight")
            if type(inflight) is not int or inflight < 1:
                raise SpecError("resize needs a whole number above 0")
            return replace(now, number=number, max_inflight=inflight)
        case "cancel-row" | "retry-row":
            row = (number, action, str(request.get("row", "")))
            return replace(now, number=number, rows=(*now.rows[-MOST_ROWS:], row))
    raise SpecError(f"a run that several processes share does not support {action!r}")


def shares(free: int, whole: int, wants: Iterable[tuple[int, int]]) -> list[int]:
    """Divide ``free``, the free amount of a pot, and return the part of each of ``wants``, pairs of a wanted amount and
    the smallest useful part. First each gets its smallest useful part, in order, while the amount lasts; then the rest
    is divided evenly. A smallest part that exceeds the ``whole`` pot needs all of it."""
    wanted = list(wants)
    given, left = [0] * len(wanted), max(0, free)
    for place, (want, part) in enumerate(wanted):
        first = min(want, max(1, part), max(1, whole))
        if 0 < first <= left:
            given[place] = first
            left -= first
    while left and (open_ := [place for place, (want, _) in enumerate(wanted) if 0 < given[place] < want]):
        each = max(1, left // len(open_))
        for place in open_[:left]:
            more = min(each, wanted[place][0] - given[place])
            given[place] += more
            left -= more
    return given


def in_turn(workers: Iterable[str], now: float) -> list[str]:
    """Return the workers in the order in which they are served. The order rotates every minute."""
    order = sorted(workers)
    first = int(now // ROTATION) % len(order) if order else 0
    return order[first:] + order[:first]
