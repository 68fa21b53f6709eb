"""Chooses the endpoint of a turn among many: the one that finishes it soonest, or the one with its prefix.

The endpoint with the lowest (in flight + 1) x seconds per turn / weight comes first, so a fast server gets more
requests than a slow one. The endpoints are in heaps, one for each kind of endpoint (the models it serves, the length of
its context). An outdated entry is dropped when it reaches the top, and every change costs one push. Sums over all
endpoints are updated in the same place, so no turn iterates over all endpoints.

Agents with a key have a home by rendezvous hashing: the endpoint whose hash with the key is highest. So adding or
removing one endpoint moves only its share of the keys. The home is computed once per key. The value of a prefix is
measured: seconds per token that was not cached, as the slope through all answers so far.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import inf, log

from batch_agent.messages import Usage
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint

SLOW = 1.5  # an endpoint above this many times the usual seconds per turn is checked before use
PRIOR_SECONDS = 1e-4  # per token to compute, until answers have shown it
PRIOR_WEIGHT = 1e6  # tokens squared
MOST = (1 << 64) - 1
MOST_HOMES = 100_000  # number of keys whose home is cached

Kind = tuple[frozenset[str] | None, int | None]


class PrefixCost:
    """Estimates the seconds per uncached token by least squares; recent answers have more weight."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        self._n = N.forget * self._n + 1
        self._x = N.forget * self._x + tokens
        self._y = N.forget * self._y + seconds
        self._xx = N.forget * self._xx + tokens * tokens
        self._xy = N.forget * self._xy + tokens * seconds

    def seconds(self, tokens: int) -> float:
        n = self._n or 1.0
        slope = (self._xy - self._x * self._y / n + PRIOR_WEIGHT * PRIOR_SECONDS) / (
            self._xx - self._x * self._x / n + PRIOR_WEIGHT
        )
        return tokens * max(0.0, slope)


class Standing:
    """The state of one endpoint when the router last updated it."""

    __slots__ = ("kind", "number", "seed", "slots", "spare", "works")

    def __init__(self, endpoint: Endpoint) -> None:
        self.kind = _kind(endpoint)
        self.seed = _hash(endpoint.name)
        self.number = 0  # number of its valid entry in the heap; its other entries are outdated
        self.spare = 0.0
        self.slots = 0.0
        self.works = False


