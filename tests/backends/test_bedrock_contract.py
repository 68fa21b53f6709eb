"""The contract on Bedrock's ``converse``: how the service speaks, in real frames with checksums, and what it hears."""

from __future__ import annotations

import asyncio
import struct
import zlib
from typing import Any, ClassVar
from urllib.parse import unquote

import orjson
import pytest

from batch_agent.backends.base import Backend
from batch_agent.backends.bedrock.converse import CACHE_POINT, BedrockBackend
from batch_agent.messages import Image, Message, Part, ToolCall, ToolSpec
from batch_agent.testing.contract.backend import CALLS, SEARCH, ask
from batch_agent.testing.contract.http import HttpContract
from batch_agent.testing.contract.peer import BreakOff, ErrorInside, Heard, Refuse, Say
from batch_agent.testing.contract.wire import Exchange, Step, answer, dumped, half_of, parsed, stream

KINDS = {
    400: "ValidationException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    429: "ThrottlingException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
}


@pytest.fixture(autouse=True)
def own_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret that is long enough")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.delenv("AWS_BEARER_TOKEN_BEDROCK", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


def frame(payload: object, **headers: str) -> bytes:
    """One message of an event stream, both checksums included."""
    named = b""
    for name, value in headers.items():
        key = b":" + name.replace("_", "-").encode()
        named += struct.pack(">B", len(key)) + key + b"\x07" + struct.pack(">H", len(value)) + value.encode()
    body = dumped(payload)
    head = struct.pack(">II", 16 + len(named) + len(body), len(named))
    whole = head + struct.pack(">I", zlib.crc32(head)) + named + body
    return whole + struct.pack(">I", zlib.crc32(whole))


def event(kind: str, **fields: object) -> bytes:
    return frame(fields, message_type="event", event_type=kind, content_type="application/json")


def blocks_of(say: Say) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if say.reasoning:
        told = {"text": say.reasoning} | ({"signature": say.sealed} if say.sealed else {})
        blocks.append({"reasoningContent": {"reasoningText": told}})
    if say.text:
        blocks.append({"text": say.text})
    for call in say.calls:
        blocks.append({"toolUse": {"toolUseId": call.id, "name": call.name, "input": parsed(call.arguments)}})
    return blocks


def usage_of(say: Say) -> dict[str, int]:
    usage = say.usage
    return {
        "inputTokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "outputTokens": usage.completion_tokens,
        "totalTokens": usage.prompt_tokens + usage.completion_tokens,
        "cacheReadInputTokens": usage.cached_tokens,
        "cacheWriteInputTokens": usage.cache_write_tokens,
    }


def stop_of(say: Say) -> str:
    return "max_tokens" if say.cut else "tool_use" if say.calls else "end_turn"


def whole(say: Say) -> dict[str, Any]:
    message = {"role": "assistant", "content": blocks_of(say)}
    return {
        "output": {"message": message},
        "stopReason": stop_of(say),
        "usage": usage_of(say),
        "metrics": {"latencyMs": 5},
    }


def in_pieces(say: Say) -> list[object]:
    parts: list[object] = [event("messageStart", role="assistant")]
    index = 0
    if say.reasoning:
        for letter in say.reasoning:
            parts.append(_delta(index, {"reasoningContent": {"text": letter}}))
        if say.sealed:
            parts.append(_delta(index, {"reasoningContent": {"signature": say.sealed}}))
        parts.append(event("contentBlockStop", contentBlockIndex=index))
        index += 1
    if say.text:
        parts += [_delta(index, {"text": letter}) for letter in say.text]
        parts.append(event("contentBlockStop", contentBlockIndex=index))
        index += 1
    for number, call in enumerate(say.calls):
        start = {"toolUse": {"toolUseId": call.id, "name": call.name}}
        parts.append(event("contentBlockStart", contentBlockIndex=index, start=start))
        parts += [_delta(index, {"toolUse": {"input": letter}}) for letter in call.arguments]
        parts.append(event("contentBlockStop", contentBlockIndex=index))
        index += 1
        if number == 0 and say.hold is not None:
            parts.append(say.hold)
    parts.append(event("messageStop", stopReason=stop_of(say)))
    return [*parts, event("metadata", usage=usage_of(say), metrics={"latencyMs": 5})]


def _delta(index: int, delta: object) -> bytes:
    return event("contentBlockDelta", contentBlockIndex=index, delta=delta)


def frames(*parts: object, end: bool = True) -> Step:
    """Like ``stream``, in the type that the service gives its frames."""
    step = stream(*parts, done=False, end=end)

    async def typed(exchange: Exchange) -> None:
        plain = exchange.send

        async def send(data: bytes) -> None:
            await plain(data.replace(b"text/event-stream", b"application/vnd.amazon.eventstream", 1))

        exchange.send = send  # type: ignore[method-assign]
        await step(exchange)

    return typed


