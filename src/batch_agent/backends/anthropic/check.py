"""Finds what Anthropic's API would refuse in every request of a shape, before the first is sent. Pure.

Only rules known in advance are checked: those of an API version, or of a model by its name. The server checks the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from batch_agent.backends.anthropic.request import ModelRules, model_of, thinking_tokens
from batch_agent.backends.base import RequestShape
from batch_agent.errors import SpecError

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_DEFAULT = 1  # of temperature and top_p: models without sampling parameters may still accept the default


def check_shape(shape: RequestShape, *, takes_sampling: bool) -> None:
    """Raise SpecError for a shape that the API refuses. ``takes_sampling`` depends on the API version."""
    if shape.seed is not None:
        raise SpecError("seed: Anthropic's API has no seed; leave it out")
    sampling = {"temperature": shape.temperature, "top_p": shape.top_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    if not takes_sampling and (refused := [*given, *({"temperature", "top_p", "top_k"} & shape.extra_body.keys())]):
        raise SpecError(
            f"{refused[0]}: this version of Anthropic's API takes no sampling parameters; leave it out, or use "
            "anthropic://?version=2023-06-01 with a model that takes them"
        )
    model = model_of(shape.model)
    if not model.foreign:
        _check_texts(shape)
        _check_sampling(shape, model, given)
        _check_thinking(shape)


def _check_texts(shape: RequestShape) -> None:
    if any(not text.strip() for text in shape.stop):
        raise SpecError("stop: Anthropic's API accepts no stop sequence of only spaces or line breaks")
    for tool in shape.tools:
        if not _TOOL_NAME.fullmatch(tool.name):
            raise SpecError(
                f"the tool name {tool.name!r} is invalid for Anthropic's API: use at most 128 letters, digits, _ and -"
            )


def _check_sampling(shape: RequestShape, model: ModelRules, given: Mapping[str, float]) -> None:
    changed = [name for name, value in given.items() if value != _DEFAULT]
    if changed and not model.samples:
        raise SpecError(f"{changed[0]}: {shape.model} takes no sampling parameters; leave it out")
    if len(given) == 2 and model.samples_once:
        raise SpecError(f"top_p: {shape.model} takes temperature or top_p, not both; leave one out")
    if shape.temperature is not None and shape.temperature > 1:
        raise SpecError(f"temperature is {shape.temperature:g}: Anthropic's API takes 0 to 1")


def _check_thinking(shape: RequestShape) -> None:
    """Check the options of thinking with a limit in tokens (older models). Newer models choose the amount."""
    limit = thinking_tokens(shape)
    if not limit:
        return
    if shape.max_tokens is not None and shape.max_tokens <= limit:
        raise SpecError(
            f"max_tokens is {shape.max_tokens:,}, and thinking may take {limit:,} of them: give more than that"
        )
    if shape.temperature not in (None, _DEFAULT):
        raise SpecError("temperature: Anthropic's models think at temperature 1 only; leave it out")
    choice = shape.tool_choice.get("type") if isinstance(shape.tool_choice, dict) else shape.tool_choice
    if shape.tools and choice not in (None, "auto", "none"):
        raise SpecError("tool_choice: Anthropic's models cannot combine thinking with a forced tool call; use auto")
