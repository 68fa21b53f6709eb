"""Votes of the samples of a row: which value wins, how many samples must be asked, and when none is needed any more.

A sample has a number, from 0. Its outcome is its answer as plain JSON, FAILED, or PENDING while it is asked. A field is
decided by the first samples if no outcome of those left changes its winner. So a vote that stops early has the winner,
and the number of samples against it, of the vote that does not. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Final, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.trust.gold import OUTPUT, GoldField, class_name, field_of, fields_in, normalised, steps_of

MAJORITY, MEDIAN = "majority", "median"
SHORT_TEXT = 64  # characters; a field of longer texts is voted only if it is named
DEEPEST = 8  # fields inside fields
_CLASSES = ("class", "boolean", "integer")

Function: TypeAlias = Callable[[list[JsonValue]], object]


class NoVote(Enum):
    """The outcome of a sample that failed, or whose answer is not known yet."""

    FAILED = "failed"
    PENDING = "pending"


FAILED: Final = NoVote.FAILED
PENDING: Final = NoVote.PENDING
Outcome: TypeAlias = JsonValue | NoVote  # the answer of a sample as plain JSON


class VoteError(Exception):
    """The user's function raised this error, or returned a value that the field cannot have."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one field is voted. ``how`` is "majority", "median" or the user's function, which gets the values in the
    order of the samples."""

    field: GoldField
    how: str | Function

    def values(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        return [each if isinstance(each, NoVote) else self.field.take(each) for each in outcomes]

    def key(self, value: JsonValue) -> str:
        """Return a key that is equal for equal values. Texts are equal if they differ only in case, spaces or Unicode
        form (NFKC)."""
        if self.field.kind == "text" and isinstance(value, str):
            return normalised(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return class_name(value) if isinstance(value, str) else f"\0{class_name(value)}"

    def needed(self, values: Sequence[Outcome], samples: int) -> int:
        """Return how many samples must be asked: the smallest number that can decide the field, and at least as many as
        were asked already."""
        return next(number for number in range(len(values), samples + 1) if self._may_decide(values, number, samples))

    def _may_decide(self, values: Sequence[Outcome], number: int, samples: int) -> bool:
        """Return whether the first ``number`` samples decide the field if those that are pending agree."""
        if number == samples:
            return True
        if callable(self.how):
            return False
        every = [*values, *[PENDING] * (number - len(values))]
        wishes = {self.key(value): value for value in known(values)}
        wishes = wishes or {"": 0 if self.how == MEDIAN else ""}
        return any(
            self.is_decided([wish if value is PENDING else value for value in every], samples)
            for wish in (wishes.values() if PENDING in every else [None])
        )

    def is_decided(self, values: Sequence[Outcome], samples: int) -> bool:
        """Return whether these outcomes of the first samples decide the field: at least half of all samples have an
        answer, and no outcome of the remaining ones can change the winner."""
        left = samples - len(values)
        if not left:
            return True
        if callable(self.how) or 2 * len(known(values)) < samples:
            return False
        if self.how == MEDIAN:
            return self._is_median_decided(values, left)
        ranked = self._ranked(values)
        if not ranked or ranked[0][0] < left:  # a value that no sample has yet may win
            return False
        most, first, _ = ranked[0]
        return all(count + left < most or (count + left == most and first < at) for count, at, _ in ranked[1:])

    def _ranked(self, values: Sequence[Outcome]) -> list[tuple[int, int, JsonValue]]:
        """Return each value with its count and its first sample, the winner first. In a tie the value with the earlier
        first sample wins."""
        first: dict[str, tuple[int, JsonValue]] = {}
        counts: Counter[str] = Counter()
        for place, value in enumerate(values):
            if not isinstance(value, NoVote):
                key = self.key(value)
                counts[key] += 1
                first.setdefault(key, (place, value))
        return sorted(((count, *first[key]) for key, count in counts.items()), key=lambda each: (-each[0], each[1]))

    def _is_median_decided(self, values: Sequence[Outcome], left: int) -> bool:
        """Return whether the remaining samples cannot change the median. The outcomes that move it most are the lowest
        and the highest values, and failures."""
        medians = {
            _median([*values, *[-math.inf] * low, *[math.inf] * high])
            for low in range(left + 1)
            for high in range(left + 1 - low)
        }
        only = medians.pop() if len(medians) == 1 else None
        return only is not None and math.isfinite(only)

    def winner(self, values: Sequence[Outcome]) -> JsonValue:
        """Return the value that wins. Raises VoteError."""
        if callable(self.how):
            return self._of_function(self.how, known(values))
        if self.how == MEDIAN and (middle := _median(values)) is not None:
            return next(each for each in known(values) if _is_number(each) and each == middle)  # as it was written
        return self._ranked(values)[0][2]

    def _of_function(self, function: Function, values: list[JsonValue]) -> JsonValue:
        try:
            return cast(JsonValue, function(deepcopy(values)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise VoteError(f"the function of vote raised for {self.field.name}") from error


def known(values: Iterable[Outcome]) -> list[JsonValue]:
    """Return the values of the samples that have an answer."""
    return [value for value in values if not isinstance(value, NoVote)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _median(values: Iterable[Outcome]) -> float | None:
    """Return the number in the middle. Of two numbers in the middle, the one of the earlier sample. None if there is no
    number."""
    numbers = sorted((cast(float, value), place) for place, value in enumerate(values) if _is_number(value))
    if not numbers:
        return None
    pair = numbers[(len(numbers) - 1) // 2 : len(numbers) // 2 + 1]
    return min(pair, key=lambda each: each[1])[0]


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of a vote on one field. ``counts``: number of samples for each value. ``voters``: number of samples
    that decided the vote, in the order of their numbers. ``against``: number of these that differed from the winner."""

    winner: JsonValue
    counts: Mapping[str, int]
    against: int
    voters: int

    @property
    def doubt(self) -> float:
        return self.against / self.voters if self.voters else 0.0

    def shown(self) -> dict[str, object]:
        return {"counts": dict(self.counts), "against": self.against}


