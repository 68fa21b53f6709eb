"""Which of many endpoints a turn goes to: where it will be done soonest, and where its prefix is.

A free slot is worth what its endpoint makes of it: the one with the lowest (in flight + 1) x seconds per turn / weight
comes first, so that a fast server has more on its way than a slow one. They stand in heaps, one for each kind of
endpoint (which models it serves, how long a context it has); an entry that is out of date is dropped when it comes up,
and every change costs one push. Sums over all endpoints are kept up to date in the same place, so nothing here looks at
all of them for a turn.

Agents with a key have a home by rendezvous hashing: of all endpoints the one whose hash with the key is highest, so
that one endpoint more or less moves only its share of the keys. That is worked out once for a key. What a prefix is
worth is measured: seconds per token that was not in a cache, the slope through all answers so far.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import inf, log

from batch_agent.messages import Usage
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.health import SHORTEST_SILENCE, SILENCE_FACTOR

LEARN = 0.1  # the weight of the latest first prompt in their mean
LEARN_ALL = 0.05  # the weight of the latest answer in the seconds per turn of all
UNKNOWN = 2.0  # times the usual seconds, expected of an endpoint that has never answered
SLOW = 1.5  # times the usual seconds per turn, from where on an endpoint must be worth waiting for
PRIOR_SECONDS = 1e-4  # per token that has to be computed, until answers have shown it
PRIOR_WEIGHT = 1e6  # tokens squared
FORGET = 0.99
MOST = (1 << 64) - 1
MOST_HOMES = 100_000  # keys whose home is remembered

Kind = tuple[frozenset[str] | None, int | None]


class PrefixCost:
    """Seconds that a token costs which is not in a server's cache: least squares, the latest answers count most."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        self._n = FORGET * self._n + 1
        self._x = FORGET * self._x + tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + tokens * tokens
        self._xy = FORGET * self._xy + tokens * seconds

    def seconds(self, tokens: int) -> float:
        n = self._n or 1.0
        slope = (self._xy - self._x * self._y / n + PRIOR_WEIGHT * PRIOR_SECONDS) / (
            self._xx - self._x * self._x / n + PRIOR_WEIGHT
        )
        return tokens * max(0.0, slope)


class Standing:
    """One endpoint as the router last saw it."""

    __slots__ = ("kind", "number", "seed", "slots", "spare", "works")

    def __init__(self, endpoint: Endpoint) -> None:
        self.kind = _kind(endpoint)
        self.seed = _hash(endpoint.name)
        self.number = 0  # of its entry in the heap; others of it are out of date
        self.spare = 0.0
        self.slots = 0.0
        self.works = False


