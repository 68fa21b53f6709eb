"""Does a refusal concern one row, or all of them?

A wrong key concerns all. So does a path or a model that does not exist, unless the same server has given good answers.
Anything else (a forbidden topic, a bad image) may be the row's own: until a good answer to something that was asked no
earlier or other rows' refusals tell, it is unclear. The same refusal of several rows with no such answer between them
concerns all, unless many more are still on their way: a refusal often comes faster than an answer.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Literal

Verdict = Literal["row", "unclear", "all"]

WRONG_KEY = frozenset({401, 402, 429})  # the 429 of a spent quota; one that asks for patience is no refusal
WRONG_PLACE = frozenset({301, 302, 303, 307, 308, 404, 405})
FORBIDDEN = 403
SEVERAL = 10  # rows, where the status alone says that it may concern all; a moderator may refuse a few in a row
FEW = 3  # where there never was a good answer, and few others may yet get one
MANY = 20  # rows, where only the words are the same

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Refusals:
    __slots__ = ("_agents", "_answered", "_kind")

    def __init__(self) -> None:
        self._answered = False
        self._kind: tuple[int, str] | None = None  # of those that are unclear, which are all the same
        self._agents: dict[Hashable, float] = {}  # and when the request of each left

    def answered(self, sent_at: float) -> None:
        """A request that left then got a good answer."""
        self._answered = True
        if self._agents:
            self._agents = {agent: left for agent, left in self._agents.items() if left > sent_at}

    def is_unclear(self, agent: Hashable) -> bool:
        return agent in self._agents

    def refused(
        self, agent: Hashable, status: int | None, message: str, sent_at: float, left_in_flight: int
    ) -> Verdict:
        if status is None:  # a filter that stopped an answer, not a refusal to answer
            return "row"
        if status in WRONG_KEY or (status in WRONG_PLACE and not self._answered):
            return "all"
        by_status = status in WRONG_PLACE or status == FORBIDDEN
        kind = (status, "" if by_status else _VARIABLE.sub("…", message))
        if kind != self._kind:
            self._kind = kind
            self._agents.clear()
        self._agents[agent] = sent_at
        refused = len(self._agents)
        if by_status and not self._answered and refused >= FEW and left_in_flight <= refused:
            return "all"
        return "all" if refused >= (SEVERAL if by_status else MANY) and left_in_flight <= 2 * refused else "unclear"
