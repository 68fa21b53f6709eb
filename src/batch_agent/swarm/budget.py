"""Computes how many tokens an answer may have, from the server's context and the length of the prompt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from math import inf

from batch_agent.backends.openai.model_list import read_entries
from batch_agent.errors import SpecError, Timeout
from batch_agent.swarm.checks import above_zero
from batch_agent.swarm.lines import Line, Lines

DEFAULT_TOKENS = 512
DEFAULT_CONTEXT = 131_072  # tokens, of a server that does not report its context
DEFAULT_PER_SEQUENCE = 60.0
LEAST_TOKENS = 128
CHARACTERS_PER_TOKEN = 4
LONGEST_QUESTION = 10.0  # seconds
QUESTION_SHARE = 0.25  # part of a request's time limit that the request for the context may take


def from_environment(given: float | None, name: str, environ: Mapping[str, str] = os.environ) -> float | None:
    """Returns an argument, or the number of its ``AURORA_SWARM_…`` variable; None if neither is given."""
    variable = f"AURORA_SWARM_{name.upper()}"
    text = (environ.get(variable) or "").strip()
    if given is None and text:
        try:
            given = float(text)
        except ValueError:
            raise SpecError(f"{variable} is {text!r}: give it a number") from None
    if given is not None and above_zero(name, given, "a number") == inf:
        raise SpecError(f"{name} is {given:g}: give a finite number")
    return given


def whole_from_environment(given: int | None, name: str) -> int | None:
    """Return the same for an integer."""
    number = from_environment(given, name)
    if number is not None and number != int(number):
        raise SpecError(f"{name} is {number:g}: give a whole number")
    return None if number is None else int(number)


def answer_tokens(most: int, context: int, characters: int, buffer: int) -> int:
    """Returns the tokens that the context leaves beside the prompt, at most ``most``."""
    return min(most, max(LEAST_TOKENS, context - characters // CHARACTERS_PER_TOKEN - buffer))


async def context_of(line: Line, lines: Lines, model: str, limit: float) -> int:
    """Return the context of a server in tokens. Concurrent callers share one request, which is repeated after the
    server was unreachable. A server that does not report it, or not in time, is not asked again."""
    if isinstance(line.context, int):
        return line.context
    if line.context is None or line.context.get_loop() is not asyncio.get_running_loop():
        question = _ask(line, lines, model, min(limit * QUESTION_SHARE, LONGEST_QUESTION))
        line.context = asyncio.get_running_loop().create_task(question)
        line.context.add_done_callback(lambda task: _learn(line, task))
    found = await asyncio.shield(line.context)
    return DEFAULT_CONTEXT if found is None else found


async def _ask(line: Line, lines: Lines, model: str, limit: float) -> int | None:
    """Request the context. Returns None if the server was unreachable."""
    exchange = await lines.ask_once(line, "/v1/models", None, limit)
    if exchange.error is not None:
        silent = isinstance(exchange.error, Timeout) and not exchange.error.unreached
        return DEFAULT_CONTEXT if exchange.error.status is not None or silent else None
    entries = read_entries(exchange.body) or {}
    entry = entries.get(model) or (next(iter(entries.values())) if len(entries) == 1 else {})
    length = entry.get("max_model_len")
    return length if type(length) is int and length > 0 else DEFAULT_CONTEXT


def _learn(line: Line, task: asyncio.Task[int | None]) -> None:
    if line.context is task:
        line.context = None if task.cancelled() or task.exception() else task.result()
