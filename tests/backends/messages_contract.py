"""The contract on the wire of ``messages_wire``: what its server says and hears."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import orjson

from backends.http_contract import HttpContract
from backends.messages_wire import MARK, MessagesBackend
from backends.peer import BreakOff, ErrorInside, Heard, Refuse, Say
from backends.wire import Exchange, Step, answer, half_of, parsed, stream
from batch_agent.backends.base import Backend
from batch_agent.messages import Image, Message, ToolCall, ToolSpec, Usage


def whole_blocks(say: Say) -> list[dict]:
    blocks: list[dict] = []
    if say.reasoning:
        blocks.append({"type": "thinking", "thinking": say.reasoning, "signature": say.sealed})
    if say.text:
        blocks.append({"type": "text", "text": say.text})
    for call in say.calls:
        known = {"id": call.id, "name": call.name, "input": parsed(call.arguments)}
        blocks.append({"type": "tool_use", **known})
    return blocks


def whole(say: Say) -> dict:
    return {"content": whole_blocks(say), "why": "length" if say.cut else "end", "usage": usage_of(say.usage)}


def usage_of(usage: Usage) -> dict:
    return {
        "input": usage.prompt_tokens,
        "read": usage.cached_tokens,
        "output": usage.completion_tokens,
        "thought": usage.reasoning_tokens,
        "written": usage.cache_write_tokens,
    }


def in_pieces(say: Say) -> Iterator[object]:
    texts = [say.reasoning, say.text, *(call.arguments for call in say.calls)]
    blocks = [{"type": "thinking"}, {"type": "text"}]
    blocks += [{"type": "tool_use", "id": call.id, "name": call.name} for call in say.calls]
    hold = say.hold
    for block, text in zip(blocks, texts, strict=True):
        if not text and block["type"] != "tool_use":
            continue
        yield {"type": "begin", "block": block}
        yield from ({"type": "piece", "text": character} for character in text)
        yield {"type": "end", "block": {"signature": say.sealed} if block["type"] == "thinking" else {}}
        if block["type"] == "tool_use" and hold is not None:
            yield hold
            hold = None
    yield {"type": "done", "why": "length" if say.cut else "end", "usage": usage_of(say.usage)}


class MessagesContract(HttpContract):
    lacks: ClassVar[frozenset[str]] = frozenset({"broken_whole"})
    reserved = ("system", "messages", "streamed")

    def backend(self, url: str) -> Backend:
        return MessagesBackend(url)

    def say(self, item: Say, streamed: bool) -> Step:
        return stream(*in_pieces(item), done=False) if streamed else answer(whole(item))

    def break_off(self, item: BreakOff, streamed: bool) -> Step:
        begun = Say(item.text, item.calls)
        if streamed:
            return stream(*list(in_pieces(begun))[:-1], done=False, end=item.clean)
        return half_of(orjson.dumps(whole(begun)), item.clean)

    def error_inside(self, item: ErrorInside, streamed: bool) -> Step:
        error = {"type": "error", "error": {"message": item.message, "code": item.status}}
        return stream(*list(in_pieces(Say(item.text)))[:-2], error, done=False) if streamed else answer(error)

    def error_body(self, item: Refuse) -> object:
        return {"error": {"message": item.message, "param": "input_tokens" if item.overflow else None}}

    def hear(self, exchange: Exchange) -> Heard:
        body = exchange.json
        blocks = [block for message in body["messages"] for block in message["content"]]
        return Heard(
            model=body["model"],
            messages=[*(Message("system", block["text"]) for block in body["system"]), *_messages(body["messages"])],
            tools=[ToolSpec(tool["name"], tool["description"], tool["input_schema"]) for tool in body["tools"]],
            tool_choice=body.get("choice"),
            schema=body.get("answer_schema"),
            max_tokens=body.get("limit"),
            temperature=body.get("temperature"),
            top_p=body.get("top_p"),
            seed=body.get("seed"),
            stop=body.get("stop_sequences", ()),
            extra=body,
            seals=[block["signature"] for block in blocks if block["type"] == "thinking"],
            streamed=body.get("streamed", False),
        )

    def history(self, exchange: Exchange) -> bytes:
        body = exchange.body
        return body[body.index(b'"system":[') : body.rindex(MARK)]


def _messages(sent: list[dict]) -> Iterator[Message]:
    for message in sent:
        blocks = message["content"]
        if message["role"] == "assistant":
            text = "".join(block["text"] for block in blocks if block["type"] == "text")
            calls = [
                ToolCall(block["id"], block["name"], orjson.dumps(block["input"]).decode())
                for block in blocks
                if block["type"] == "tool_use"
            ]
            yield Message("assistant", text, tuple(calls))
            continue
        pictures = any(block["type"] == "image" for block in blocks)
        if pictures:
            yield Message("user", tuple(_part(block) for block in blocks))
        for block in blocks if not pictures else ():
            if block["type"] == "tool_result":
                known = {"tool_call_id": block["tool_use_id"], "tool_name": block["name"]}
                yield Message("tool", block["content"], **known)
            else:
                yield Message("user", block["text"])


def _part(block: dict) -> str | Image:
    if block["type"] == "text":
        return str(block["text"])
    return Image(f"data:{block['source']['media_type']};base64,{block['source']['data']}")
