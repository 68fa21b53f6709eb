"""SimulatedBackend keeps the contract of backends: its model says what it is told, its engine takes the time."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

import orjson

from batch_agent.backends.base import ModelRequest, OnToolCall
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.backends.simulated.answers import SimulatedAnswer
from batch_agent.backends.simulated.tokens import ANSWER, BEGIN, END, HEADERS, encode, encode_call
from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.messages import Message, Reply, ToolCall, ToolSpec
from batch_agent.testing.contract.backend import BackendContract
from batch_agent.testing.contract.peer import Hang, Heard, Item, Refuse, Say

MODEL = EngineModel(prefill_tokens_per_second=math.inf, step_seconds=0.0002, sequence_seconds=0.0, name="test-model")
ROLES = {header: role for role, header in HEADERS.items()}
CALL = re.compile(r'<call>{"name":"(.*?)","arguments":(.*?)}</call>\0*')


class ToldBackend(SimulatedBackend):
    def __init__(self, script: tuple[Item, ...]) -> None:
        super().__init__(MODEL)
        self.asked = asyncio.Event()
        self.heard: list[tuple[bytes, ModelRequest, bool]] = []
        self._script = iter(script)
        self._streamed = False

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        self._streamed = on_tool_call is not None
        return await super().infer(request, on_tool_call)

    def answer(self, prompt: bytes, request: ModelRequest) -> SimulatedAnswer:
        self.heard.append((prompt, request, self._streamed))
        self.asked.set()
        item = next(self._script)
        if isinstance(item, Say):
            words = encode(item.text) + b"".join(map(encode_call, item.calls))
            return SimulatedAnswer(item.text, tuple(item.calls), words if item.cut else words + END, item.cut)
        tokens = MODEL.context_tokens // 2 if isinstance(item, Hang) else 2 * MODEL.context_tokens
        return SimulatedAnswer("", (), encode("and " * tokens), cut=False)


def read_prompt(prompt: bytes, request: ModelRequest, streamed: bool) -> Heard:
    """What the engine was given to compute, and what its model was told beside it."""
    segments = prompt.removeprefix(BEGIN).removesuffix(ANSWER).split(END)[:-1]
    tools: list[dict] = []
    if segments and segments[0][:1] == b"[":
        tools = orjson.loads(segments.pop(0).rstrip(b"\0"))
    shape = request.shape
    return Heard(
        model=MODEL.name,
        messages=list(_messages(segments)),
        tools=[ToolSpec(tool["name"], tool["description"], tool["parameters"]) for tool in tools],
        tool_choice=shape.tool_choice if tools else None,
        schema=shape.schema,
        max_tokens=shape.max_tokens,
        streamed=streamed,
    )


def _messages(segments: list[bytes]) -> Iterator[Message]:
    for segment in segments:
        text = segment[4:].decode()
        calls = tuple(ToolCall("", name, arguments) for name, arguments in CALL.findall(text))
        yield Message(ROLES[segment[:4]], CALL.sub("", text).rstrip("\0"), calls)


class SimulatedPeer:
    def __init__(self, script: tuple[Item, ...]) -> None:
        self.backend = ToldBackend(script)

    @property
    def requests(self) -> list[bytes]:
        return [prompt.removesuffix(ANSWER) for prompt, _, _ in self.backend.heard]

    @property
    def heard(self) -> list[Heard]:
        return [read_prompt(*heard) for heard in self.backend.heard]

    async def wait_until_asked(self) -> None:
        await self.backend.asked.wait()

    async def wait_until_left(self) -> None:
        assert self.backend.runner.engine.counters.aborted == 1


class TestSimulatedBackend(BackendContract):
    # An engine that only pretends has nothing to sample with. The words of a call are all that a template shows.
    drops: ClassVar[frozenset[str]] = frozenset(
        {"temperature", "top_p", "seed", "stop", "extra_body", "tool_name", "call_ids"}
    )
    combines = True
    lacks: ClassVar[frozenset[str]] = frozenset(
        {"reasoning", "sealed", "usage", "retry_after", "parsed_arguments", "holding", "faults"}
    )
    reserved = ()
    refusals: ClassVar[Mapping[Refuse, type[BackendError]]] = {
        Refuse(400, "context", overflow=True): ContextOverflow,
    }

    @asynccontextmanager
    async def peer(self, *script: Item) -> AsyncIterator[SimulatedPeer]:
        peer = SimulatedPeer(script)
        async with peer.backend:
            yield peer
