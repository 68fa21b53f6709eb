"""Semantic entropy: the entropy of the clusters of answers that mean the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batch_agent.errors import SpecError

ROUNDING = 1e-12  # two answers whose similarity is exactly the threshold are in one cluster

Matrix = NDArray[np.float64]


def cluster_embeddings(
    embeddings: ArrayLike, similarity_threshold: float = 0.9, method: str = "average"
) -> NDArray[np.int64]:
    """Return the cluster of each row, from 1. ``method`` is the linkage of hierarchical clustering."""
    from scipy.cluster.hierarchy import fcluster, linkage  # they take half a second to import
    from scipy.spatial.distance import squareform

    matrix = rows(embeddings)
    if len(matrix) < 2:
        return np.ones(len(matrix), dtype=np.int64)
    distances = 1.0 - cosines(matrix)
    np.fill_diagonal(distances, 0.0)
    tree = linkage(squareform(distances, checks=False), method=method)
    labels = fcluster(tree, 1.0 - similarity_threshold + ROUNDING, criterion="distance")
    return np.asarray(labels, dtype=np.int64)


def semantic_entropy(
    embeddings: ArrayLike, similarity_threshold: float = 0.9, linkage_method: str = "average"
) -> float:
    """Return the entropy in nats; 0 for fewer than two answers."""
    labels = cluster_embeddings(embeddings, similarity_threshold, linkage_method)
    if len(labels) < 2:
        return 0.0
    _, counts = np.unique(labels, return_counts=True)
    shares = counts / len(labels)
    return float(abs(np.sum(shares * np.log(shares))))  # not -0.0 for one cluster


def rows(embeddings: ArrayLike) -> Matrix:
    """Return a matrix with one row for each answer."""
    matrix = np.asarray(embeddings, dtype=np.float64)
    if matrix.ndim != 2 and matrix.size:
        raise SpecError(f"embeddings have the shape {matrix.shape}: give one row for each answer")
    if not np.isfinite(matrix).all():
        raise SpecError("embeddings have values that are not numbers: leave out answers that failed")
    return matrix


def cosines(matrix: Matrix) -> Matrix:
    """Return the cosine similarity of every two rows; 0 for a row of zeros."""
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    unit = matrix / np.where(lengths == 0.0, 1.0, lengths)
    return np.clip(unit @ unit.T, -1.0, 1.0)
