"""What passes from stage to stage: a row with its index.

A row that failed or was left out is passed on as such, so that every stage knows of every index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from batch_agent.job import AgentError, AgentResult


@dataclass(frozen=True, slots=True)
class Item:
    index: int
    value: object = None
    error: AgentError | None = None
    left_out: bool = False

    @classmethod
    def of(cls, result: AgentResult[Any]) -> Item:
        return cls(result.index, result.output, result.error)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.left_out


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
