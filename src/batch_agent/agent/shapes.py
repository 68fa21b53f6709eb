"""The kinds of request that a run sends, computed once from the spec and the backend's capabilities.

Tools and a schema are sent together only to a backend that supports both. Otherwise tool turns are unconstrained, and
an invalid answer is followed by a constrained turn without tools. If the backend allows it, that turn lists the tools
but forbids their use, so that the prompt keeps its prefix and the server's cache is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import JsonValue

from batch_agent.backends.base import Capabilities, RequestShape
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.messages import ToolSpec
from batch_agent.spec import BatchSpec

SAMPLING = 0.7  # temperature of samples, if none is set


@dataclass(frozen=True, slots=True)
class Shapes:
    first: RequestShape  # the first turn, to which a forced tool choice applies
    later: RequestShape  # every following turn
    repair: RequestShape  # after an invalid answer
    schema_in_prompt: bool  # the first answer may be unconstrained, so the prompt must describe the schema
    raised_from: int | None = None  # max_tokens of an earlier session, if it is higher now: cut answers are asked again

    @property
    def asked(self) -> tuple[RequestShape, RequestShape, RequestShape]:
        """The shapes under which answers are recorded. Tools that are listed but forbidden only serve the server's
        cache, and neither max_tokens nor logprobs changes a complete answer: none is part of the question."""
        repair = self.repair
        if repair is not self.later and repair.schema is not None:
            repair = replace(repair, tools=(), tool_choice=None)
        first, later, repair = (
            replace(each, max_tokens=None, logprobs=False) for each in (self.first, self.later, repair)
        )
        return first, later, repair


def build_shapes(
    spec: BatchSpec,
    model: str,
    tools: tuple[ToolSpec, ...],
    schema: OutputSchema[object] | None,
    capabilities: Capabilities,
) -> Shapes:
    _check_choice(spec, tools)
    temperature = SAMPLING if spec.samples > 1 and spec.temperature is None else spec.temperature
    stop = (spec.stop,) if isinstance(spec.stop, str) else tuple(spec.stop or ())
    native = schema is not None and capabilities.native_schema
    composed = native and (not tools or capabilities.schema_with_tools)
    free = RequestShape(
        model=model,
        max_tokens=spec.max_tokens,
        temperature=temperature,
        top_p=spec.top_p,
        seed=None if spec.samples > 1 else spec.seed,  # each sample has its own
        stop=stop,
        tools=tools,
        tool_choice=spec.tool_choice,
        extra_body=spec.extra_body,
        logprobs=spec.doubt and capabilities.logprobs,
    )
    constrained = free
    if native and schema is not None:
        constrained = replace(free, schema=schema.json_schema, schema_name=schema.name)
    first = constrained if composed else free
    # A forced call on every turn would never let the agent answer.
    later = replace(first, tool_choice="auto") if _is_forced(spec.tool_choice) else first
    if tools and capabilities.schema_beside_tools:
        tool_free = replace(constrained, tool_choice="none")
    else:
        tool_free = replace(constrained, tools=(), tool_choice=None)
    repair = tool_free if native and not composed else later
    told = not (composed and capabilities.schema_proven)
    return Shapes(first, later, repair, schema_in_prompt=schema is not None and told)


def _is_forced(choice: JsonValue) -> bool:
    """Return whether a tool choice forces a call. An object in a wire's own format has its kind in ``type``."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind not in (None, "auto", "none")


def _check_choice(spec: BatchSpec, tools: tuple[ToolSpec, ...]) -> None:
    choice = spec.tool_choice
    if choice is None or isinstance(choice, dict):
        return
    names = [tool.name for tool in tools]
    if choice not in ("auto", "none", "required", *names):
        known = f", or one of {', '.join(names)}" if names else ""
        raise SpecError(f"tool_choice: {choice!r} is not auto, none or required{known}")
    if not tools and choice != "none":
        raise SpecError(f"tool_choice is {choice!r}, but the batch has no tools")
