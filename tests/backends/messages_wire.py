"""A wire for tests in the shape of those that take a history as a whole: the system prompt apart, tool results merged
into one user message and named, signed reasoning sent back, and a cache mark that moves to the end with each turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import orjson

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.messages import Image, JsonObject, Message, Reply, Sealed, ToolCall, Usage

WIRE = "messages"
MARK = b',"cache_control":{"type":"ephemeral"}'


class HistoryView:
    """Every block is encoded once and stays as it is; the last user message is open until the model has answered it."""

    def __init__(self) -> None:
        self.system: list[bytes] = []
        self.closed: list[bytes] = []
        self.open: list[bytes] = []

    def extend(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role == "system":
                self.system += _blocks(message)
            elif message.role == "assistant":
                self.closed += [_message("user", self.open), _message("assistant", _blocks(message))]
                self.open = []
            else:
                self.open += _blocks(message)

    def fork(self) -> HistoryView:
        other = HistoryView()
        other.system, other.closed, other.open = self.system.copy(), self.closed.copy(), self.open.copy()
        return other

    def render(self, shape: RequestShape, tail: JsonObject) -> bytes:
        head = orjson.dumps({"model": shape.model, "tools": [tool.name for tool in shape.tools]})[:-1]
        messages = b",".join([*self.closed, _message("user", _marked(self.open))])
        system = b",".join(_marked(self.system))
        return head + b',"system":[' + system + b'],"messages":[' + messages + b"]," + orjson.dumps(tail)[1:]


def _blocks(message: Message) -> list[bytes]:
    blocks: list[object] = []
    if message.sealed is not None and message.sealed.wire == WIRE:
        blocks.append(message.sealed.value)
    if message.role == "tool":
        known = {"tool_use_id": message.tool_call_id, "name": message.tool_name, "content": message.content}
        blocks.append({"type": "tool_result", **known})
    else:
        parts = (message.content,) if isinstance(message.content, str) else message.content
        blocks += [
            _image(part) if isinstance(part, Image) else {"type": "text", "text": part} for part in parts if part
        ]
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.loads(call.arguments)})
    return [orjson.dumps(block) for block in blocks]


def _image(image: Image) -> object:
    kind, _, data = image.url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _message(role: str, blocks: list[bytes]) -> bytes:
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(blocks))


def _marked(blocks: list[bytes]) -> list[bytes]:
    return [*blocks[:-1], blocks[-1][:-1] + MARK + b"}"] if blocks else []


class MessagesBackend:
    """Answers by ``script``, which sees a body and gives the blocks of the answer."""

    name = "messages://"
    capabilities = Capabilities(images=True)

    def __init__(self, script: Callable[[JsonObject], list[JsonObject]]) -> None:
        self._script = script
        self.bodies: list[bytes] = []
        self.requests: list[ModelRequest] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self, shape: RequestShape) -> None: ...

    async def models(self) -> list[str]:
        return ["m"]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        body = request.conversation.view(HistoryView).render(request.shape, {"metadata": {"user_id": request.agent}})
        self.requests.append(request)
        self.bodies.append(body)
        return _reply(self._script(orjson.loads(body)))


def _reply(blocks: list[JsonObject]) -> Reply:
    sealed = next((Sealed(WIRE, block) for block in blocks if block["type"] == "thinking"), None)
    text = "".join(str(block["text"]) for block in blocks if block["type"] == "text")
    calls = [
        ToolCall(str(block["id"]), str(block["name"]), orjson.dumps(block["input"]).decode())
        for block in blocks
        if block["type"] == "tool_use"
    ]
    usage = Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=10, cache_write_tokens=30)
    return Reply(text, tuple(calls), usage, sealed=sealed)
