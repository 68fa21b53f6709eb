"""``backend_config``: a model and how to draw from it, as simulations write it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_agent.backends.address import check_known
from batch_agent.errors import SpecError
from batch_agent.ticks.asking import Sampling

URL_KEYS = ("backend", "base_url", "api_base", "url")
MODEL_KEYS = ("model", "model_name")
SAMPLING_KEYS = ("temperature", "max_tokens", "top_p", "seed")
OTHER_KEYS = ("model_path", "api_key", "top_k", "n_gpu_layers", "timeout")
KNOWN = (*URL_KEYS, *MODEL_KEYS, *SAMPLING_KEYS, *OTHER_KEYS)


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a TickRuntime that it means. Keys that nobody reads are a SpecError."""
    if not isinstance(config, Mapping):
        raise SpecError(f"backend_config is a {type(config).__name__}; it is a mapping with some of {', '.join(KNOWN)}")
    given = {key: value for key, value in config.items() if value is not None}
    check_known(map(str, given), KNOWN, "backend_config has no key")
    if given.get("n_gpu_layers"):
        raise SpecError("backend_config: the embedded engine has no n_gpu_layers; for a GPU give the URL of a server")
    backend, model = _one_of(given, URL_KEYS), _one_of(given, MODEL_KEYS)
    path = given.get("model_path")
    if path is not None and backend is None:
        backend = f"local://{path}"
    elif path is not None:  # servers call a model by the path they loaded it from
        model = str(path) if model is None else model
    drawn = {name: given[name] for name in SAMPLING_KEYS if name in given}
    extra = {"top_k": given["top_k"]} if "top_k" in given else {}
    options = {"backend": backend, "model": model, "sampling": Sampling(**drawn, extra_body=extra)}
    return options | {name: given[name] for name in ("api_key", "timeout") if name in given}


def _one_of(given: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    found = [key for key in keys if key in given]
    if len(found) > 1:
        raise SpecError(f"backend_config has {' and '.join(found)}, which say the same: give one of them")
    return given[found[0]] if found else None