class Router:
    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.working = 0  # endpoints that are not down, given up or leaving
        self.trials: deque[Endpoint] = deque()  # those that are down, and were found to be worth a trial
        self.prefix = PrefixCost()
        self.usual = 0.0  # seconds per turn, of all
        self._answers = 0
        self.first_tokens = 0.0  # of a first prompt, on average
        self._standing: dict[Endpoint, Standing] = {}
        self._heaps: dict[Kind, list[tuple[float, int, Endpoint]]] = {}  # of all kinds there are
        self._kinds: Counter[Kind] = Counter()
        self._numbers = 0
        self._spare = self._slots = 0.0  # finite ones
        self._endless = self._endless_spare = 0  # endpoints without a limit
        self._down_spare = 0.0
        self._resting: list[Endpoint] = []  # slow ones that the end of the batch does not wait for
        self._rested_at = 0.0  # turns left then
        self._homes: dict[tuple[str, str], Endpoint] = {}
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        standing = self._standing[endpoint] = Standing(endpoint)
        self._count_kind(standing.kind, 1)
        self._homes.clear()
        self.touch(endpoint)

    def drop(self, endpoint: Endpoint) -> None:
        """It is gone: nothing is in flight there any more."""
        standing = self._standing.pop(endpoint)
        self._count(endpoint, standing, -1)
        self._count_kind(standing.kind, -1)
        self._homes.clear()

    def _count_kind(self, kind: Kind, sign: int) -> None:
        self._kinds[kind] += sign
        if self._kinds[kind]:
            self._heaps.setdefault(kind, [])
        else:
            del self._kinds[kind], self._heaps[kind]

    # What is free

    @property
    def spare(self) -> float:
        """Slots that stay idle if nobody takes them; while nothing works, those of the next trials."""
        if self.working:
            return inf if self._endless_spare else self._spare
        return self._down_spare

    @property
    def slots(self) -> int | None:
        return None if self._endless else int(self._slots)

    def touch(self, endpoint: Endpoint) -> None:
        """Something about the endpoint has changed."""
        standing = self._standing.get(endpoint)
        if standing is None:
            return
        self._count(endpoint, standing, -1)
        works = endpoint.is_working
        kind = _kind(endpoint)
        if kind != standing.kind:
            self._count_kind(standing.kind, -1)
            self._count_kind(kind, 1)
            standing.kind = kind
            self._homes.clear()
        if works != standing.works:
            standing.works = works
            self._homes.clear()
        standing.spare = endpoint.spare
        slots = endpoint.slots
        standing.slots = inf if slots is None else slots
        self._count(endpoint, standing, 1)
        self._numbers += 1
        standing.number = self._numbers
        if standing.works and standing.spare > 0:
            server = endpoint.server
            # One that has never answered ranks behind those that have.
            score = (server.inflight + 1) * (server.seconds or UNKNOWN * self.usual or 1.0) / server.weight
            heap = self._heaps[kind]
            heappush(heap, (score, self._numbers, endpoint))
            if len(heap) > 64 + 8 * len(self._standing):
                heap[:] = [entry for entry in heap if self._is_current(entry)]
                heapify(heap)

    def _count(self, endpoint: Endpoint, standing: Standing, sign: int) -> None:
        if not standing.works:
            self._down_spare += sign * (0.0 if endpoint.leaving else standing.spare)
            return
        self.working += sign
        if standing.slots == inf:
            self._endless += sign
            self._endless_spare += sign * (standing.spare > 0)
        else:
            self._slots += sign * standing.slots
            self._spare += sign * standing.spare

    def _is_current(self, entry: tuple[float, int, Endpoint]) -> bool:
        standing = self._standing.get(entry[2])
        return standing is not None and standing.number == entry[1]

    def best(self, model: str = "", tokens: int = 0, avoid: Set[Endpoint] = frozenset()) -> Endpoint | None:
        """The free endpoint where a turn will be done soonest; None where none is free that could take it."""
        found: tuple[float, int, Endpoint] | None = None
        for kind in self._fitting(model, tokens):
            entry = self._top(self._heaps[kind], avoid)
            if entry is not None and (found is None or entry < found):
                found = entry
        return None if found is None else found[2]

    def other(self, avoid: Set[Endpoint], model: str, tokens: int) -> Endpoint | None:
        """The working endpoint beside these where a turn will soonest have a slot; None where none could take it."""
        kinds = self._fitting(model, tokens)
        others = [each for each, standing in self._standing.items() if standing.works and standing.kind in kinds]
        return min((each for each in others if each not in avoid), key=lambda each: self.wait(each, 0), default=None)

    def _fitting(self, model: str, tokens: int) -> Sequence[Kind]:
        """Kinds that may take a turn of that model and length."""
        if len(self._heaps) == 1:
            return list(self._heaps)
        serving = self._serving(model)
        return [kind for kind in serving if kind[1] is None or kind[1] > tokens] or serving

    def _serving(self, model: str) -> list[Kind]:
        """Kinds that may serve a model: where some say that they do, those and the ones that say nothing."""
        if model and any(kind[0] is not None and model in kind[0] for kind in self._heaps):
            return [kind for kind in self._heaps if kind[0] is None or model in kind[0]]
        return list(self._heaps)

    def _top(self, heap: list[tuple[float, int, Endpoint]], avoid: Set[Endpoint]) -> tuple[float, int, Endpoint] | None:
        avoided: list[tuple[float, int, Endpoint]] = []
        while heap and (not self._is_current(heap[0]) or heap[0][2] in avoid):
            entry = heappop(heap)
            if entry[2] in avoid and self._is_current(entry):
                avoided.append(entry)
        top = heap[0] if heap else None
        for entry in avoided:
            heappush(heap, entry)
        return top

    def serves(self, endpoint: Endpoint, model: str) -> bool:
        return self._standing[endpoint].kind in self._serving(model)

    def is_served(self, model: str) -> bool:
        """Whether an endpoint that works may serve the model."""
        kinds = self._serving(model)
        return any(standing.works and standing.kind in kinds for standing in self._standing.values())

    def hide(self, endpoint: Endpoint) -> None:
        """It is not free, whatever it looked like; until it is touched again."""
        self._standing[endpoint].number = 0

    def rest(self, endpoint: Endpoint, turns_left: float) -> None:
        """It is too slow for what is left; it is asked again when more is left, or nobody else is at work."""
        self.hide(endpoint)
        self._resting.append(endpoint)
        self._rested_at = max(self._rested_at, turns_left)

    def wake(self, turns_left: float) -> bool:
        """True when endpoints that rested are back."""
        if not self._resting or turns_left <= self._rested_at:
            return False
        resting, self._resting, self._rested_at = self._resting, [], 0.0
        for endpoint in resting:
            self.touch(endpoint)
        return True

    # What is known of them

    def others_work(self, endpoint: Endpoint) -> bool:
        return self.working > self.works(endpoint)

    @property
    def longest_silence(self) -> float:
        """Seconds that an endpoint may be silent while others answer."""
        return max(SHORTEST_SILENCE, SILENCE_FACTOR * self.usual) if self.usual else inf

    def answered(self, endpoint: Endpoint, seconds: float) -> None:
        self._answers += 1
        self.usual += max(LEARN_ALL, 1 / self._answers) * (seconds - self.usual)

    def learn_prefix(self, usage: Usage, seconds: float, *, first: bool) -> None:
        if usage.prompt_tokens:
            self.prefix.learn(usage.prompt_tokens - usage.cached_tokens, seconds)
            if first:
                self.first_tokens += LEARN * (usage.prompt_tokens - self.first_tokens)

    def works(self, endpoint: Endpoint) -> bool:
        standing = self._standing.get(endpoint)
        return standing is not None and standing.works

    def is_free(self, endpoint: Endpoint) -> bool:
        """Whether it has a slot, and does not rest."""
        standing = self._standing[endpoint]
        return standing.works and standing.spare > 0 and standing.number > 0

    def seconds(self, endpoint: Endpoint) -> float:
        """A turn's, as far as it is known."""
        return endpoint.server.seconds or self.usual

    def wait(self, endpoint: Endpoint, ahead: int) -> float:
        """Seconds until a slot is free at an endpoint that is full and has so many waiting."""
        limit = endpoint.capacity.limit or max(1, endpoint.inflight)
        return (ahead + 1) * self.seconds(endpoint) / limit

    def is_slow_for(self, endpoint: Endpoint, turns_left: float, slots: float) -> bool:
        """Whether the rest of the batch will be done sooner without it."""
        seconds = endpoint.server.seconds
        return seconds > SLOW * self.usual and seconds > self.usual * (1 + turns_left / max(1.0, slots))

    # Keys

    def home(self, key: str, model: str = "") -> Endpoint | None:
        """Where agents with this key belong, of the endpoints that work and serve the model."""
        home = self._homes.get((key, model))
        if home is not None:
            return home
        number = _hash(key)
        best, found = -inf, None
        kinds = set(self._serving(model))
        even = len({endpoint.server.weight for endpoint in self._standing}) == 1
        for endpoint, standing in self._standing.items():
            if standing.works and standing.kind in kinds:
                rank: float = _mix(number ^ standing.seed)
                if not even:  # -weight / ln(hash between 0 and 1) is highest with a chance equal to the weight
                    rank = -endpoint.server.weight / log((rank + 1) / (MOST + 2))
                if rank > best:
                    best, found = rank, endpoint
        if found is not None:
            if len(self._homes) >= MOST_HOMES:
                self._homes.clear()
            self._homes[key, model] = found
        return found


def _kind(endpoint: Endpoint) -> Kind:
    return endpoint.server.models, endpoint.server.context


def _hash(text: str) -> int:
    """The same in every process, so that a run finds what an earlier one left in the caches."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _mix(number: int) -> int:
    """Every bit of the number in every bit of the result, as splitmix64 does it."""
    number = number * 0x9E3779B97F4A7C15 & MOST
    return (number ^ number >> 29) * 0xBF58476D1CE4E5B9 & MOST
