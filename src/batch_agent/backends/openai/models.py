"""What OpenAI's models accept, by name: which API, and which options they refuse."""

from __future__ import annotations

import re

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import mapping
from batch_agent.errors import SpecError

# Served only at /v1/responses.
_RESPONSES_ONLY = re.compile(r"^o\d+-pro|^gpt-[\w.]+-pro|codex|deep-research|^computer-use")
_REASONING = re.compile(r"^(o\d|gpt-[5-9](?!\d)|codex|computer-use)")
_CHATTING = re.compile(r"-chat(-|$)")
# From 5.1 on, reasoning can be switched off; then these options are accepted.
_MAY_NOT_REASON = re.compile(r"^gpt-(5\.[1-9]|[6-9](?!\d))")


def needs_responses(model: str) -> bool:
    return _RESPONSES_ONLY.search(_bare(model)) is not None


def reasons(model: str) -> bool:
    name = _bare(model)
    return _REASONING.match(name) is not None and _CHATTING.search(name) is None


def check_options(shape: RequestShape) -> None:
    """Raise SpecError for options that the model refuses: every row would get a 400. They are not dropped silently,
    because a user who sets temperature 0 relies on it."""
    if not reasons(shape.model):
        return
    may = _MAY_NOT_REASON.match(_bare(shape.model)) is not None
    effort = mapping(shape.extra_body.get("reasoning")).get("effort")
    if may and "none" in (shape.extra_body.get("reasoning_effort"), effort):
        return
    given = {"temperature": shape.temperature, "top_p": shape.top_p, "stop": shape.stop or None}
    refused = [name for name, value in given.items() if value is not None]
    if refused:
        it = "it" if len(refused) == 1 else "them"
        way = ', or give extra_body={"reasoning_effort": "none"}' if may else ""
        raise SpecError(
            f"{shape.model} is a reasoning model and takes no {' and no '.join(refused)}: leave {it} out{way}"
        )


def _bare(model: str) -> str:
    """Return the name without the prefix and suffix of a fine-tuned model, ``ft:gpt-…:org``."""
    return model.lower().removeprefix("ft:")
