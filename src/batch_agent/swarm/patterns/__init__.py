"""The ways in which the agents of a pool work together."""

from __future__ import annotations

from batch_agent.swarm.patterns.blackboard import Blackboard
from batch_agent.swarm.patterns.broadcast import broadcast, broadcast_and_reduce
from batch_agent.swarm.patterns.embedding import scatter_gather_embeddings
from batch_agent.swarm.patterns.pipeline import Stage, fan_out_fan_in, run_pipeline
from batch_agent.swarm.patterns.scatter_gather import map_gather, scatter_gather
from batch_agent.swarm.patterns.tree_reduce import tree_reduce

__all__ = [
    "Blackboard",
    "Stage",
    "broadcast",
    "broadcast_and_reduce",
    "fan_out_fan_in",
    "map_gather",
    "run_pipeline",
    "scatter_gather",
    "scatter_gather_embeddings",
    "tree_reduce",
]
