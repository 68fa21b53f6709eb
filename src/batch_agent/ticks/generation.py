"""The interface of backends that authors of simulations write: prompts in, texts out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from batch_agent.errors import WorkerFailed
from batch_agent.ticks.guard import guarded
from batch_agent.ticks.plain import text_of


@dataclass(slots=True)
class GenerationResult:
    """``finish_reason`` is stop, length or error. An error has no ``text``, and ``metadata["error"]`` says why."""

    text: str
    tokens_used: int = 0
    finish_reason: str = "stop"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Why there is no answer, or ""."""
        if self.finish_reason != "error":
            return ""
        why = self.metadata.get("error")
        return (self.text if why is None else text_of(why)) or "no reason was given"


@runtime_checkable
class GeneratesOne(Protocol):
    @property
    def generate(self) -> Callable[..., object]: ...


@runtime_checkable
class GeneratesMany(Protocol):
    @property
    def generate_batch(self) -> Callable[..., object]: ...


def result_of(value: object) -> GenerationResult:
    """Return what a backend returned: a GenerationResult or an object with its fields, a mapping, or text. Raises
    WorkerFailed if it is invalid."""
    if isinstance(value, str):
        return GenerationResult(value)
    text, tokens, reason, metadata = (
        _field(value, name) for name in ("text", "tokens_used", "finish_reason", "metadata")
    )
    if isinstance(reason, str):
        reason = str.__str__(reason)  # an enum may be text with another ``str``
    result = GenerationResult(
        text if isinstance(text, str) else "",
        tokens if isinstance(tokens, int) else 0,
        "stop" if reason is None else text_of(reason) or "stop",
        metadata if isinstance(metadata, dict) else {},
    )
    if not isinstance(text, str) and not result.error:
        raise WorkerFailed(f"the backend returned a {type(value).__name__} without text")
    return result


def _field(value: object, name: str) -> object:
    def read() -> object:
        return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)

    return guarded(f"the backend returned a {type(value).__name__} whose {name}", read)


def arguments_for(
    method: Callable[..., object], prompt: str, system: str, **options: object
) -> tuple[str, dict[str, object]]:
    """Return the prompt, and those options that the method has parameters for. The system prompt is among them as
    ``system_prompts``, a list of one, or as ``system_prompt``; if the method has neither, it is put before the
    prompt."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # a builtin without a signature
        parameters = {}.values()
    names = {one.name for one in parameters}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        names |= {"system_prompt", "temperature", "max_tokens"}
    taken = {name: value for name, value in options.items() if value is not None and name in names}
    if "system_prompts" in names:
        taken["system_prompts"] = [system]
    elif system and "system_prompt" in names:
        taken["system_prompt"] = system
    elif system:
        prompt = f"{system}\n\n{prompt}"
    return prompt, taken
