"""What passes from stage to stage: a row with its index, the id of the row it came from, and the fields it carries.

A row that failed or was left out is passed on as such, so that every stage knows of every index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batch_agent.compiler.fields import fields_of
from batch_agent.errors import InputError
from batch_agent.job import AgentError, AgentResult, Placed


@dataclass(frozen=True, slots=True)
class Item:
    """``name`` is the id of the row it came from, None if that has none. ``carried`` are fields of earlier rows."""

    index: int
    value: object = None
    error: AgentError | None = None
    left_out: bool = False
    name: str | None = None
    carried: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, result: AgentResult[Any], carry: Sequence[str] = ()) -> Item:
        """Return the output of a row with the fields that the row carries on."""
        name = None if result.job_id == str(result.index) else result.job_id
        carried = carried_by(result.input, carry)
        return cls(result.index, result.output, result.error, name=name, carried=carried)

    @property
    def job_id(self) -> str:
        return str(self.index) if self.name is None else self.name

    def placed(self) -> Placed:
        """Return the item as a row of agents: its value; with carried fields, a dict of those and its own fields."""
        value = self.value
        if self.carried and (value is None or _fields(value)):
            value = {**self.carried, **_fields(value)}
        return Placed(self.index, value, self.name)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.left_out


def carried_by(row: object, carry: Sequence[str]) -> dict[str, object]:
    """Return the fields that a row carries to later stages."""
    fields = _fields(row) if carry else {}
    return {name: fields[name] for name in carry if name in fields}


def _fields(value: object) -> Mapping[str, object]:
    try:
        return fields_of(value)
    except InputError:  # no row, such as a pair of a join; the next stage says so
        return {}


class Receiver(Protocol):
    """Where a stage puts its rows. A source or a function awaits ``room`` before it makes more; False means that no
    more are taken. ``close`` is called once, after the last; ``why`` is the reason why some are missing, or ""."""

    def put(self, item: Item) -> None: ...

    async def room(self) -> bool: ...

    def close(self, why: str) -> None: ...


class InOrder:
    """Accepts items in any order and returns them by index."""

    def __init__(self) -> None:
        self._waiting: dict[int, Item] = {}
        self._next = 0

    def add(self, item: Item) -> Iterator[Item]:
        self._waiting[item.index] = item
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1
