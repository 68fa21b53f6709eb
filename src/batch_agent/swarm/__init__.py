"""Pools of agents over many servers in a hostfile, and patterns in which they work together.

It offers the API of programs written for ``aurora_swarm``, on this package's own connections and engine.
"""

from __future__ import annotations

from batch_agent.swarm.embedding_pool import EmbeddingPool, EmbeddingResponse
from batch_agent.swarm.hostfile import AgentEndpoint, parse_hostfile
from batch_agent.swarm.pool import AgentPool, Response
from batch_agent.swarm.vllm_pool import VLLMPool

__all__ = ["AgentEndpoint", "AgentPool", "EmbeddingPool", "EmbeddingResponse", "Response", "VLLMPool", "parse_hostfile"]
