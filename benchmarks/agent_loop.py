"""The loop that one writes by hand: all agents at once, a semaphore around the model call, one shared tool.

``loop.py`` and the clients in ``contenders/`` differ only in how they send a request. What it does, and no more:

- one task per row, all created at the start; at most ``inflight`` requests at a time, none held during a tool
- the tool runs once per distinct argument, for all agents that ask for it (a dict of tasks), as ours does
- the answer is validated with pydantic; anything unexpected raises and ends the batch
- no retries, no repair of JSON, no transcripts, no usage, no timings, no events
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.workload import SYSTEM_PROMPT_WITH_SCHEMA, TASK, Review, Work, lookup, rows

Message = dict[str, Any]
Ask = Callable[[list[Message]], Awaitable[Message]]


async def run_agents(work: Work, ask: Ask) -> list[Review]:
    slots = asyncio.Semaphore(work.inflight)
    lookups: dict[str, asyncio.Task[str]] = {}

    async def call_tool(call: Message) -> Message:
        topic = json.loads(call["function"]["arguments"])["topic"]
        if topic not in lookups:
            lookups[topic] = asyncio.create_task(lookup(topic))
        return {"role": "tool", "tool_call_id": call["id"], "content": await lookups[topic]}

    async def agent(row: dict[str, object]) -> Review:
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM_PROMPT_WITH_SCHEMA},
            {"role": "user", "content": TASK.format(**row)},
        ]
        while True:
            async with slots:
                message = await ask(messages)
            calls = message.get("tool_calls")
            if not calls:
                return Review.model_validate_json(message["content"])
            messages.append(message)
            messages.extend(await asyncio.gather(*map(call_tool, calls)))

    return list(await asyncio.gather(*map(agent, rows(work.agents))))


class StreamedMessage:
    """Puts a message together from the deltas of a stream. Whoever streams by hand writes something like it."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: dict[int, Message] = {}
        self._finished = False

    def add(self, event: Message) -> None:
        for choice in event["choices"]:
            delta = choice["delta"]
            if text := delta.get("content"):
                self._text.append(text)
            for part in delta.get("tool_calls") or ():
                function = part["function"]
                if part["index"] not in self._calls:
                    self._calls[part["index"]] = {"id": part["id"], "type": "function", "function": function}
                else:
                    self._calls[part["index"]]["function"]["arguments"] += function["arguments"]
            self._finished = self._finished or choice["finish_reason"] is not None

    def message(self) -> Message:
        if not self._finished:
            raise RuntimeError("the stream ended before the answer did")
        out: Message = {"role": "assistant", "content": "".join(self._text) or None}
        if self._calls:
            out["tool_calls"] = list(self._calls.values())
        return out
