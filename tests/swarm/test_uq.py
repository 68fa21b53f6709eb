"""How sure a swarm is, from the embeddings of its answers."""

from __future__ import annotations

import subprocess
import sys
from math import log
from pathlib import Path

import numpy as np
import pytest

from batch_agent.errors import SpecError
from batch_agent.swarm import uq
from batch_agent.swarm.uq.kle import (
    density_matrix_from_kernel,
    kernel_language_entropy,
    kernel_matrix,
    von_neumann_entropy,
)
from batch_agent.swarm.uq.probes import load_probe, predict_semantic_entropy, save_probe, train_probe
from batch_agent.swarm.uq.semantic_entropy import cluster_embeddings, semantic_entropy

TWO = np.array([[1.0, 0.0], [1.0, 0.01], [0.0, 1.0], [0.01, 1.0]])


def test_the_names_are_at_hand() -> None:
    assert uq.semantic_entropy is semantic_entropy
    assert uq.kernel_language_entropy is kernel_language_entropy


def test_answers_that_are_alike_are_one() -> None:
    labels = cluster_embeddings(TWO)
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert labels.min() == 1
    assert semantic_entropy(TWO) == pytest.approx(log(2))
    assert semantic_entropy(np.ones((5, 3))) == 0.0
    assert semantic_entropy(np.eye(4)) == pytest.approx(log(4))
    assert semantic_entropy(TWO, similarity_threshold=-1.0) == 0.0
    assert semantic_entropy(TWO, 0.99, "single") == pytest.approx(log(2))


@pytest.mark.parametrize("embeddings", [np.zeros((0, 3)), np.ones((1, 3)), []])
def test_one_answer_is_sure(embeddings: object) -> None:
    assert semantic_entropy(embeddings) == 0.0  # type: ignore[arg-type]
    assert kernel_language_entropy(embeddings) == 0.0  # type: ignore[arg-type]
    assert len(cluster_embeddings(embeddings)) == len(embeddings)  # type: ignore[arg-type]


def test_two_that_are_exactly_as_alike_as_the_threshold_are_together() -> None:
    pair = np.array([[1.0, 0.0], [0.9, np.sqrt(1 - 0.81)]])
    assert cluster_embeddings(pair, 0.9).tolist() == [1, 1]


def test_kernels() -> None:
    assert kernel_matrix(TWO[[0, 2]]) == pytest.approx(np.eye(2))
    assert kernel_matrix(TWO[[0, 2]], "rbf") == pytest.approx(np.array([[1, np.exp(-1)], [np.exp(-1), 1]]))
    assert kernel_matrix(TWO[[0, 2]], kernel="rbf", gamma=2.0)[0, 1] == pytest.approx(np.exp(-4))
    assert np.trace(density_matrix_from_kernel(kernel_matrix(TWO))) == pytest.approx(1.0)
    with pytest.raises(SpecError, match="there is no kernel 'linear'"):
        kernel_matrix(TWO, "linear")
    with pytest.raises(SpecError, match="gamma is for the kernel rbf"):
        kernel_language_entropy(TWO, gamma=1.0)


def test_the_entropy_of_a_density() -> None:
    assert von_neumann_entropy(np.diag([0.5, 0.5])) == pytest.approx(log(2))
    assert von_neumann_entropy(np.diag([1.0, 0.0])) == 0.0
    assert kernel_language_entropy(np.eye(3)) == pytest.approx(log(3))
    assert kernel_language_entropy(np.ones((3, 2))) == pytest.approx(0.0, abs=1e-9)
    assert kernel_language_entropy(np.eye(3), kernel="rbf", gamma=0.1) < log(3)


def test_a_probe_learns_a_line_and_shrinks_only_its_weights() -> None:
    chance = np.random.default_rng(5)
    states = chance.normal(size=(200, 3))
    targets = states @ [1.0, -2.0, 0.5] + 7.0
    coef, intercept = train_probe(states, targets, ridge_alpha=1e-6)
    assert coef == pytest.approx([1.0, -2.0, 0.5], abs=1e-4)
    assert intercept == pytest.approx(7.0, abs=1e-4)
    assert predict_semantic_entropy(states, coef, intercept) == pytest.approx(targets, abs=1e-3)
    assert predict_semantic_entropy(states[0], coef, intercept).shape == (1,)
    flat, level = train_probe(states, targets, ridge_alpha=1e9)
    assert np.abs(flat).max() < 1e-3
    assert level == pytest.approx(targets.mean(), abs=1e-2)
    with pytest.raises(SpecError, match="give a row for each"):
        train_probe(states, targets[:5])


@pytest.mark.parametrize("name", ["probe.npz", "deep/probe"])
def test_a_probe_is_kept_with_its_metadata(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save_probe(path, np.array([1.0, 2.0]), 0.5, {"layer": 12})
    assert sorted(file.name for file in path.parent.iterdir()) == ["probe.npz", "probe.npz.json"]
    coef, intercept, metadata = load_probe(path)
    assert (coef.tolist(), intercept, metadata) == ([1.0, 2.0], 0.5, {"layer": 12})
    save_probe(path, [3.0], 0.0)
    assert load_probe(str(path))[2] is None


def test_what_cannot_be_embeddings_is_an_error() -> None:
    with pytest.raises(SpecError, match="one row for each answer"):
        semantic_entropy(np.ones(3))
    with pytest.raises(SpecError, match="leave out answers that failed"):
        semantic_entropy(np.array([[np.nan, 1.0], [1.0, 1.0]]))


MISSING = """
import sys
import batch_agent.swarm
print("numpy" in sys.modules)
for missing in ("numpy", "scipy"):
    sys.modules[missing] = None
    try:
        import batch_agent.swarm.uq
    except ImportError as error:
        print(error)
    del sys.modules[missing]
"""


def test_a_swarm_needs_no_numpy_and_its_absence_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    loaded, *said = done.stdout.splitlines()
    assert loaded == "False"
    assert ["needs the packages numpy and scipy" in line for line in said] == [True, True]
