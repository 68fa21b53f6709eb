"""The names that programs for swarms import, and where they import them from."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from batch_agent import swarm
from batch_agent.fleet import hostfile

PLACES = {
    "batch_agent.swarm": "AgentEndpoint AgentPool EmbeddingPool EmbeddingResponse Response VLLMPool parse_hostfile",
    "batch_agent.swarm.hostfile": "AgentEndpoint parse_hostfile",
    "batch_agent.swarm.pool": "Response AgentPool",
    "batch_agent.swarm.vllm_pool": "VLLMPool",
    "batch_agent.swarm.embedding_pool": "EmbeddingResponse EmbeddingPool",
    "batch_agent.swarm.aggregators": "majority_vote concat best_of top_k structured_merge statistics failure_report",
    "batch_agent.swarm.patterns.broadcast": "broadcast broadcast_and_reduce",
    "batch_agent.swarm.patterns.scatter_gather": "scatter_gather map_gather",
    "batch_agent.swarm.patterns.tree_reduce": "tree_reduce",
    "batch_agent.swarm.patterns.blackboard": "Blackboard",
    "batch_agent.swarm.patterns.pipeline": "Stage run_pipeline fan_out_fan_in",
    "batch_agent.swarm.patterns.embedding": "scatter_gather_embeddings",
    "batch_agent.swarm.uq.semantic_entropy": "semantic_entropy cluster_embeddings",
    "batch_agent.swarm.uq.kle": "kernel_matrix density_matrix_from_kernel von_neumann_entropy kernel_language_entropy",
    "batch_agent.swarm.uq.probes": "train_probe predict_semantic_entropy save_probe load_probe",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_name_is_where_programs_look_for_it(place: str) -> None:
    module = importlib.import_module(place)
    assert [name for name in PLACES[place].split() if not hasattr(module, name)] == []


def test_a_pattern_of_the_same_name_does_not_hide_its_module() -> None:
    from batch_agent.swarm.patterns import broadcast, scatter_gather, tree_reduce

    assert [broadcast.__name__, scatter_gather.__name__, tree_reduce.__name__] == [
        f"batch_agent.swarm.patterns.{name}" for name in ("broadcast", "scatter_gather", "tree_reduce")
    ]


def test_what_the_package_exports_is_pinned() -> None:
    assert swarm.__all__ == sorted(PLACES["batch_agent.swarm"].split())


def test_addresses_are_the_fleets(tmp_path: Path) -> None:
    assert swarm.AgentEndpoint is hostfile.AgentEndpoint
    (tmp_path / "hosts.txt").write_text("# nodes\nnode-1\t8001\trole=worker\tnode=a\n\nnode-2\n")
    first, second = swarm.parse_hostfile(tmp_path / "hosts.txt")
    assert (first.host, first.port, first.tags, first.url) == (
        *("node-1", 8001, {"role": "worker", "node": "a"}, "http://node-1:8001"),
    )
    assert (second.port, second.tags) == (8000, {})
