"""Look-ups of many agents, each for one key, as one: what a tool says about it, and what a batch makes of its answer.

When a batch goes and who waits for it is the pool's affair.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from batch_agent.errors import ToolError, ToolFailed
from batch_agent.foreign import describe, message_of
from batch_agent.tools.render import render
from batch_agent.tools.schema import Function

GATHERING = 0.005  # seconds that a batch waits for company: nothing beside a model's turn
MAX_BATCH = 500  # every database takes as many parameters
NOTHING = "Nothing was found for {name} {key}."

Keys = Mapping[str, object]  # by what tells their calls apart
Answers = dict[str, str | ToolError]


@dataclass(frozen=True, slots=True)
class Batching:
    """``function`` takes a list of keys and returns what it found, by key. One that is not there, or None, was not
    found; an exception in the place of a result is that key's alone."""

    key_arg: str
    function: Function
    max_batch: int


async def ask_all(keys: Keys, ask: Callable[[Keys], Awaitable[Answers]]) -> Answers:
    """The answers to all keys. A batch that fails is asked again in halves, until the key that it fails for is alone:
    nobody is told of a neighbour's error. When the first two that are alone fail with the same words, and nothing was
    answered before, it is not the keys: whoever is left is told so."""
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
    """What a batch function returned, as the texts that models read."""
    if not isinstance(found, Mapping):
        raise ToolError(f"its batch function returned {type(found).__name__}; it returns a mapping from key to result")
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
    """By the key itself. What no key claims so came back in another form, a number as text, say, or in the case that
    the database knows: it is claimed by its text."""
    asked = set(keys.values())
    others = {_text(key): result for key, result in found.items() if key not in asked}
    return {call: found[key] if key in found else others.get(_text(key)) for call, key in keys.items()}


def _text(key: object) -> str:
    return str(key).strip().casefold()
