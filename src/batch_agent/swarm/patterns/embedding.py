"""Embeds texts over all agents of a pool."""

from __future__ import annotations

from collections.abc import Sequence

from batch_agent.swarm.embedding_pool import EmbeddingPool, EmbeddingResponse


async def scatter_gather_embeddings(
    embed_pool: EmbeddingPool, texts: Sequence[str], batch_size: int = 1
) -> list[EmbeddingResponse]:
    """Return the embeddings in the order of the texts. Text i goes to agent i mod size."""
    return await embed_pool.embed_all(texts, batch_size)
