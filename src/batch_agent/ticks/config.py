"""Sampling options, and ``backend_config``: a model and its options in one mapping, as simulations write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.backends.address import check_known
from batch_agent.errors import SpecError

URL_KEYS = ("backend", "base_url", "api_base", "url")
MODEL_KEYS = ("model", "model_name")
SAMPLING_KEYS = ("temperature", "max_tokens", "top_p", "seed")
OTHER_KEYS = ("model_path", "api_key", "top_k", "n_gpu_layers", "timeout")
KNOWN = (*URL_KEYS, *MODEL_KEYS, *SAMPLING_KEYS, *OTHER_KEYS)


@dataclass(frozen=True, slots=True)
class Sampling:
    """``seed`` is the base from which the seed of each request is derived. None: the server chooses."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = 512
    seed: int | None = 0
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_numbers("a number, 0 or more", lambda n: n >= 0, temperature=self.temperature, top_p=self.top_p)
        check_counts(max_tokens=self.max_tokens)
        check_numbers("a whole number", lambda n: isinstance(n, int), seed=self.seed)


def check_numbers(form: str, accepts: Callable[[float], bool], /, **options: object) -> None:
    """Raise SpecError unless each option is None or a number of this form."""
    for name, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and accepts(cast(float, value))):
            raise SpecError(f"{name} is {value!r}; it is {form}, or None")


def check_counts(**options: object) -> None:
    check_numbers("a whole number above 0", lambda n: isinstance(n, int) and n > 0, **options)


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a TickRuntime and of its Sampling that it stands for. An unknown key is a SpecError."""
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
    elif path is not None:  # servers name a model by the path they loaded it from
        model = str(path) if model is None else model
    options = {name: given[name] for name in (*SAMPLING_KEYS, "api_key", "timeout") if name in given}
    if "top_k" in given:
        options["extra_body"] = {"top_k": given["top_k"]}
    return options | {name: value for name, value in (("backend", backend), ("model", model)) if value is not None}


def _one_of(given: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    found = [key for key in keys if key in given]
    if len(found) > 1:
        raise SpecError(f"backend_config has {' and '.join(found)}, which mean the same: give one of them")
    return given[found[0]] if found else None
