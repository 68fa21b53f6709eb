"""Examples in a prompt: which rows of a table have the same content, so that they measure nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import JsonValue

from batch_agent.messages import JsonObject
from batch_agent.trust.gold import normalised


@dataclass(frozen=True, slots=True)
class ExampleRows:
    """The rows that are shown as examples in a prompt. ``fields`` are those that the task uses. ``keys`` are their
    values in the form in which they are compared: after NFKC, without case, with single spaces."""

    fields: tuple[str, ...]
    keys: frozenset[tuple[str, ...]]

    @classmethod
    def of(cls, fields: Iterable[str], rows: Iterable[Mapping[str, object]]) -> Self:
        names = tuple(sorted(fields))
        return cls(names, frozenset(_key(row, names) for row in rows))

    @classmethod
    def of_facts(cls, facts: JsonObject) -> Self | None:
        """Return the examples that a record describes; None if it has none."""
        known = facts.get("examples")
        if not isinstance(known, dict) or not isinstance(fields := known.get("fields"), list):
            return None
        pairs = known.get("rows")
        rows = [pair["input"] for pair in pairs if isinstance(pair, dict)] if isinstance(pairs, list) else []
        return cls.of(map(str, fields), (row if isinstance(row, dict) else {"input": row} for row in rows))

    def __contains__(self, fields: object) -> bool:
        """Return whether a row, given as its fields, has the content of an example."""
        return isinstance(fields, Mapping) and all(name in fields for name in self.fields) and self._has(fields)

    def _has(self, fields: Mapping[str, object]) -> bool:
        return bool(self.fields) and _key(fields, self.fields) in self.keys


def examples_filter(examples: Iterable[ExampleRows | None]) -> Callable[[Mapping[str, object]], bool]:
    """Return the function that says whether a row, given as its fields, is among the examples of one of the prompts."""
    known = [each for each in examples if each is not None]
    return lambda fields: any(fields in each for each in known)


def _key(row: Mapping[str, object], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(normalised(_text(row.get(name))) for name in names)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError):
        return str(value)


def shown(value: JsonValue) -> str:
    """Return an answer as the prompt shows it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
