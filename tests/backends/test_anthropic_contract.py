"""The contract on Anthropic's ``/v1/messages``: how a server of it speaks, byte by byte, and what it hears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

from batch_agent.backends.anthropic.messages import VERSIONS, AnthropicBackend
from batch_agent.backends.anthropic.request import MARK
from batch_agent.backends.base import Backend
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.testing.contract.backend import smoke
from batch_agent.testing.contract.http import HttpContract
from batch_agent.testing.contract.peer import BreakOff, ErrorInside, Heard, Refuse, Say, hear
from batch_agent.testing.contract.wire import Exchange, Step, answer, dumped, half_of, parsed, stream

KINDS = {400: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


def blocks_of(say: Say) -> list[dict]:
    blocks: list[dict] = []
    if say.reasoning:
        blocks.append({"type": "thinking", "thinking": say.reasoning, "signature": say.sealed})
    if say.text:
        blocks.append({"type": "text", "text": say.text, "citations": None})
    for call in say.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def usage_of(say: Say) -> dict:
    usage = say.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def stop_of(say: Say) -> str:
    return "max_tokens" if say.cut else "tool_use" if say.calls else "end_turn"


def whole(say: Say) -> dict:
    blocks = [
        block | {"input": parsed(block["input"])} if block["type"] == "tool_use" else block for block in blocks_of(say)
    ]
    return {"type": "message", "role": "assistant", "content": blocks, "stop_reason": stop_of(say)} | {
        "usage": usage_of(say)
    }


def event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumped({"type": kind, **fields}))


def in_pieces(say: Say) -> list[object]:
    first = usage_of(say) | {"output_tokens": 1}
    parts: list[object] = [event("message_start", message={"content": [], "usage": first}), event("ping")]
    for index, block in enumerate(blocks_of(say)):
        field, kind = {
            "text": ("text", "text_delta"),
            "thinking": ("thinking", "thinking_delta"),
            "tool_use": ("input", "input_json_delta"),
        }[block["type"]]
        began = block | {field: {} if field == "input" else ""}
        parts.append(event("content_block_start", index=index, content_block=began))
        name = "partial_json" if field == "input" else field
        parts += [
            event("content_block_delta", index=index, delta={"type": kind, name: letter}) for letter in block[field]
        ]
        parts.append(event("content_block_stop", index=index))
        if block["type"] == "tool_use" and say.hold is not None and say.hold not in parts:
            parts.append(say.hold)
    usage = {name: usage_of(say)[name] for name in ("output_tokens", "output_tokens_details")}
    parts.append(event("message_delta", delta={"stop_reason": stop_of(say), "stop_sequence": None}, usage=usage))
    return [*parts, event("message_stop")]


def hear_messages(body: bytes) -> Heard:
    blocks = [block for message in orjson.loads(body)["messages"] for block in message["content"]]
    return hear(MessagesDialect(), body, [block["signature"] for block in blocks if block["type"] == "thinking"])


class MessagesContract(HttpContract):
    models: object = {"data": [{"type": "model", "id": "test-model"}], "has_more": False, "last_id": "test-model"}
    reserved = ("messages", "stream", "system")
    refuses: ClassVar[frozenset[str]] = frozenset({"seed"})
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name"})
    lacks: ClassVar[frozenset[str]] = frozenset({"broken_whole"})
    combines = True
    finishes = ("end_turn", "tool_use")

    def backend(self, url: str) -> Backend:
        return AnthropicBackend(url, api_key="sk-ant")

    def keyed(self, url: str, key: str, headers: Mapping[str, str]) -> Backend:
        return AnthropicBackend(url, api_key=key, headers=headers)

    def key_header(self, key: str) -> tuple[str, str]:
        return "x-api-key", key

    def say(self, item: Say, streamed: bool) -> Step:
        return stream(*in_pieces(item), done=False) if streamed else answer(whole(item))

    def break_off(self, item: BreakOff, streamed: bool) -> Step:
        begun = Say(item.text, item.calls)
        if streamed:
            return stream(*in_pieces(begun)[:-2], done=False, end=item.clean)
        return half_of(orjson.dumps(whole(begun)), item.clean)

    def error_inside(self, item: ErrorInside, streamed: bool) -> Step:
        error = {"type": KINDS[item.status], "message": item.message}
        if streamed:
            return stream(*in_pieces(Say(item.text))[:-2], event("error", error=error), done=False)
        return answer({"type": "error", "error": error})

    def error_body(self, item: Refuse) -> object:
        message = (
            f"prompt is too long: 210000 tokens > 200000 maximum, {item.message}" if item.overflow else item.message
        )
        return {"type": "error", "error": {"type": KINDS.get(item.status, "api_error"), "message": message}}

    def hear(self, exchange: Exchange) -> Heard:
        return hear_messages(exchange.body)

    def history(self, exchange: Exchange) -> bytes:
        body = exchange.body
        start = body.index(b'"system":[') if b'"system":[' in body else body.index(b'"messages":[')
        return body[start:-2].replace(MARK, b"}")


class TestAnthropicBackend(MessagesContract):
    pass


@smoke
class TestAnthropicBackendOfTheNewVersion(MessagesContract):
    refuses: ClassVar[frozenset[str]] = frozenset({"seed", "temperature", "top_p"})

    def backend(self, url: str) -> Backend:
        return AnthropicBackend(url, api_key="sk-ant", version=VERSIONS[1])

    def extra_body(self) -> dict:
        return {"metadata": {"user_id": "é"}}
