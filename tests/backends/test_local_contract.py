"""LocalBackend keeps the contract of backends, with a stand-in for its engine process that says what it is told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import jsonschema_rs
from tests.backends.local.ebnf_sampler import sampler

from batch_agent.backends.base import RequestShape
from batch_agent.backends.local.backend import EngineAnswer, EngineDied, EngineOptions, LocalBackend, encode_line
from batch_agent.errors import BackendError, ContextOverflow, Rejected, Unavailable
from batch_agent.messages import JsonObject, Message, ToolCall, ToolSpec
from batch_agent.testing.contract.backend import SCHEMA, BackendContract
from batch_agent.testing.contract.peer import Hang, Heard, Item, Refuse, Say

CALL = re.compile(r'\n?<tool_call>{"name": "(.*?)", "arguments": (.*?)}</tool_call>')
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
TOOL = re.compile(r"- (\w+): (.*?) Arguments: (.*)")
DESCRIBED = "You can call these tools:"


class ToldEngine:
    """Answers as EngineProcess does."""

    def __init__(self, script: tuple[Item, ...]) -> None:
        self._script = list(script)
        self.lines: list[bytes] = []
        self.asked = asyncio.Event()
        self.left = False

    async def ask(self, request: JsonObject) -> EngineAnswer:
        self.lines.append(encode_line(request))
        self.asked.set()
        item = self._script[0]
        if isinstance(item, Say):
            self._script.pop(0)
            return await self._say(item)
        if isinstance(item, Hang):
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.left = True
        if isinstance(item, Refuse) and item.status < 500:
            self._script.pop(0)
            raise ContextOverflow(item.message) if item.overflow else Rejected(item.message)
        raise EngineDied("the process ended")  # also the next one that is started

    async def _say(self, item: Say) -> EngineAnswer:
        if item.hold is not None:
            await item.hold.wait()
        text = item.text
        if item.calls:
            text = f'<tool_call>{{"name": "{item.calls[0].name}", "arguments": {item.calls[0].arguments}}}</tool_call>'
        usage = item.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return EngineAnswer(text, "length" if item.cut else "stop", *counts, first_token=0.0)


class ToldBackend(LocalBackend):
    def __init__(self, engine: ToldEngine) -> None:
        super().__init__(EngineOptions("test-model", Path("test-model.gguf"), threads=1))
        self.engine = engine

    @property
    def pid(self) -> int:
        return 1

    async def _engine(self) -> Any:
        if self._entered == 0:
            raise Unavailable("it is closed")
        return self.engine


def hear_line(line: bytes) -> Heard:
    request = json.loads(line)
    system, tools = "", []
    messages = request["messages"]
    if messages[0]["role"] == "system":
        system, _, described = messages.pop(0)["content"].partition(DESCRIBED)
        tools = [ToolSpec(name, what, json.loads(schema)) for name, what, schema in TOOL.findall(described)]
    sampling, words = request["sampling"], _words(request["grammar"])
    system = system.removesuffix("\n\n") if tools else system
    return Heard(
        model="test-model",  # a process has but one, and check refuses others
        messages=[*([Message("system", system)] if system else []), *_messages(messages)],
        tools=tools,
        tool_choice=_choice(words, len(tools)),
        schema=SCHEMA if words and all(map(_fits, words)) else None,
        max_tokens=request["max_tokens"],
        temperature=sampling.get("temperature", 0.0),
        top_p=sampling.get("top_p"),
        seed=sampling.get("rng_seed"),
        stop=request["stop"],
        extra=sampling,
    )


def _messages(sent: list[dict]) -> Iterator[Message]:
    for message in sent:
        content = message["content"]
        if message["role"] == "user" and RESULT.match(content):
            yield from (Message("tool", result) for result in RESULT.findall(content))
            continue
        calls = tuple(ToolCall("", name, arguments) for name, arguments in CALL.findall(content))
        yield Message(message["role"], CALL.sub("", content), calls)


def _words(grammar: str | None) -> list[str]:
    """Some of what a grammar lets a model say: it cannot be read backwards, but it can be tried."""
    return [] if grammar is None else [sampler(grammar, seed).text() for seed in range(40)]


def _choice(words: list[str], tools: int) -> str | None:
    if not tools:
        return None
    called = {found[1] for text in words if (found := CALL.match(text))}
    if not called:
        return "none"
    if not all(map(CALL.match, words)):
        return "auto"
    return "required" if len(called) == tools else called.pop()


def _fits(text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(SCHEMA, json.loads(text))
    except ValueError:
        return False


class LocalPeer:
    def __init__(self, script: tuple[Item, ...]) -> None:
        self._told = ToldEngine(script)
        self.backend = ToldBackend(self._told)

    @property
    def requests(self) -> list[bytes]:
        sent = [json.loads(line)["messages"] for line in self._told.lines]
        return [json.dumps(messages, ensure_ascii=False).encode()[:-1] for messages in sent]

    @property
    def heard(self) -> list[Heard]:
        return [hear_line(line) for line in self._told.lines]

    async def wait_until_asked(self) -> None:
        await self._told.asked.wait()

    async def wait_until_left(self) -> None:
        assert self._told.left


class TestLocalBackend(BackendContract):
    # A template may know neither tools nor results: both are words, in their places.
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name", "call_ids"})
    combines = True
    lacks: ClassVar[frozenset[str]] = frozenset(
        {
            "combined_schema",
            "reasoning",
            "sealed",
            "several_calls",
            "text_beside_calls",
            "call_ids",
            "reasoning_tokens",
            "cache_write_tokens",
        }
        | {"statuses", "retry_after", "errors_inside", "parsed_arguments"}
    )
    reserved = ("messages", "grammar")
    refusals: ClassVar[Mapping[Refuse, type[BackendError]]] = {
        Refuse(400): Rejected,
        Refuse(400, overflow=True): ContextOverflow,
        Refuse(500): Unavailable,
    }

    def shape(self, **options: Any) -> RequestShape:
        """Without a temperature nothing is sampled, and there is nothing for a seed to do."""
        sampled = {"temperature": 0.5} if options.keys() & {"top_p", "seed"} else {}
        return super().shape(**sampled, **options)

    def extra_body(self) -> dict[str, Any]:
        return {"top_k": 3, "repetition_penalty": 1.5}

    @asynccontextmanager
    async def peer(self, *script: Item) -> AsyncIterator[LocalPeer]:
        peer = LocalPeer(script)
        async with peer.backend:
            yield peer
