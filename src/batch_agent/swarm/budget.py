"""How many tokens an answer may have: by the context of the server that is asked and the prompt it is for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from batch_agent.errors import BackendError, SpecError, Timeout
from batch_agent.swarm.answers import read_object
from batch_agent.swarm.lines import Line, Lines

DEFAULT_TOKENS = 512
DEFAULT_CONTEXT = 131_072  # tokens, of a server that does not say
DEFAULT_PER_SEQUENCE = 60.0
LEAST_TOKENS = 128
CHARACTERS_PER_TOKEN = 4
LONGEST_QUESTION = 10.0  # seconds
QUESTION_SHARE = 0.25  # of a request's time, at most: the rest is for the answer, whether the server told or not


def from_environment(given: float | None, name: str, environ: Mapping[str, str] = os.environ) -> float | None:
    """An argument, else a variable's number; None where there is neither."""
    text = (environ.get(name) or "").strip()
    if given is None and text:
        try:
            given = float(text)
        except ValueError:
            raise SpecError(f"{name} is {text!r}: give it a number") from None
    if given is not None and not 0 < given < float("inf"):
        raise SpecError(f"{name.removeprefix('AURORA_SWARM_').lower()} is {given:g}: give a number above 0")
    return given


def whole(given: int | None, name: str) -> int | None:
    number = from_environment(given, name)
    if number is not None and number != int(number):
        raise SpecError(f"{name.removeprefix('AURORA_SWARM_').lower()} is {number:g}: give a whole number")
    return None if number is None else int(number)


def answer_tokens(most: int, context: int, characters: int, buffer: int) -> int:
    """What the context leaves beside the prompt, a token being taken for four characters."""
    return min(most, max(LEAST_TOKENS, context - characters // CHARACTERS_PER_TOKEN - buffer))


async def context_of(line: Line, lines: Lines, model: str, limit: float) -> int:
    """The context of a server in tokens, asked for once, however many want to know. One that could not be reached is
    asked again by the next who wants to know; one that does not say, or not in time, is not."""
    if isinstance(line.context, int):
        return line.context
    if line.context is None or line.context.get_loop() is not asyncio.get_running_loop():
        question = _ask(line, lines, model, min(limit * QUESTION_SHARE, LONGEST_QUESTION))
        line.context = asyncio.get_running_loop().create_task(question)
        line.context.add_done_callback(lambda task: _learn(line, task))
    found = await asyncio.shield(line.context)
    return DEFAULT_CONTEXT if found is None else found


async def _ask(line: Line, lines: Lines, model: str, limit: float) -> int | None:
    exchange = await lines.ask(line, "/v1/models", None, limit, tries=1)
    try:
        cards = read_object(exchange).get("data")
    except BackendError as error:
        silent = isinstance(error, Timeout) and not error.unreached
        return DEFAULT_CONTEXT if error.status is not None or exchange.error is None or silent else None
    found = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    named = [card for card in found if card.get("id") == model] or (found if len(found) == 1 else [])
    length = named[0].get("max_model_len") if named else None
    return length if type(length) is int and length > 0 else DEFAULT_CONTEXT


def _learn(line: Line, task: asyncio.Task[int | None]) -> None:
    if line.context is task:
        line.context = None if task.cancelled() or task.exception() else task.result()
