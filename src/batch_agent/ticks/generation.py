"""What a backend of a simulation's author returns, and what is called of one: prompts in, texts out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from batch_agent.errors import BadResponse

_FIELDS = ("text", "tokens_used", "finish_reason", "metadata")


@dataclass(slots=True)
class GenerationResult:
    """``finish_reason`` is stop, length or error; of an error, ``text`` is empty and ``metadata["error"]`` says why."""

    text: str
    tokens_used: int = 0
    finish_reason: str = "stop"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Why there is no answer; nothing where there is one."""
        if self.finish_reason != "error":
            return ""
        return str(self.metadata.get("error") or self.text or "no reason was given")


@runtime_checkable
class GeneratesOne(Protocol):
    @property
    def generate(self) -> Callable[..., object]: ...


@runtime_checkable
class GeneratesMany(Protocol):
    @property
    def generate_batch(self) -> Callable[..., object]: ...


def result_of(value: object) -> GenerationResult:
    """What a backend returned: a GenerationResult or something with its fields, a mapping, or text."""
    if isinstance(value, str):
        return GenerationResult(value)
    fields = value if isinstance(value, Mapping) else {name: getattr(value, name, None) for name in _FIELDS}
    text, tokens, metadata = fields.get("text"), fields.get("tokens_used"), fields.get("metadata")
    reason = str(fields.get("finish_reason") or "stop")
    if not isinstance(text, str) and reason != "error":
        raise BadResponse(f"the backend returned a {type(value).__name__} without text")
    return GenerationResult(
        text if isinstance(text, str) else "",
        tokens if isinstance(tokens, int) else 0,
        reason,
        dict(metadata) if isinstance(metadata, Mapping) else {},
    )


def arguments_for(
    method: Callable[..., object], prompt: str, system: str, **options: object
) -> tuple[str, dict[str, object]]:
    """The prompt, and of the options those that the method has parameters for. What it cannot be told by itself of the
    system prompt stands before the prompt."""
    names, open_ended = _parameters(method)
    wanted = {"system_prompt": system or None, **options}
    taken = {
        name: value
        for name, value in wanted.items()
        if value is not None and (name in names or (open_ended and name != "seed"))
    }
    if system and "system_prompt" not in taken:
        prompt = f"{system}\n\n{prompt}"
    return prompt, taken


def _parameters(method: Callable[..., object]) -> tuple[set[str], bool]:
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # a builtin, which does not say
        return set(), False
    return {one.name for one in parameters}, any(one.kind is one.VAR_KEYWORD for one in parameters)
