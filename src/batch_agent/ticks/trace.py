"""A run of ticks on disk: one line of JSON for each agent and tick, to read and to replay without a model."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from pydantic import JsonValue, TypeAdapter, ValidationError

from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.ticks.agent import Action, ActionSource, Agent, Decision
from batch_agent.ticks.mind import Given
from batch_agent.ticks.plain import json_of, text_of

START = b'{"agent":'  # start of every line
TAIL_BYTES = 64 * 1024 * 1024  # far more than the length of a line

logger = logging.getLogger("batch_agent")


@dataclass(frozen=True, slots=True)
class TraceLine:
    agent: str
    tick: int
    source: ActionSource
    seen_tick: int | None
    action: JsonValue
    reason: str
    observation: JsonValue
    prompt: str
    answer: str
    tokens: int
    prompt_tokens: int
    completion_tokens: int
    latency: float | None


class Trace:
    """A file to which lines are appended. An incomplete last line, from a kill, is removed first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        try:
            path.open("ab").close()
            if path.is_file():
                _mend(path)
        except OSError as error:
            raise SpecError(f"cannot write the trace {path}: {error.strerror}") from None

    def write(self, tick: int, given: Iterable[tuple[object, object, Given]]) -> None:
        """Add the lines of one tick. ``given`` has, for each agent, the agent, its observation and the result."""
        if self._failed:
            return
        lines = [json_of(_line(tick, *one)) + b"\n" for one in given]
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(lines))
        except OSError as error:  # a full disk must not stop a world
            self._failed = True
            logger.error("nothing more is written to the trace %s: %s", self._path, error.strerror)


def _mend(path: Path) -> None:
    """Remove an incomplete line at the end of the file. Other text without a line feed gets one."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - TAIL_BYTES))
        last = file.read().rpartition(b"\n")[2]
        if last and START.startswith(last[: len(START)]) and _read(last) is None:
            file.truncate(end - len(last))
        elif last:
            file.write(b"\n")


def _line(tick: int, agent: object, observation: object, given: Given) -> TraceLine:
    decision, thought = given
    action, usage = decision.action, decision.usage
    return TraceLine(
        agent=text_of(agent),
        tick=tick,
        source=decision.source,
        seen_tick=decision.seen_tick,
        action=cast("JsonValue", action.as_json() if isinstance(action, Action) else action),
        reason=decision.reason,
        observation=cast("JsonValue", observation),
        prompt="" if thought is None else thought.prompt,
        answer="" if thought is None else thought.answer,
        tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        latency=decision.latency,
    )


@cache
def _adapter() -> TypeAdapter[TraceLine]:
    return TypeAdapter(TraceLine)


def _read(line: bytes) -> TraceLine | None:
    try:
        return _adapter().validate_json(line)
    except ValidationError:
        return None


class Replay:
    """What each agent did at each tick, in order, for all episodes. Unreadable lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._given: dict[tuple[str, int], deque[TraceLine]] = {}
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise SpecError(f"cannot read the trace {path}: {error.strerror}") from None
        read = [_read(line) for line in lines]
        for line in filter(None, read):
            self._given.setdefault((line.agent, line.tick), deque()).append(line)
        skipped = read.count(None)
        if skipped and not self._given:
            raise SpecError(f"{path} is not a trace of ticks: none of its {len(lines)} lines can be read")
        if skipped:
            first = read.index(None) + 1
            logger.warning("%s: skipped %d of %d lines, the first is line %d", path, skipped, len(lines), first)

    def decision(self, agent_id: object, tick: int, agent: Agent) -> Decision[object] | None:
        """Return the agent's recorded decision, or None."""
        lines = self._given.get((text_of(agent_id), tick))
        if not lines:
            return None
        line = lines.popleft()
        usage = Usage(line.prompt_tokens, completion_tokens=line.completion_tokens)
        return Decision(agent.recorded(line.action), line.source, line.seen_tick, usage, line.latency, line.reason)
