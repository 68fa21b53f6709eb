"""Probes: predict semantic entropy from hidden states, by ridge regression. The intercept is free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.swarm.uq.semantic_entropy import Matrix


def train_probe(hidden_states: ArrayLike, target_entropy: ArrayLike, ridge_alpha: float = 1.0) -> tuple[Matrix, float]:
    """Return the weight of each feature, and the intercept. Each target has one row of hidden states."""
    states = np.asarray(hidden_states, dtype=np.float64)
    targets = np.asarray(target_entropy, dtype=np.float64).ravel()
    if states.ndim != 2 or len(states) != len(targets) or not len(targets):
        raise SpecError(f"hidden_states have the shape {states.shape} for {len(targets)} targets: give a row for each")
    middle, level = states.mean(axis=0), float(targets.mean())
    centred = states - middle
    shrunk = centred.T @ centred + ridge_alpha * np.eye(states.shape[1])
    weights = np.linalg.lstsq(shrunk, centred.T @ (targets - level), rcond=None)[0]
    return weights, level - float(middle @ weights)


def predict_semantic_entropy(hidden_states: ArrayLike, coef: ArrayLike, intercept: float) -> Matrix:
    """Return one number for each row; a single row may be given by itself."""
    states = np.atleast_2d(np.asarray(hidden_states, dtype=np.float64))
    return np.asarray(states @ np.asarray(coef, dtype=np.float64) + intercept)


def save_probe(
    path: str | Path, coef: ArrayLike, intercept: float, metadata: Mapping[str, JsonValue] | None = None
) -> None:
    """Write ``path`` (.npz), and the metadata beside it (.npz.json)."""
    arrays, words = _files(path)
    arrays.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arrays, coef=np.asarray(coef), intercept=np.asarray(intercept))
    if metadata is not None:
        words.write_text(json.dumps(dict(metadata), indent=2), encoding="utf-8")
    else:
        words.unlink(missing_ok=True)  # from another probe


def load_probe(path: str | Path) -> tuple[Matrix, float, JsonObject | None]:
    arrays, words = _files(path)
    with np.load(arrays) as saved:
        coef = np.asarray(saved["coef"], dtype=np.float64)
        intercept = float(saved["intercept"])
    return coef, intercept, json.loads(words.read_text(encoding="utf-8")) if words.exists() else None


def _files(path: str | Path) -> tuple[Path, Path]:
    arrays = Path(path)
    if arrays.suffix != ".npz":
        arrays = arrays.with_name(arrays.name + ".npz")
    return arrays, arrays.with_name(arrays.name + ".json")
