"""What the simulated model says: a pure function of the conversation, so that every result is determined.

A prompt that names a row (``v2: work on k7``) is answered by that row's plan: turns that call tools, perhaps an answer
that does not validate, and then the answer. Any other prompt (a part of a long row, a merge, a reduction) is answered
with the range of the numbers in it, which does not depend on how they were grouped. Each answer carries a ``mark`` in
its reasoning, which says what was asked: the record of a run is read by it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Protocol

from pydantic import BaseModel

from batch_agent.messages import JsonObject
from batch_agent.testing import Request, Say, ToolUse
from batch_agent.testing.wire import content_text

ROW = re.compile(r"v(\d+): work on (\w+)")
NUMBER = re.compile(r"\bw(\d+)\b|\"(?:low|high)\": ?(\d+)")


class Answer(BaseModel):
    row: str
    version: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Step:
    """A turn before the last: calls of ``look`` and ``note``, or an answer that does not validate."""

    looks: int = 0
    notes: int = 0

    def uses(self, version: int, row: str, turn: int) -> tuple[ToolUse, ...]:
        names = ["look"] * self.looks + ["note"] * self.notes
        return tuple(
            ToolUse(name, {"key": _key(name, version, row, turn, place)}, id=f"{row}.{turn}.{place}")
            for place, name in enumerate(names)
        )


def _key(name: str, version: int, row: str, turn: int, place: int) -> str:
    """Writes have a key of their own; what is looked up, rows have in common."""
    return f"v{version}.{row}.{turn}.{place}" if name == "note" else f"{(turn + place) % 3}"


@cache
def plan_of(row: str) -> tuple[Step, ...]:
    chance = Random(row)
    steps = [Step(chance.randint(1, 2), chance.randint(0, 2)) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))]
    if chance.random() < 0.2:
        steps.append(Step())
    return tuple(steps)


def notes_of(version: int, row: str) -> list[str]:
    """The keys of all writes of a row."""
    uses = [use for turn, step in enumerate(plan_of(row)) for use in step.uses(version, row, turn)]
    return [str(json.loads(json.dumps(use.arguments))["key"]) for use in uses if use.name == "note"]


def mark_of(request: Request) -> str:
    """What tells this request from all others: row and turn, or the content."""
    prompt, turn = _prompt(request), request.turn
    if found := ROW.search(prompt):
        return f"v{found[1]} {found[2]} {turn}"
    return f"{blake2b(prompt.encode(), digest_size=6).hexdigest()} {turn}"


class Listener(Protocol):
    def complain(self, problem: str) -> None:
        """Something is wrong with the conversation that was sent."""
        ...

    def note_told(self, key: str, written: bool) -> None:
        """The model is told what became of a write; not ``written`` if that is an error, or unknown."""
        ...


def answer(request: Request, listener: Listener) -> Say:
    prompt, turn, mark = _prompt(request), request.turn, mark_of(request)
    low, high = _range(prompt)
    found = ROW.search(prompt)
    if found is None:
        return Say(Answer(row="", version=0, low=low, high=high).model_dump_json(), reasoning=mark)
    version, row = int(found[1]), found[2]
    steps = plan_of(row)
    for problem in _wrong(request.messages, version, row, listener):
        listener.complain(f"{mark}: {problem}")
    if turn < len(steps):
        uses = steps[turn].uses(version, row, turn)
        return Say("I call tools" if uses else "not JSON", uses, reasoning=mark)
    return Say(Answer(row=row, version=version, low=low, high=high).model_dump_json(), reasoning=mark)


def _wrong(messages: list[JsonObject], version: int, row: str, listener: Listener) -> list[str]:
    """What is in the conversation that this model did not say, and no tool could have answered."""
    steps, problems, turn = plan_of(row), [], -1
    expected: dict[str, str] = {}
    for message in messages:
        match message.get("role"):
            case "assistant":
                if expected:
                    problems.append(f"turn {turn} has calls without an outcome: {sorted(expected)}")
                turn += 1
                uses = steps[turn].uses(version, row, turn) if turn < len(steps) else ()
                expected = {str(use.id): _outcome(use) for use in uses}
                said = message.get("tool_calls") or []
                assert isinstance(said, list)
                ids = [str(call.get("id")) for call in said if isinstance(call, dict)]
                if ids != [*expected]:
                    problems.append(f"turn {turn} has the calls {ids}, not {[*expected]}")
            case "tool":
                told, want = content_text(message.get("content")), expected.pop(str(message.get("tool_call_id")), None)
                if want is None or (told != want and not told.startswith("Error")):
                    problems.append(f"a tool of turn {turn} is said to have answered {told!r}, not {want!r}")
                elif want.startswith("noted "):
                    listener.note_told(want.removeprefix("noted "), told == want)
    if expected:
        problems.append(f"turn {turn} has calls without an outcome: {sorted(expected)}")
    return problems


def _outcome(use: ToolUse) -> str:
    assert not isinstance(use.arguments, str)
    return f"{'noted' if use.name == 'note' else 'seen'} {use.arguments['key']}"


def _prompt(request: Request) -> str:
    first = next((message for message in request.messages if message.get("role") == "user"), None)
    return "" if first is None else content_text(first.get("content"))


def _range(text: str) -> tuple[int, int]:
    numbers = [int(found[1] or found[2]) for found in NUMBER.finditer(text)]
    return (min(numbers), max(numbers)) if numbers else (0, 0)
