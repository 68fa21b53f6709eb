"""Does a refusal concern one row, or all of them?

A wrong key concerns all. So does a path or a model that does not exist, unless the same server has given good answers.
Anything else (a forbidden topic, a bad image) may be the row's own: until a good answer or another row's refusal tells,
it is unclear. The same refusal of several rows with no good answer between them concerns all.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Literal

Verdict = Literal["row", "unclear", "all"]

WRONG_KEY = frozenset({401, 402, 429})  # the 429 of a spent quota; one that asks for patience is no refusal
WRONG_PLACE = frozenset({301, 302, 303, 307, 308, 404, 405})
FORBIDDEN = 403
SEVERAL = 3  # rows, where the status alone says that it may concern all
MANY = 20  # rows, where only the words are the same

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Refusals:
    __slots__ = ("_agents", "_answered", "_kind")

    def __init__(self) -> None:
        self._answered = False
        self._kind: tuple[int, str] | None = None  # of the refusals since the last good answer, while they are the same
        self._agents: set[Hashable] = set()

    def answered(self) -> None:
        self._answered = True
        if self._kind is not None:
            self._kind = None
            self._agents.clear()

    def is_unclear(self, agent: Hashable) -> bool:
        return agent in self._agents

    def refused(self, agent: Hashable, status: int | None, message: str) -> Verdict:
        if status is None:  # a filter that stopped an answer, not a refusal to answer
            return "row"
        if status in WRONG_KEY or (status in WRONG_PLACE and not self._answered):
            return "all"
        by_status = status in WRONG_PLACE or status == FORBIDDEN
        kind = (status, "" if by_status else _VARIABLE.sub("…", message))
        if kind != self._kind:
            self._kind = kind
            self._agents.clear()
        self._agents.add(agent)
        return "all" if len(self._agents) >= (SEVERAL if by_status else MANY) else "unclear"
