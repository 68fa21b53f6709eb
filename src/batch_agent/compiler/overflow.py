"""Parses what a server says when a request is too long: its context, and the tokens of the prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass

# OpenAI, vLLM and SGLang; llama.cpp; Anthropic.
_CONTEXT = re.compile(
    r"(?:maximum|max) context length (?:is|of) ([\d,]+)|model's context length \(?([\d,]+)"
    r"|available context size \(?([\d,]+)|n_ctx\D{1,8}([\d,]+)|\d (?:tokens )?> ([\d,]+)(?![\d,]| ?-)",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"([\d,]+) (?:input tokens|in the messages|in your prompt|tokens in the messages|prompt tokens)"
    r"|(?:input|prompt|messages)(?: is too long| resulted in| has| length)?:? \(?([\d,]+) tokens"
    r"|input_tokens\D{1,6}([\d,]+)|n_prompt_tokens\D{1,6}([\d,]+)"
    r"|exceed context limit: ([\d,]+) \+",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Stated:
    """Counts in tokens; None for what is not stated."""

    context: int | None = None
    prompt: int | None = None


def stated(message: str) -> Stated:
    return Stated(_number(_CONTEXT, message), _number(_PROMPT, message))


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    if found is None:
        return None
    digits = next(group for group in found.groups() if group is not None).replace(",", "")
    return int(digits) if digits and len(digits) < 10 else None
