"""A wire for tests in the shape of those that take a history as a whole: the system prompt apart, tool results merged
into one user message and named, signed reasoning sent back, and a cache mark that moves to the end with each turn.

It is an example of a backend in one file, too. A stream has a line for each event: ``begin`` a block, a ``piece`` of
it, its ``end``, and ``done`` with why and with the usage; or an ``error``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import orjson

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.http.backend import HttpBackend
from batch_agent.backends.http.client import HttpClient
from batch_agent.backends.http.sse import SSEParser
from batch_agent.backends.http.wire import Naming, counted, echoed_object, object_of, usage_of, written, written_options
from batch_agent.backends.openai.model_list import read_models
from batch_agent.errors import Truncated
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

    def render(self, head: bytes, tail: JsonObject) -> bytes:
        messages = b",".join([*self.closed, _message("user", _marked(self.open))])
        system = b",".join(_marked(self.system))
        end = b"]," + orjson.dumps(tail)[1:] if tail else b"]}"
        return head[:-1] + b',"system":[' + system + b'],"messages":[' + messages + end


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
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": echoed_object(call.arguments)})
    return [written(block) for block in blocks]


def _image(image: Image) -> object:
    kind, _, data = image.url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _message(role: str, blocks: list[bytes]) -> bytes:
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(blocks))


def _marked(blocks: list[bytes]) -> list[bytes]:
    return [*blocks[:-1], blocks[-1][:-1] + MARK + b"}"] if blocks else []


class MessagesBackend(HttpBackend):
    def __init__(self, url: str, capabilities: Capabilities | None = None) -> None:
        http = HttpClient(url)
        able = capabilities or Capabilities(images=True, native_schema=True)
        super().__init__(http, http.route("POST", "/messages"), capabilities=able)
        self._models = http.route("GET", "/models")

    async def models(self) -> list[str]:
        return read_models(await self._http.send(self._models) or b"") or []

    def write_head(self, shape: RequestShape, streamed: bool) -> bytes:
        fields: dict[str, object] = {
            "model": shape.model,
            "tools": [
                {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
                for tool in shape.tools
            ],
            "choice": shape.tool_choice if shape.tools else None,
            "answer_schema": shape.schema,
            "limit": shape.max_tokens,
            "temperature": shape.temperature,
            "top_p": shape.top_p,
            "seed": shape.seed,
            "stop_sequences": list(shape.stop) or None,
            "streamed": streamed or None,
        }
        return written_options(shape, fields, ("system", "messages", "streamed"))

    def write_body(self, head: bytes, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        tail: JsonObject = {"metadata": {"user_id": request.agent}}
        own = {name: value for name, value in tail.items() if name not in request.shape.extra_body}
        return request.conversation.view(HistoryView).render(head, own), None

    def read_whole(self, body: bytes, naming: Naming) -> Reply:
        document = _document(body, naming)
        blocks, calls = document["content"], []
        for block in blocks:
            if block["type"] == "tool_use":
                calls.append(naming.call(block["id"], block["name"], orjson.dumps(block["input"]).decode()))
        return _reply(blocks, calls, document["why"], document["usage"], naming)

    def read_stream(
        self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]
    ) -> MessagesStream:
        return MessagesStream(naming, on_tool_call, clock, said)


class MessagesStream:
    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        self._naming = naming
        self._on_tool_call = on_tool_call
        self._clock, self._sent_at = clock, clock()
        self._first_token: float | None = None
        self._said = said
        self._sse = SSEParser()
        self._blocks: list[dict] = []
        self._calls: list[ToolCall] = []
        self._done: dict = {}

    def feed(self, chunk: bytes) -> bool:
        for _, data in self._sse.feed(chunk):
            event = _document(data, self._naming)
            match event["type"]:
                case "begin":
                    self._blocks.append({**event["block"], "text": ""})
                case "piece":
                    self._piece(event["text"])
                case "end":
                    self._end(self._blocks[-1] | event["block"])
                case "done":
                    self._done = event
        return bool(self._done)

    def finish(self) -> Reply:
        if not self._done:
            raise self._naming.faults.bad("the stream stopped before it was done", text="".join(self._said))
        reply = _reply(self._blocks, self._calls, self._done["why"], self._done["usage"], self._naming)
        return Reply(reply.text, reply.tool_calls, reply.usage, reply.reasoning, self._first_token, sealed=reply.sealed)

    def _piece(self, text: str) -> None:
        if self._first_token is None:
            self._first_token = self._clock() - self._sent_at
        self._blocks[-1]["text"] += text
        if self._blocks[-1]["type"] == "text":
            self._said.append(text)

    def _end(self, block: dict) -> None:
        text = block["text"]
        if block["type"] == "thinking":
            block["thinking"] = block.pop("text")
        self._blocks[-1] = block
        if block["type"] == "tool_use":
            self._calls.append(self._naming.call(block["id"], block["name"], text))
            self._on_tool_call(self._calls[-1])


def _document(data: bytes, naming: Naming) -> dict:
    document = object_of(data, naming.faults)
    if document.get("type") == "error":
        raise naming.faults.reported(document["error"])
    return document


def _reply(blocks: list[dict], calls: list[ToolCall], why: str, usage: JsonObject, naming: Naming) -> Reply:
    thoughts = [block for block in blocks if block["type"] == "thinking"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    counts = _usage(usage)
    if why == "length":
        raise Truncated(f"{naming.faults.where}: the answer was cut", text=text, usage=counts, in_call=bool(calls))
    sealed = next((Sealed(WIRE, thought) for thought in thoughts if thought.get("signature")), None)
    reasoning = "".join(thought["thinking"] for thought in thoughts)
    return Reply(text, tuple(calls), counts, reasoning, sealed=sealed)


def _usage(usage: JsonObject) -> Usage:
    return usage_of(
        counted(usage, "input"),
        counted(usage, "read"),
        counted(usage, "output"),
        counted(usage, "thought"),
        counted(usage, "written"),
    )
