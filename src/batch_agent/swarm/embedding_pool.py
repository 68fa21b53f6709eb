"""EmbeddingPool: texts to vectors over many servers that answer ``/v1/embeddings``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from batch_agent.errors import BackendError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.messages import JsonObject
from batch_agent.swarm.options import texts_of, whole
from batch_agent.swarm.servers import Exchange, Item, Members, Servers

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
        found: dict[int, EmbeddingResponse] = {}
        await asyncio.gather(
            *(
                self._embed(agent_index, items[first : first + batch_size], found)
                for agent_index, items in self.turns(texts).items()
                for first in range(0, len(items), batch_size)
            )
        )
        return [found[index] for index in range(len(texts))]

    async def _embed(self, agent_index: int, items: Sequence[Item], found: dict[int, EmbeddingResponse]) -> None:
        if missing := self._missing(agent_index):
            found.update({index: _failed(missing, agent_index) for index, _ in items})
            return

        def write(texts: list[str]) -> JsonObject:
            return {"model": self._model, "input": list[JsonValue](texts)}

        async def take(items: Sequence[Item], exchange: Exchange) -> None:
            try:
                entries = exchange.listed("data")
            except BackendError as error:
                found.update({index: _failed(error, agent_index) for index, _ in items})
                return
            for place, (index, _) in enumerate(items):
                if vector := _vector(entries.get(place, {}).get("embedding")):
                    found[index] = EmbeddingResponse(True, vector, None, agent_index)
                else:
                    lacking = exchange.faults.bad("the answer has no embedding for this text")
                    found[index] = _failed(lacking, agent_index)

        await self._net.ask_list(self._servers[agent_index], "/v1/embeddings", items, write, self.timeout, take)


def _vector(value: JsonValue) -> list[float]:
    """Return the numbers of a list; nothing if other values are among them."""
    listed = value if isinstance(value, list) else []
    numbers = [float(number) for number in listed if isinstance(number, int | float)]
    return numbers if len(numbers) == len(listed) else []


def _failed(error: BackendError, agent_index: int) -> EmbeddingResponse:
    return EmbeddingResponse(False, None, str(error) or error.type, agent_index)
