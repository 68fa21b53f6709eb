"""A run of ticks on disk: one JSON line for each agent and tick, to look at and to play again without a model."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject, Usage
from batch_agent.ticks.action import SOURCES, Action, Decision
from batch_agent.ticks.mind import Given

logger = logging.getLogger("batch_agent")

ReadAction = Callable[[JsonValue], object]  # of an agent: what was written → the action


class Trace:
    """Lines are added to the file. Those of one tick are written together, when the tick is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.BufferedWriter | None = None
        self._failed = False
        try:
            path.open("ab").close()
        except OSError as error:
            raise SpecError(f"cannot write the trace {path}: {error.strerror}") from None

    def write(self, tick: int, given: Iterable[tuple[str, object, Given]]) -> None:
        """``given``: agent, observation, and what it got."""
        lines = [to_json(_line(tick, *one), inf_nan_mode="null", fallback=str) + b"\n" for one in given]
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = self._path.open("ab")
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:  # a full disk does not stop a world
            self._failed = True
            logger.error("nothing more is written to the trace %s: %s", self._path, error.strerror)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(tick: int, agent: str, observation: object, given: Given) -> JsonObject:
    decision, thought = given
    action = decision.action
    if isinstance(action, Action):
        action = {"tool": action.tool_name, "params": action.parameters, "reasoning": action.reasoning}
    elif dataclasses.is_dataclass(action) and not isinstance(action, type):
        action = dataclasses.asdict(action)
    return {
        "agent": agent,
        "tick": tick,
        "source": decision.source,
        "seen_tick": decision.seen_tick,
        "action": cast("JsonValue", action),
        "reason": decision.reason,
        "observation": cast("JsonValue", observation),
        "prompt": "" if thought is None else thought.prompt,
        "answer": "" if thought is None else thought.answer,
        "tokens": decision.usage.prompt_tokens + decision.usage.completion_tokens,
        "prompt_tokens": decision.usage.prompt_tokens,
        "completion_tokens": decision.usage.completion_tokens,
        "latency": decision.latency,
    }


class Replay:
    """What each agent did at each tick, in the order in which it happened: ticks come again with each episode."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._given: dict[tuple[str, int], deque[JsonObject]] = {}
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise SpecError(f"cannot read the trace {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                value = from_json(line)
                key = str(value["agent"]), int(value["tick"])
                if value["source"] not in SOURCES:
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                if number == len(lines):  # the program was killed while it wrote
                    break
                raise SpecError(f"{path} line {number} is no line of a trace of ticks") from None
            self._given.setdefault(key, deque()).append(value)

    def decision(self, agent: str, tick: int, read: ReadAction) -> Decision[object] | None:
        """What it did; None where nothing is recorded."""
        lines = self._given.get((agent, tick))
        if not lines:
            return None
        line = lines.popleft()
        usage = Usage(int(str(line["prompt_tokens"])), completion_tokens=int(str(line["completion_tokens"])))
        seen, latency = line["seen_tick"], line["latency"]
        return Decision(
            read(line["action"]),
            next(source for source in SOURCES if source == line["source"]),
            seen if isinstance(seen, int) else None,
            usage,
            latency if isinstance(latency, int | float) else None,
            str(line["reason"]),
        )