class Router:
    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.working = 0  # number of endpoints that are not idle, down, given up or leaving
        self.working_primaries = 0  # of them, those that are no standby
        self.trials: deque[Endpoint] = deque()  # endpoints that are down and worth a trial
        self.prefix = PrefixCost()
        self.usual = 0.0  # seconds per turn, mean of all
        self.slowest = 0.0  # seconds of the slowest answer
        self._answers = 0
        self.first_tokens = 0.0  # mean tokens of a first prompt
        self._standing: dict[Endpoint, Standing] = {}
        self._heaps: dict[Kind, list[tuple[float, int, Endpoint]]] = {}  # for all existing kinds
        self._kinds: Counter[Kind] = Counter()
        self._numbers = 0
        self._spare = self._slots = 0.0  # of endpoints with a limit
        self._endless = self._endless_spare = 0  # number of endpoints without a limit
        self._down_spare = 0.0
        self._resting: list[Endpoint] = []  # slow endpoints that would delay the end of the batch
        self._rested_at = 0.0  # turns left at that time
        self._homes: dict[tuple[str, str], Endpoint] = {}
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        standing = self._standing[endpoint] = Standing(endpoint)
        self._count_kind(standing.kind, 1)
        self._homes.clear()
        self.touch(endpoint)

    def drop(self, endpoint: Endpoint) -> None:
        """Remove an endpoint without requests in flight."""
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

    # Free slots

    @property
    def spare(self) -> float:
        """Number of slots that would stay idle; if no endpoint works, those of the next trials."""
        if self.working:
            return inf if self._endless_spare else self._spare
        return self._down_spare

    @property
    def slots(self) -> int | None:
        return None if self._endless else int(self._slots)

    def touch(self, endpoint: Endpoint) -> None:
        """Record that the endpoint has changed."""
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
            # An endpoint that has never answered ranks behind those that have.
            seconds = server.seconds or max(N.much_slower * self.usual, server.unanswered) or 1.0
            score = (server.inflight + 1) * seconds / server.weight
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
        self.working_primaries += sign * (endpoint.standby is None)
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
        """Return the free endpoint that will finish a turn soonest; None if no free endpoint can take it."""
        found: tuple[float, int, Endpoint] | None = None
        for kind in self._fitting(model, tokens):
            entry = self._top(self._heaps[kind], avoid)
            if entry is not None and (found is None or entry < found):
                found = entry
        return None if found is None else found[2]

    def other(self, avoid: Set[Endpoint], model: str, tokens: int) -> Endpoint | None:
        """Return the working endpoint outside ``avoid`` that will have a free slot soonest; None if there is none."""
        kinds = self._fitting(model, tokens)
        others = [each for each, standing in self._standing.items() if standing.works and standing.kind in kinds]
        return min((each for each in others if each not in avoid), key=lambda each: self.wait(each, 0), default=None)

    def _fitting(self, model: str, tokens: int) -> Sequence[Kind]:
        """Return the kinds of endpoints that may take a turn of that model and length."""
        if len(self._heaps) == 1:
            return list(self._heaps)
        serving = self._serving(model)
        return [kind for kind in serving if kind[1] is None or kind[1] > tokens] or serving

    def _serving(self, model: str) -> list[Kind]:
        """Return the kinds that list the model or list no models; all kinds if none lists it."""
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
        """Return whether a working endpoint may serve the model."""
        kinds = self._serving(model)
        return any(standing.works and standing.kind in kinds for standing in self._standing.values())

    def hide(self, endpoint: Endpoint) -> None:
        """Treat the endpoint as not free until it is touched again."""
        self._standing[endpoint].number = 0

    def rest(self, endpoint: Endpoint, turns_left: float) -> None:
        """Stop using an endpoint that is too slow for the number of turns left, until there are more turns."""
        self.hide(endpoint)
        self._resting.append(endpoint)
        self._rested_at = max(self._rested_at, turns_left)

    def wake(self, turns_left: float) -> bool:
        """Use resting endpoints again if more turns are left. Returns True if there were any."""
        if not self._resting or turns_left <= self._rested_at:
            return False
        resting, self._resting, self._rested_at = self._resting, [], 0.0
        for endpoint in resting:
            self.touch(endpoint)
        return True

    # Statistics

    def others_work(self, endpoint: Endpoint) -> bool:
        return self.working > self.works(endpoint)

    @property
    def longest_silence(self) -> float:
        """Seconds that an endpoint may be silent while others answer."""
        return max(N.shortest_silence, N.silence_factor * self.usual) if self.usual else inf

    def answered(self, seconds: float) -> None:
        self._answers += 1
        self.slowest = max(self.slowest, seconds)
        self.usual += max(N.weight, 1 / self._answers) * (seconds - self.usual)

    def learn_prefix(self, usage: Usage, seconds: float, *, first: bool) -> None:
        if usage.prompt_tokens:
            self.prefix.learn(usage.prompt_tokens - usage.cached_tokens, seconds)
            if first:
                self.first_tokens += N.weight * (usage.prompt_tokens - self.first_tokens)

    def works(self, endpoint: Endpoint) -> bool:
        standing = self._standing.get(endpoint)
        return standing is not None and standing.works

    def is_free(self, endpoint: Endpoint) -> bool:
        """Return whether it has a slot, and does not rest."""
        standing = self._standing[endpoint]
        return standing.works and standing.spare > 0 and standing.number > 0

    def seconds(self, endpoint: Endpoint) -> float:
        """Return the seconds per turn of the endpoint. If they are unknown, the mean of all endpoints, or the longest
        wait without an answer."""
        return endpoint.server.seconds or max(self.usual, endpoint.server.unanswered)

    def wait(self, endpoint: Endpoint, ahead: int) -> float:
        """Return the seconds until a slot is free at a full endpoint where ``ahead`` turns wait."""
        limit = endpoint.capacity.limit or max(1, endpoint.inflight)
        return (ahead + 1) * self.seconds(endpoint) / limit

    def is_slow_for(self, endpoint: Endpoint, turns_left: float, slots: float) -> bool:
        """Return whether the rest of the batch will end sooner without this endpoint."""
        seconds = endpoint.server.seconds or endpoint.server.unanswered
        return seconds > SLOW * self.usual and seconds > self.usual * (1 + turns_left / max(1.0, slots))

    # Keys

    def home(self, key: str, model: str = "") -> Endpoint | None:
        """Return the home of agents with this key, among the endpoints that work and serve the model."""
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
                if not even:  # -weight / ln(hash between 0 and 1) is highest in proportion to the weight
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
    """Return a hash that is the same in every process, so that a later run finds cached prefixes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _mix(number: int) -> int:
    """Mix the bits of a number as splitmix64 does: every bit affects every bit of the result."""
    number = number * 0x9E3779B97F4A7C15 & MOST
    return (number ^ number >> 29) * 0xBF58476D1CE4E5B9 & MOST
