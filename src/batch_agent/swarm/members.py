"""The servers of a pool, and sub-pools of them.

A sub-pool counts its servers from 0 and shares everything else with its pool: connections, the request limit, and what
is known about each server. Closing the pool closes them; leaving a sub-pool closes nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Self

from batch_agent.errors import Rejected, SpecError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.swarm.checks import above_zero, whole
from batch_agent.swarm.lines import Line, Lines


class Members:
    def __init__(self, endpoints: Sequence[AgentEndpoint | tuple[str, int]], lines: Lines, timeout: float) -> None:
        self._net = lines
        self._lines = [lines.line(_endpoint(given)) for given in endpoints]
        self.timeout = above_zero("timeout", timeout)
        self._owns = True  # False: a sub-pool

    @property
    def size(self) -> int:
        return len(self._lines)

    @property
    def concurrency(self) -> int:
        """Return the maximum of requests in flight of the whole tree of pools."""
        return self._net.limit

    @property
    def endpoints(self) -> list[AgentEndpoint]:
        return [line.endpoint for line in self._lines]

    def by_tag(self, key: str, value: str) -> Self:
        return self._part(line for line in self._lines if line.endpoint.tags.get(key) == value)

    def sample(self, n: int) -> Self:
        """Returns a pool of ``n`` agents chosen at random, or of all if there are fewer."""
        return self._part(random.sample(self._lines, min(max(whole("n", n, None), 0), self.size)))

    def select(self, indices: Sequence[int]) -> Self:
        for index in indices:
            if not -self.size <= whole("an index", index, None) < self.size:
                raise SpecError(f"there is no agent {index}: the pool has {self.size}, counted from 0")
        return self._part(self._lines[index] for index in indices)

    def slice(self, start: int, stop: int) -> Self:
        return self._part(self._lines[start:stop])

    def _part(self, lines: Iterable[Line]) -> Self:
        part = copy.copy(self)
        part._lines = list(lines)
        part._owns = False
        return part

    def url(self, agent_index: int) -> str:
        return self._lines[agent_index].endpoint.url

    def turn(self, index: int) -> int:
        """Return the agent whose turn it is; -1 if the pool is empty."""
        return index % self.size if self.size else -1

    def _missing(self, agent_index: int) -> Rejected | None:
        """Return the error for a missing agent; None if it exists."""
        if 0 <= whole("agent_index", agent_index, None) < self.size:
            return None
        if not self.size:
            return Rejected("the pool has no agents: is the hostfile empty, or does no endpoint have that tag?")
        return Rejected(f"there is no agent {agent_index}: the pool has {self.size}, counted from 0")

    async def close(self) -> None:
        if self._owns:
            await self._net.close()

    async def __aenter__(self) -> Self:
        await self._net.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def texts_of(given: Iterable[str], what: str = "prompts") -> list[str]:
    """Return the texts of a list or a table's column. Raises SpecError for a single text or other items."""
    if isinstance(given, str):
        raise SpecError(f"{what} is one text: give a list of them")
    found = list(given)
    for place, text in enumerate(found):
        if not isinstance(text, str):
            raise SpecError(f"{what}[{place}] is of type {type(text).__name__}: give texts")
    return found


def _endpoint(given: AgentEndpoint | tuple[str, int]) -> AgentEndpoint:
    try:
        host, port = (given.host, given.port) if isinstance(given, AgentEndpoint) else given
        if not host or not 0 < int(port) < 65536:
            raise ValueError("no host, or no port")
    except (TypeError, ValueError):
        raise SpecError(f"{given!r} is not an endpoint: give an AgentEndpoint, or (host, port)") from None
    return given if isinstance(given, AgentEndpoint) else AgentEndpoint(host, int(port))
