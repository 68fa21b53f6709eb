"""Kernel language entropy: semantic entropy without clusters, from the similarity of all pairs of answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from batch_agent.errors import SpecError
from batch_agent.swarm.uq.semantic_entropy import Matrix, cosines, rows


def kernel_matrix(embeddings: ArrayLike, kernel: str = "cosine", *, gamma: float | None = None) -> Matrix:
    """Return the kernel matrix: ``cosine``, or ``rbf`` with ``gamma`` (default: 1 / dimensions)."""
    matrix = rows(embeddings)
    if kernel == "cosine":
        if gamma is not None:
            raise SpecError("gamma is for the kernel rbf; cosine has none")
        return cosines(matrix)
    if kernel != "rbf":
        raise SpecError(f"there is no kernel {kernel!r}: use cosine or rbf")
    squares = np.sum(matrix**2, axis=1)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * matrix @ matrix.T, 0.0)
    np.fill_diagonal(distances, 0.0)
    return np.asarray(np.exp(-(1.0 / matrix.shape[1] if gamma is None else gamma) * distances))


def density_matrix_from_kernel(K: ArrayLike) -> Matrix:  # noqa: N803
    """Return the kernel scaled to trace 1."""
    kernel = np.asarray(K, dtype=np.float64)
    trace = float(np.trace(kernel))
    if trace <= 0.0:
        raise SpecError("the kernel's trace is not above 0: are all embeddings zero?")
    return kernel / trace


def von_neumann_entropy(rho: ArrayLike, eps: float = 1e-10) -> float:
    """Return the entropy in nats. Eigenvalues up to ``eps`` count as 0."""
    values = np.linalg.eigvalsh(np.asarray(rho, dtype=np.float64))
    values = values[values > eps]
    values = values / np.sum(values)
    return float(abs(np.sum(values * np.log(values))))


def kernel_language_entropy(embeddings: ArrayLike, kernel: str = "cosine", **kernel_kwargs: float) -> float:
    """Return the entropy in nats; 0 for fewer than two answers."""
    matrix = rows(embeddings)
    if len(matrix) < 2:
        return 0.0
    return von_neumann_entropy(density_matrix_from_kernel(kernel_matrix(matrix, kernel, **kernel_kwargs)))