def hear_converse(path: str, body: bytes) -> Heard:
    fields = orjson.loads(body)
    _, _, model, verb = path.split("/")
    config, inference = fields.get("toolConfig", {}), fields.get("inferenceConfig", {})
    choice = config.get("toolChoice")
    form = fields.get("outputConfig", {}).get("textFormat")
    blocks = [block for message in fields["messages"] for block in message["content"]]
    return Heard(
        model=unquote(model),
        messages=[
            *(Message("system", block["text"]) for block in fields.get("system", ()) if "text" in block),
            *(part for message in fields["messages"] for part in _taken_apart(message)),
        ],
        tools=[
            ToolSpec(
                tool["toolSpec"]["name"],
                tool["toolSpec"].get("description", ""),
                tool["toolSpec"]["inputSchema"]["json"],
            )
            for tool in config.get("tools", ())
            if "toolSpec" in tool
        ],
        tool_choice=None if choice is None else _choice(choice),
        schema=orjson.loads(form["structure"]["jsonSchema"]["schema"]) if form else None,
        max_tokens=inference.get("maxTokens"),
        temperature=inference.get("temperature"),
        top_p=inference.get("topP"),
        stop=inference.get("stopSequences", ()),
        extra=fields.get("additionalModelRequestFields", {}),
        seals=[
            block["reasoningContent"]["reasoningText"]["signature"]
            for block in blocks
            if "signature" in block.get("reasoningContent", {}).get("reasoningText", {})
        ],
        streamed=verb == "converse-stream",
    )


def _choice(choice: dict[str, Any]) -> str:
    return choice["tool"]["name"] if "tool" in choice else {"auto": "auto", "any": "required"}[next(iter(choice))]


def _taken_apart(message: dict[str, Any]) -> list[Message]:
    content = message["content"]
    results = [
        Message("tool", block["toolResult"]["content"][0]["text"], tool_call_id=block["toolResult"]["toolUseId"])
        for block in content
        if "toolResult" in block
    ]
    calls = tuple(
        ToolCall(b["toolUse"]["toolUseId"], b["toolUse"]["name"], orjson.dumps(b["toolUse"]["input"]).decode())
        for b in content
        if "toolUse" in b
    )
    parts = [_part(block) for block in content if "text" in block or "image" in block]
    said = tuple(parts) if any(isinstance(part, Image) for part in parts) else "".join(map(str, parts))
    return [*results, *([Message(message["role"], said, calls)] if said or calls else [])]


def _part(block: dict[str, Any]) -> Part:
    if "text" in block:
        return str(block["text"])
    return Image(f"data:image/{block['image']['format']};base64,{block['image']['source']['bytes']}")


class TestBedrockBackend(HttpContract):
    reserved = ("messages", "system", "toolConfig")
    choices = ("auto", "required", "search")
    refuses: ClassVar[frozenset[str]] = frozenset({"seed"})
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name"})
    lacks: ClassVar[frozenset[str]] = frozenset({"broken_whole", "keys", "reasoning_tokens"})
    combines = True
    finishes = ("end_turn", "tool_use")

    def backend(self, url: str) -> Backend:
        return BedrockBackend(url.removesuffix("/v1"), "us-east-1", model="test-model", native_schema=True)

    def say(self, item: Say, streamed: bool) -> Step:
        return frames(*in_pieces(item)) if streamed else answer(whole(item))

    def break_off(self, item: BreakOff, streamed: bool) -> Step:
        if streamed:
            return frames(*in_pieces(Say(item.text))[:-2], end=item.clean)
        return half_of(orjson.dumps(whole(Say(item.text))), item.clean)

    def error_inside(self, item: ErrorInside, streamed: bool) -> Step:
        if not streamed:  # a whole answer is an error from its status on
            return self.play(Refuse(item.status, item.message))
        kind = KINDS[item.status]
        told = frame({"message": item.message}, message_type="exception", exception_type=kind[0].lower() + kind[1:])
        return frames(*in_pieces(Say(item.text))[:-2], told)

    def error_body(self, item: Refuse) -> object:
        return {"message": ("Input is too long for requested model, " if item.overflow else "") + item.message}

    def hear(self, exchange: Exchange) -> Heard:
        assert exchange.headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
        return hear_converse(exchange.path, exchange.body)

    def history(self, exchange: Exchange) -> bytes:
        body = exchange.body
        start = body.index(b'"system":[') if b'"system":[' in body else body.index(b'"messages":[')
        return body[start:-2].replace(b"," + CACHE_POINT, b"")

    async def test_a_model_that_must_not_call_is_offered_nothing(self) -> None:
        async with self.peer(Say("Hello.")) as peer:
            await peer.backend.infer(ask(shape=self.shape(tools=(SEARCH,), tool_choice="none")))
        assert list(peer.heard[0].tools) == []

    async def test_a_conversation_with_calls_names_their_tools_although_none_are_offered(self) -> None:
        async with self.peer(Say("Hello.")) as peer:
            talk = [
                Message("user", "Hello"),
                Message("assistant", "", CALLS[:1]),
                Message("tool", "found", tool_call_id="call_a"),
            ]
            await peer.backend.infer(ask(*talk, shape=self.shape()))
        assert [tool.name for tool in peer.heard[0].tools] == ["search"]

    async def test_a_frame_with_a_wrong_checksum_is_no_answer(self) -> None:
        from batch_agent.errors import BadResponse

        damaged = bytearray(_delta(0, {"text": "x"}))
        damaged[-1] ^= 1
        pieces = [in_pieces(Say("x"))[0], bytes(damaged)]

        class Damaged(TestBedrockBackend):
            def say(self, item: Say, streamed: bool) -> Step:
                return frames(*pieces)

        async with Damaged().peer(Say("x")) as peer, asyncio.timeout(10):
            with pytest.raises(BadResponse, match="damaged"):
                await peer.backend.infer(ask(), lambda call: None)
