"""Requests of Anthropic's ``/v1/messages``: a conversation as that wire writes it, the head of a body, and cache marks.

The system prompt stands apart, what the user and the tools say until the next answer is one message, and every call is
answered in the message after it, before anything else. An answer goes back as it came where it had parts that only its
wire can read. A mark (``cache_control``) says up to where the server should keep, or look for, what it has computed;
marks are no part of what is kept, so the rest of a body only grows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import orjson
from pydantic import JsonValue

from batch_agent.backends.anthropic_models import model_of
from batch_agent.backends.anthropic_schema import format_schema
from batch_agent.backends.base import RequestShape, text_only
from batch_agent.compiler.budget import BYTES_PER_TOKEN
from batch_agent.compiler.system import schema_instruction
from batch_agent.errors import SpecError
from batch_agent.messages import Content, Image, JsonObject, Message, ToolCall, ToolSpec

WIRE = "anthropic"
MARK = b',"cache_control":{"type":"ephemeral"}}'
_NO_RESULT = "There is no result of this call."
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]")


class MessagesView:
    """Every block is encoded once and stays as it is. The last question and the answer to it are kept apart from what is
    ``closed``, because a mark may still be put on them; what the user says is ``open`` until the model has answered."""

    __slots__ = ("_owed", "_results", "answer", "asked", "closed", "open", "size", "system")

    def __init__(self) -> None:
        self.system: list[bytes] = []
        self.closed: list[bytes] = []  # whole messages
        self.asked: list[bytes] = []
        self.answer: list[bytes] = []
        self.open: list[bytes] = []
        self.size = 0  # bytes, roughly
        self._owed: tuple[str, ...] = ()  # calls without a result
        self._results = 0  # so many of what is open are results, and come first

    def fork(self) -> Self:
        other = type(self)()
        other.system, other.closed = self.system.copy(), self.closed.copy()
        other.asked, other.answer, other.open = self.asked.copy(), self.answer.copy(), self.open.copy()
        other.size, other._owed, other._results = self.size, self._owed, self._results
        return other

    def extend(self, messages: Sequence[Message]) -> None:
        for message in messages:
            blocks = [_encode(block) for block in _blocks(message)]
            self.size += sum(map(len, blocks))
            if message.role == "assistant":
                self._answered(message, blocks)
            elif message.role == "tool":
                self.open[self._results : self._results] = blocks
                self._results += 1
                self._owed = tuple(call for call in self._owed if call != _fit(message.tool_call_id))
            elif message.role == "system" and not (self.open or self.answer):
                self.system += blocks
            else:
                self.open += blocks

    def _answered(self, message: Message, blocks: list[bytes]) -> None:
        if not blocks:
            return  # an answer of nothing is no message: the user goes on speaking
        if not self.open and self.answer:
            self.answer += blocks
        else:
            self.closed += self._last_exchange(marked=False)
            self.asked, self.answer, self.open, self._results = self.said_now(), blocks, [], 0
        self._owed = tuple(_fit(call.id) for call in message.tool_calls)

    def said_now(self) -> list[bytes]:
        """The user's message as it stands: calls that nobody answered are answered so that the server takes it."""
        missing = [_encode(_result(call, _NO_RESULT) | {"is_error": True}) for call in self._owed]
        return [*self.open[: self._results], *missing, *self.open[self._results :]]

    def messages(self, *, marks_end: bool, marks_last: bool, paused: Sequence[bytes] = ()) -> bytes:
        """All of them. ``paused`` is what the model has said of its answer so far."""
        now = self.said_now()
        whole = [*self.closed, *self._last_exchange(marked=marks_last)]
        if now:
            whole.append(_message("user", _marked(now) if marks_end else now))
        if paused:
            whole.append(_message("assistant", paused))
        return b",".join(whole)

    def _last_exchange(self, *, marked: bool) -> list[bytes]:
        asked = _marked(self.asked) if marked else self.asked
        exchange = (("user", asked), ("assistant", self.answer))
        return [_message(role, blocks) for role, blocks in exchange if blocks]


@dataclass(frozen=True, slots=True)
class Head:
    """What requests of one shape begin with."""

    fields: bytes  # without the brace that would close them
    tools: Sequence[bytes]
    told: bytes | None  # a block of the system prompt: the schema, where the API has no form for it
    cached_from: int  # bytes
    goes_on: bool  # the agent will use tools, so its next turn repeats this one

    def body(self, view: MessagesView, *, last_turn: bool, paused: Sequence[bytes] = ()) -> bytes:
        """At most three marks: behind what all agents share; behind the question before, of which there is something
        to read; and at the end, if there will be a next turn to read it."""
        system = [*view.system, self.told] if self.told else view.system
        tools = self.tools
        shared = sum(map(len, tools)) + sum(map(len, system))
        if shared >= self.cached_from:
            tools, system = (tools, _marked(system)) if system else (_marked(tools), system)
        is_long = self.goes_on and shared + view.size >= self.cached_from
        parts = [self.fields]
        if tools:
            parts += [b',"tools":[', b",".join(tools), b"]"]
        if system:
            parts += [b',"system":[', b",".join(system), b"]"]
        messages = view.messages(marks_end=is_long and not last_turn, marks_last=is_long, paused=paused)
        return b"".join([*parts, b',"messages":[', messages, b"]}"])


