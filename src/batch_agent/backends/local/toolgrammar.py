"""The grammar of one turn: the model calls one of the offered tools, or answers.

A call is written ``<tool_call>{"name": …, "arguments": …}</tool_call>``, so its first character distinguishes it from
an answer, and a model of any size writes valid arguments. One call per turn: a small model that may continue always
does.
"""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.backends.base import RequestShape
from batch_agent.backends.local.grammar import Grammar
from batch_agent.backends.local.terminals import json_text, quote
from batch_agent.backends.schema.visitor import Inexpressible
from batch_agent.errors import SpecError
from batch_agent.messages import ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FREE_TEXT = r"[^<] [\x00-\U0010FFFF]*"


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """The grammar of a turn. ``text`` is None if the model is unconstrained. ``unforced`` names what only validation
    checks. ``schema_unforced`` tells whether that includes the answer's schema."""

    text: str | None
    unforced: str = ""
    schema_unforced: bool = False


def compile_turn(shape: RequestShape, max_tokens: int) -> TurnGrammar:
    """Return the grammar for the tool calls and the answer that the shape allows."""
    offered, may_answer = _choice(shape)
    grammar = Grammar(max_tokens)
    unforced: list[str] = []
    options = [grammar.rule(_call(grammar, tool, unforced)) for tool in offered]
    answer, reason = _answer(grammar, shape)
    if reason:
        unforced.append(f"the answer's schema ({reason})")
    said = "; ".join(unforced)
    if may_answer and answer is None and not offered:
        return TurnGrammar(None, said, bool(reason))
    if may_answer:
        options.append(grammar.rule(answer or FREE_TEXT))
    grammar.root(" | ".join(options))
    return TurnGrammar(grammar.text(), said, bool(reason))


def _answer(grammar: Grammar, shape: RequestShape) -> tuple[str | None, str]:
    """Return the expression of the schema, or the reason why there is none."""
    if shape.schema is None:
        return None, ""
    try:
        return grammar.add(shape.schema), ""
    except Inexpressible as reason:
        return None, str(reason)


def _call(grammar: Grammar, tool: ToolSpec, unforced: list[str]) -> str:
    head = f'{OPEN}{{"name": {json_text(tool.name)}, "arguments": '
    try:
        arguments = grammar.add(tool.parameters)
    except Inexpressible as reason:
        unforced.append(f"the arguments of {tool.name} ({reason})")
        arguments = "mapping"
    return f"{quote(head)} {arguments} {quote('}' + CLOSE)}"


def _choice(shape: RequestShape) -> tuple[tuple[ToolSpec, ...], bool]:
    """Return the tools that may be called in this turn, and whether the model may answer instead."""
    choice = shape.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
    if choice == "none" or not shape.tools:
        return (), True
    if choice is None or choice == "auto":
        return shape.tools, True
    if choice in ("required", "any"):
        return shape.tools, False
    named = tuple(tool for tool in shape.tools if tool.name == choice)
    if not named:
        names = ", ".join(tool.name for tool in shape.tools)
        raise SpecError(f"tool_choice: {choice!r} is not auto, none, required or one of the tools: {names}")
    return named, False
