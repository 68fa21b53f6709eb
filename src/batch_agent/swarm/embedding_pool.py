"""EmbeddingPool: texts to vectors over many servers that answer ``/v1/embeddings``."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from batch_agent.errors import BackendError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.messages import JsonObject
from batch_agent.swarm.answers import Item, halves, indexed, read_object
from batch_agent.swarm.options import texts_of, whole
from batch_agent.swarm.servers import Exchange, Members, Servers

CONNECTIONS = 1024


@dataclass
class EmbeddingResponse:
    success: bool
    embedding: list[float] | None
    error: str | None = None
    agent_index: int = -1


class EmbeddingPool(Members):
    def __init__(
        self,
        endpoints: Sequence[AgentEndpoint | tuple[str, int]],
        model: str,
        concurrency: int = 512,
        timeout: float = 60.0,
        *,
        api_key: str | None = None,
    ) -> None:
        connections = max(whole("concurrency", concurrency), CONNECTIONS)
        super().__init__(endpoints, Servers(concurrency, connections, api_key), timeout)
        self._model = model

    async def embed_one(self, agent_index: int, text: str) -> EmbeddingResponse:
        found: dict[int, EmbeddingResponse] = {}
        await self._embed(agent_index, [(0, text)], found)
        return found[0]

    async def embed_all(self, texts: Sequence[str], batch_size: int = 1) -> list[EmbeddingResponse]:
        """Return the embeddings in the order of the texts. Text i goes to agent i mod size; ``batch_size`` texts of an
        agent are sent in one request."""
        batch_size, texts = whole("batch_size", batch_size), texts_of(texts, "texts")
        groups: defaultdict[int, list[Item]] = defaultdict(list)
        for index, text in enumerate(texts):
            groups[self.turn(index)].append((index, text))
        found: dict[int, EmbeddingResponse] = {}
        await asyncio.gather(
            *(
                self._embed(agent_index, items[first : first + batch_size], found)
                for agent_index, items in groups.items()
                for first in range(0, len(items), batch_size)
            )
        )
        return [found[index] for index in range(len(texts))]

    async def _embed(self, agent_index: int, items: Sequence[Item], found: dict[int, EmbeddingResponse]) -> None:
        """Embed a list. A refused list is split, so that a text that cannot be embedded fails alone."""
        if missing := self._missing(agent_index):
            found.update({index: _failed(missing, agent_index) for index, _ in items})
            return
        body: JsonObject = {"model": self._model, "input": [text for _, text in items]}
        exchange = await self._net.ask(self._servers[agent_index], "/v1/embeddings", body, self.timeout)
        if parts := halves(items, exchange.error):
            await asyncio.gather(*(self._embed(agent_index, part, found) for part in parts))
            return
        for (index, _), response in zip(items, _read(exchange, agent_index, len(items)), strict=True):
            found[index] = response


def _read(exchange: Exchange, agent_index: int, count: int) -> list[EmbeddingResponse]:
    try:
        entries = indexed(read_object(exchange).get("data"), "embeddings", exchange.faults)
    except BackendError as error:
        return [_failed(error, agent_index) for _ in range(count)]
    responses = []
    for place in range(count):
        vector = _vector(entries[place].get("embedding")) if place in entries else None
        if vector is None:
            missing = exchange.faults.bad("the answer has no embedding for this text")
            responses.append(_failed(missing, agent_index))
        else:
            responses.append(EmbeddingResponse(True, vector, None, agent_index))
    return responses


def _vector(value: JsonValue) -> list[float] | None:
    if not isinstance(value, list) or not value:
        return None
    numbers = [float(number) for number in value if isinstance(number, int | float)]
    return numbers if len(numbers) == len(value) else None


def _failed(error: BackendError, agent_index: int) -> EmbeddingResponse:
    return EmbeddingResponse(False, None, str(error) or error.type, agent_index)