class Voting:
    """How the answers of ``samples`` samples become one answer. ``stops``: samples that are not needed are not asked.
    ``seed`` is the seed of the first sample. Without it, the seed of each sample is derived from its row, if the server
    takes a seed."""

    def __init__(
        self,
        samples: int,
        rules: Sequence[Rule],
        *,
        stops: bool = True,
        seed: int | None = None,
        takes_seed: bool = True,
    ) -> None:
        self.samples = samples
        self.rules = rules
        self.stops = stops
        self._seed, self._takes_seed = seed, takes_seed

    def seed_of(self, number: int, row: bytes) -> int | None:
        """Return the seed of a sample. ``row`` identifies its row."""
        if self._seed is not None:
            return self._seed + number
        if not self._takes_seed:
            return None
        return int.from_bytes(blake2b(b"%d " % number + row, digest_size=4).digest()) >> 1  # some servers take 31 bits

    def needed(self, outcomes: Sequence[Outcome]) -> int:
        """Return how many samples must be asked in all, with those that were asked. ``outcomes`` are the outcomes of
        these."""
        failed = sum(each is FAILED for each in outcomes)
        if self._too_few(self.samples - failed):
            return len(outcomes)
        if not self.stops:
            return self.samples
        return max(rule.needed(rule.values(outcomes), self.samples) for rule in self.rules)

    def _too_few(self, answers: int) -> bool:
        return 2 * answers < self.samples

    def has_failed(self, outcomes: Sequence[Outcome]) -> bool:
        """Return whether fewer than half of the samples have an answer."""
        return self._too_few(len(known(outcomes)))

    def must_fail(self, failed: int) -> bool:
        """Return whether a row with this number of failed samples fails whatever the other samples answer."""
        return self._too_few(self.samples - failed)

    def votes(self, outcomes: Sequence[Outcome]) -> dict[str, Vote]:
        """Return the vote on each field. Raises VoteError."""
        return {rule.field.name: self._vote(rule, outcomes) for rule in self.rules}

    def _vote(self, rule: Rule, outcomes: Sequence[Outcome]) -> Vote:
        values = rule.values(outcomes)
        number = next(
            number
            for number in range(len(values) + 1)
            if rule.is_decided(values[:number], self.samples) or number == len(values)
        )
        winner = rule.winner(values)
        names: dict[str, str] = {}  # of each value, as the first sample wrote it
        counts = Counter(names.setdefault(rule.key(value), class_name(value)) for value in known(values))
        voters, key = known(values[:number]), rule.key(winner)
        return Vote(winner, counts, sum(rule.key(value) != key for value in voters), len(voters))

    def first_with(self, name: str, winner: JsonValue, outcomes: Sequence[Outcome]) -> int | None:
        """Return the number of the first sample with the winner of a field; None if a function made the winner."""
        rule = next(rule for rule in self.rules if rule.field.name == name)
        values, key = rule.values(outcomes), rule.key(winner)
        return next(
            (place for place, value in enumerate(values) if not isinstance(value, NoVote) and rule.key(value) == key),
            None,
        )

    def combined(self, outcomes: Sequence[Outcome], votes: Mapping[str, Vote]) -> tuple[int, JsonValue]:
        """Return the number of the sample that agrees with most winners, the earliest of several, and its answer with
        the winner in each voted field."""
        best, place = -1, 0
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, NoVote):
                continue
            agrees = sum(
                rule.key(rule.field.take(outcome)) == rule.key(votes[rule.field.name].winner) for rule in self.rules
            )
            if agrees > best:
                best, place = agrees, number
        answer = deepcopy(cast(JsonValue, outcomes[place]))
        for name, vote in votes.items():
            answer = _with(answer, name, vote.winner)
        return place, answer