def build_head(shape: RequestShape, stream: bool) -> Head:
    extra = dict(shape.extra_body)
    for name in ("messages", "stream", "system"):
        if name in extra:
            raise SpecError(f"extra_body cannot set {name!r}: it is what a request is made of")
    model = model_of(shape.model)
    # Tools of the server's own (a web search) are named in extra_body and stand behind ours.
    own_tools, config = extra.pop("tools", []), extra.pop("output_config", {})
    if not isinstance(own_tools, list) or not isinstance(config, dict):
        raise SpecError("extra_body: tools must be a list, output_config a mapping")
    form = None if shape.schema is None else format_schema(shape.schema)
    if form is not None:
        config = {"format": {"type": "json_schema", "schema": form}, **config}
    fields: JsonObject = {
        "model": shape.model,
        "max_tokens": shape.max_tokens or model.max_tokens + _thinking_budget(extra.get("thinking")),
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "stop_sequences": [*shape.stop] or None,
        "output_config": config or None,
        "tool_choice": _tool_choice(shape.tool_choice) if shape.tools else None,
        "stream": True if stream else None,
    }
    fields = {name: value for name, value in fields.items() if value is not None} | extra
    try:
        return Head(
            fields=orjson.dumps(fields)[:-1],
            tools=tuple(map(orjson.dumps, [*map(_tool, shape.tools), *own_tools])),
            told=_told(shape.schema) if form is None and shape.schema is not None else None,
            cached_from=model.cached_from * BYTES_PER_TOKEN,
            goes_on=bool(shape.tools or own_tools) and shape.tool_choice != "none",
        )
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def encode_blocks(blocks: Sequence[JsonObject]) -> list[bytes]:
    """Of an answer that goes back before it is complete."""
    return [_encode(block) for block in blocks]


def _encode(block: JsonObject) -> bytes:
    try:
        return orjson.dumps(block)
    except orjson.JSONEncodeError:
        return orjson.dumps(_mended(block))


def _mended(value: JsonValue) -> JsonValue:
    """Without halves of surrogate pairs, from a file read with errors ignored: no JSON reader would take them."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {name: _mended(part) for name, part in value.items()}
    return [_mended(part) for part in value] if isinstance(value, list) else value


def _blocks(message: Message) -> list[JsonObject]:
    if message.role == "tool":
        return [_result(_fit(message.tool_call_id), message.content)]
    if message.role == "system":
        return _parts(text_only(message))
    if message.sealed is not None and message.sealed.wire == WIRE and isinstance(message.sealed.value, list):
        return [block for block in message.sealed.value if isinstance(block, dict)]
    return [*_parts(message.content), *map(_call, message.tool_calls)]


def _parts(content: Content) -> list[JsonObject]:
    """Text without a word in it is refused, so it is left out."""
    parts = (content,) if isinstance(content, str) else content
    return [
        _image(part) if isinstance(part, Image) else {"type": "text", "text": part}
        for part in parts
        if isinstance(part, Image) or part.strip()
    ]


def _image(image: Image) -> JsonObject:
    kind, is_data, data = image.url.removeprefix("data:").partition(";base64,")
    if is_data:
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    return {"type": "image", "source": {"type": "url", "url": image.url}}


def _call(call: ToolCall) -> JsonObject:
    return {"type": "tool_use", "id": _fit(call.id), "name": call.name, "input": arguments_object(call.arguments)}


def _result(call_id: str, content: Content) -> JsonObject:
    block: JsonObject = {"type": "tool_result", "tool_use_id": call_id}
    if isinstance(content, str):
        return block | {"content": content} if content.strip() else block
    return block | {"content": [*_parts(content)]}


def arguments_object(arguments: str) -> JsonObject:
    """A model's arguments as the API takes them back. What it really wrote is in the tool's error message."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _fit(call_id: str) -> str:
    """The id of a call, which another wire may have given, in the letters that this one allows."""
    return _UNFIT.sub("_", call_id)


def _tool(tool: ToolSpec) -> JsonObject:
    return {"name": tool.name, "description": tool.description, "input_schema": {"type": "object", **tool.parameters}}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if not isinstance(choice, str):
        return choice
    known: dict[str, JsonValue] = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}
    return known.get(choice, {"type": "tool", "name": choice})


def _told(schema: JsonObject) -> bytes:
    return _encode({"type": "text", "text": schema_instruction(orjson.dumps(schema).decode())})


def _thinking_budget(thinking: JsonValue) -> int:
    """What the user allows for thoughts is part of what an answer may have."""
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return budget if isinstance(budget, int) else 0


def _message(role: str, blocks: Sequence[bytes]) -> bytes:
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(blocks))


def _marked(blocks: Sequence[bytes]) -> list[bytes]:
    return [*blocks[:-1], blocks[-1][:-1] + MARK] if blocks else []
