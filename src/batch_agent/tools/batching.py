"""Lookups of many agents, each for one key, in one batch: the declaration of a tool, and the answers of a batch.

The pool decides when a batch is sent and which calls it answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from batch_agent.errors import ToolError, ToolFailed
from batch_agent.foreign import describe, message_of
from batch_agent.tools.schema import Function, render

GATHERING = 0.005  # seconds that a batch waits for more keys; negligible beside a model call
MAX_BATCH = 500  # all databases accept this number of parameters
NOTHING = "Nothing was found for {name} {key}."

Keys = Mapping[str, object]  # by the identity of their calls
Answers = dict[str, str | ToolError]


@dataclass(frozen=True, slots=True)
class Batching:
    """How a tool looks up keys. ``function`` takes a list of keys and returns a mapping from key to result. A missing
    key, or None, was not found. An exception as a result is the error of that key only."""

    key_arg: str
    function: Function
    max_batch: int


async def ask_all(keys: Keys, ask: Callable[[Keys], Awaitable[Answers]]) -> Answers:
    """Return the answers to all keys. A batch that fails is sent again in halves, until the failing key is alone, so
    that other keys do not get its error. If nothing was answered, and the first two single keys fail with the same
    message, the keys are not the cause: all remaining keys get this error."""
    answers: Answers = {}
    parts = [list(keys)]
    reasons: list[str] = []
    answered = False
    while parts:
        part = parts.pop()
        try:
            answers |= await ask({call: keys[call] for call in part})
            answered = True
        except ToolError as error:
            reasons.append(message_of(error))
            if len(part) == 1:
                answers[part[0]] = error
                if not answered and len(answers) == 2 and reasons[-1] == reasons[-2]:
                    return answers | {call: error for left in parts for call in left}
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
    return answers


def read_answers(batching: Batching, keys: Keys, found: object, max_tokens: int | None) -> Answers:
    """Return the results of a batch function as texts for the model."""
    if not isinstance(found, Mapping):
        raise ToolError(f"its batch function returned {type(found).__name__}, not a mapping from key to result")
    results = _by_call(keys, found)
    answers: Answers = {}
    for call, key in keys.items():
        result = results.get(call)
        if result is None:
            answers[call] = NOTHING.format(name=batching.key_arg, key=key)
        elif isinstance(result, BaseException):
            answers[call] = result if isinstance(result, ToolError) else ToolFailed(describe(result))
        else:
            answers[call] = render(result, max_tokens)
    return answers


def _by_call(keys: Keys, found: Mapping[object, object]) -> dict[str, object]:
    """Return the result of each call. Keys are compared by value, then by their text: a database may return a number
    as text, or a key in another case."""
    asked = set(keys.values())
    others = {_text(key): result for key, result in found.items() if key not in asked}
    return {call: found[key] if key in found else others.get(_text(key)) for call, key in keys.items()}


def _text(key: object) -> str:
    return str(key).strip().casefold()