def _with(answer: JsonValue, name: str, value: JsonValue) -> JsonValue:
    """Return the answer with this value in a field."""
    if name == OUTPUT and not (isinstance(answer, dict) and OUTPUT in answer):
        return value
    inside = answer
    *before, last = [name] if isinstance(answer, dict) and name in answer else steps_of(name)
    for step in before:
        inside = inside.get(step) if isinstance(inside, dict) else None
    if isinstance(inside, dict):
        if value is None and last not in inside:
            return answer  # an optional field that most samples left out
        inside[last] = value
    return answer


# Which fields are voted


def rules_of(
    vote: str | Function | Mapping[str, str | Function] | None,
    schema: JsonObject | None,
    load: Callable[[str], Function],
) -> list[Rule]:
    """Return how each field is voted. ``vote`` is the option; ``load`` imports a function. Raises SpecError. If the
    option is not a mapping, classes, booleans, integers and short texts are voted; with "median" also all other
    numbers. Fields without a vote get the value of the sample that agrees with most winners."""
    if isinstance(vote, Mapping):
        if not vote:
            raise SpecError("vote names no field")
        return [_rule(_named(schema, name), how, load) for name, how in vote.items()]
    how = vote or MAJORITY
    if how not in (MAJORITY, MEDIAN):
        function = _rule(GoldField(OUTPUT, "json"), how, load).how
        return [Rule(field, function) for field in leaves(schema)]
    fields = [*leaves(schema)]
    chosen = [
        Rule(field, _usual(field, how)) for field in fields if _is_short(field) or (how == MEDIAN and field.is_number)
    ]
    if how == MEDIAN and not any(rule.how == MEDIAN for rule in chosen):
        raise SpecError('vote="median": no field of an answer is a number; give "majority"')
    chosen = chosen or [Rule(field, MAJORITY) for field in fields if field.kind == "text"]
    if not chosen:
        raise SpecError(
            "vote: an answer has no field with classes, booleans, integers or texts; say how its fields are voted, "
            'such as vote={"price": "median"}'
        )
    return chosen


def _usual(field: GoldField, how: str) -> str:
    return MEDIAN if how == MEDIAN and field.is_number else MAJORITY


def _is_short(field: GoldField) -> bool:
    longest = field.schema.get("maxLength")
    return field.kind in _CLASSES or (field.kind == "text" and isinstance(longest, int) and longest <= SHORT_TEXT)


def _named(schema: JsonObject | None, name: str) -> GoldField:
    try:
        return field_of(schema, name)
    except SpecError as error:
        raise SpecError(str(error).replace("gold", "vote")) from None


def _rule(field: GoldField, how: str | Function, load: Callable[[str], Function]) -> Rule:
    if callable(how):
        return Rule(field, how)
    if how == MEDIAN and not field.is_number:
        raise SpecError(f"vote: {field.name} is no number, so it has no median")
    if how in (MAJORITY, MEDIAN):
        return Rule(field, how)
    if ":" not in how:
        raise SpecError(f'vote: {how!r} is not "majority", "median" or a function as "module:function"')
    return Rule(field, load(how))


def leaves(schema: JsonObject | None, above: str = "", depth: int = 0) -> Iterator[GoldField]:
    """Yield the fields of an answer that are no objects. An answer without fields counts as one field, ``output``."""
    names = fields_in(schema)
    if not names and not depth:
        yield field_of(schema, OUTPUT)
    for name in names:
        field = field_of(schema, name)
        inner = field.schema
        if field.kind == "json" and depth < DEEPEST and fields_in(inner):
            yield from leaves(inner, f"{above}{name}.", depth + 1)
        elif not above:
            yield field
        else:
            yield GoldField(f"{above}{name}", field.kind, field.allowed, field.nullable, schema=field.schema)
