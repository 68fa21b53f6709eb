"""Embeddings as rows of a matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batch_agent.errors import SpecError

Matrix = NDArray[np.float64]


def rows(embeddings: ArrayLike) -> Matrix:
    """Returns a matrix with one row for each answer."""
    matrix = np.asarray(embeddings, dtype=np.float64)
    if matrix.ndim != 2 and matrix.size:
        raise SpecError(f"embeddings have the shape {matrix.shape}: give one row for each answer")
    if not np.isfinite(matrix).all():
        raise SpecError("embeddings have values that are not numbers: leave out answers that failed")
    return matrix


def cosines(matrix: Matrix) -> Matrix:
    """Returns the cosine similarity of every two rows; 0 for a row of zeros."""
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    unit = matrix / np.where(lengths == 0.0, 1.0, lengths)
    return np.clip(unit @ unit.T, -1.0, 1.0)
