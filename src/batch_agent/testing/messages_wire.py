"""The format of answers of Anthropic's ``/v1/messages``, and a request of it as a script sees it. Pure.

The pieces are those of ``wire``; here they become blocks, one after another, and thoughts get a signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import orjson
from pydantic import JsonValue

from batch_agent.backends.anthropic.answer import OpenBlock
from batch_agent.backends.http.wire import json_of, mapping, objects_of
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.messages import JsonObject, Usage
from batch_agent.testing.request import Request, content_text
from batch_agent.testing.wire import CallPiece, End, Piece, ReasoningPiece, TextPiece, Wire

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class MessagesRequest(Request):
    __slots__ = ()
    dialect = MessagesDialect()

    @property
    def blocks(self) -> list[list[JsonObject]]:
        """Return the blocks of each message."""
        return [blocks_of(message.get("content")) for message in self.messages]

    @property
    def text(self) -> str:
        last = self.blocks[-1] if self.blocks else []
        return "".join(content_text(block.get("content")) + str(block.get("text") or "") for block in last)


class MessagesWire(Wire):
    def __init__(self, request: MessagesRequest) -> None:
        super().__init__(request, model=request.model, fingerprint="scripted")
        self._index = -1  # of the open block
        self._open: JsonObject | None = None
        self._thought = ""
        self._stop = "end_turn"

    def opening(self) -> list[bytes]:
        message = self._message([], None, usage_object(Usage()))
        return [self.sse({"type": "message_start", "message": message}), self.sse({"type": "ping"})]

    def event(self, piece: Piece) -> bytes | None:
        return b"".join(map(self.sse, self._events(piece)))

    def closing(self) -> list[bytes]:
        return [self.sse({"type": "message_stop"})]

    def body(self, pieces: Iterable[Piece]) -> bytes:
        blocks: list[OpenBlock] = []
        usage: JsonValue = None
        for event in (event for piece in pieces for event in self._events(piece)):
            delta = mapping(event.get("delta"))
            if "content_block" in event:
                blocks.append(OpenBlock(mapping(event["content_block"])))
            elif "usage" in event:
                usage = event["usage"]
            elif delta:
                blocks[-1].extend(delta)
        whole = [block.whole() for block in blocks]
        content = [{**block, "input": json_of(said) or {}} if "input" in block else block for block, said in whole]
        return orjson.dumps(self._message([*content], self._stop, usage))

    def error(self, status: int, message: str, param: str | None = None) -> JsonObject:
        return error_object(status, message)

    def sse(self, value: JsonValue) -> bytes:
        kind = value.get("type") if isinstance(value, dict) else None
        return b"event: %b\ndata: %b\n\n" % (str(kind).encode(), orjson.dumps(value))

    def _message(self, content: list[JsonValue], stop: str | None, usage: JsonValue) -> JsonObject:
        told: JsonObject = {"stop_reason": stop, "stop_sequence": None, "usage": usage}
        head: JsonObject = {"id": f"msg_{self.request.number}", "type": "message", "role": "assistant"}
        return {**head, "model": self.request.model, "content": content, **told}

    def _events(self, piece: Piece) -> Iterator[JsonObject]:
        match piece:
            case TextPiece(text):
                yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningPiece(text):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._thought += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallPiece(_, arguments, call_id, name):
                if call_id is not None:
                    yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}}, again=True)
                if arguments:
                    yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            case End(reason):
                yield from self._end()
                self._stop = _STOPS.get(reason, reason)
            case Usage():
                delta: JsonObject = {"stop_reason": self._stop, "stop_sequence": None}
                yield {"type": "message_delta", "delta": delta, "usage": usage_object(piece)}

    def _begin(self, block: JsonObject, *, again: bool = False) -> Iterator[JsonObject]:
        if not again and self._open is not None and self._open["type"] == block["type"]:
            return
        yield from self._end()
        self._index += 1
        self._open = block
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _end(self) -> Iterator[JsonObject]:
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature(self._thought)})
            self._thought = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def signature(thought: str) -> str:
    """Return the signature that shows that a thought is sent back unchanged."""
    return "signed-" + hashlib.sha256(thought.encode()).hexdigest()[:24]


def error_object(status: int, message: str) -> JsonObject:
    return MessagesRequest.dialect.error(status, message)


def usage_object(usage: Usage) -> JsonObject:
    """Return the usage; ``input_tokens`` excludes tokens read from or written to the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def blocks_of(content: JsonValue) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return objects_of(content)
