"""The contract on the ``/chat/completions`` wire: how a server of it speaks and what it hears. For OpenAIBackend in all
its flavours, and for whatever wraps one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

import orjson

from batch_agent.backends.base import Backend
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.gateway.chat import ChatDialect
from batch_agent.testing.contract.http import HttpContract
from batch_agent.testing.contract.peer import BreakOff, ErrorInside, Heard, Refuse, Say, hear
from batch_agent.testing.contract.wire import Exchange, Step, answer, half_of, stream


def usage_of(say: Say) -> dict:
    usage = say.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _finish(say: Say) -> str:
    return "length" if say.cut else "tool_calls" if say.calls else "stop"


def whole(say: Say) -> dict:
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in say.calls
    ]
    message = {"role": "assistant", "content": say.text, "tool_calls": calls or None}
    if say.reasoning:
        message["reasoning_content"] = say.reasoning
    return {"choices": [{"index": 0, "message": message, "finish_reason": _finish(say)}], "usage": usage_of(say)}


def delta(**fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def in_pieces(say: Say) -> list[object]:
    parts: list[object] = [delta(role="assistant", content="")]
    parts += [delta(reasoning_content=character) for character in say.reasoning]
    parts += [delta(content=character) for character in say.text]
    for index, call in enumerate(say.calls):
        head = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        parts.append(delta(tool_calls=[head]))
        parts += [delta(tool_calls=[{"index": index, "function": {"arguments": c}}]) for c in call.arguments]
        if index == 0 and say.hold is not None:
            parts.append(say.hold)
    parts.append({"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(say)}]})
    parts.append({"choices": [], "usage": usage_of(say)})
    return parts


def hear_chat(body: bytes) -> Heard:
    return hear(ChatDialect(), body)


def chat_history(body: bytes) -> bytes:
    """The messages as they were written, without the bracket that ends them and what may follow."""
    text = body.decode()
    start = text.index('"messages":[') + len('"messages":')
    _, end = json.JSONDecoder().raw_decode(text, start)
    return text[start : end - 1].encode()


class ChatContract(HttpContract):
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name"})
    lacks: ClassVar[frozenset[str]] = frozenset({"sealed"})
    combines = None

    def backend(self, url: str) -> Backend:
        return OpenAIBackend(url)

    def keyed(self, url: str, key: str, headers: Mapping[str, str]) -> Backend:
        return OpenAIBackend(url, api_key=key, headers=headers)

    def say(self, item: Say, streamed: bool) -> Step:
        return stream(*in_pieces(item)) if streamed else answer(whole(item))

    def break_off(self, item: BreakOff, streamed: bool) -> Step:
        begun = Say(item.text, item.calls)
        if streamed:
            return stream(*in_pieces(begun)[:-2], done=False, end=item.clean)
        return half_of(orjson.dumps(whole(begun)), item.clean)

    def error_inside(self, item: ErrorInside, streamed: bool) -> Step:
        error = {"error": {"message": item.message, "type": "Error", "code": item.status}}
        return stream(*in_pieces(Say(item.text))[:-2], error) if streamed else answer(error)

    def error_body(self, item: Refuse) -> object:
        param = "input_tokens" if item.overflow else None
        return {"error": {"message": item.message, "type": "Error", "param": param}}

    def hear(self, exchange: Exchange) -> Heard:
        return hear_chat(exchange.body)

    def history(self, exchange: Exchange) -> bytes:
        return chat_history(exchange.body)
