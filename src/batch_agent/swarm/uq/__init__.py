"""Measures the certainty of a swarm from embeddings of its answers. Needs the extra ``uq``."""

from __future__ import annotations

try:
    import numpy  # noqa: F401
    import scipy  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise
    needs = "batch_agent.swarm.uq needs the packages numpy and scipy; install them with: pip install numpy scipy"
    raise ModuleNotFoundError(needs, name=error.name) from None

from batch_agent.swarm.uq.kle import kernel_language_entropy
from batch_agent.swarm.uq.probes import load_probe, predict_semantic_entropy, save_probe, train_probe
from batch_agent.swarm.uq.semantic_entropy import semantic_entropy

__all__ = [
    "kernel_language_entropy",
    "load_probe",
    "predict_semantic_entropy",
    "save_probe",
    "semantic_entropy",
    "train_probe",
]
