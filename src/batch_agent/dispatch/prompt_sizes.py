"""Sizes of requests as they are sent: bytes of text, pictures and files, and the limits of the answer.

A prompt grows from turn to turn, and starts with the same prefix as all other rows. So most of it was counted before:
in the previous turn, or in the shortest prompt of any row so far.

A user's ``extra_body`` and the body of a gateway's client are sent too. They may have text, files and limits that no
option of the run has, so both are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from pydantic import JsonValue
from pydantic_core import to_json

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.plan import tool_text
from batch_agent.compiler.tokens import size_bytes
from batch_agent.messages import IMAGE_TOKENS, Conversation, Message, Usage
from batch_agent.scheduler.budget import Counted
from batch_agent.value_type import value_type

MESSAGE_BYTES = 16  # a role, an id and the markers that a chat template adds per message or call
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
CHOICES = ("n", "best_of")
# Parts of a prompt that are not text, by their type or by their field.
FILE_PARTS = frozenset(
    ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file")
) | {"input_file", "document", "container_upload"}
STORED = ("previous_response_id", "conversation", "prompt", "container")  # refer to text that the server keeps
SERVER_TOOLS = ("web_search_options", "plugins", "search_parameters", "mcp_servers", "data_sources", "enable_search")
CLIENT_TOOLS = (None, "function", "custom", "namespace")  # all others run at the server, and add to the prompt


@value_type
class RequestSize:
    """What a request sends. ``attached`` is the usual number of tokens of its pictures and files. ``max_tokens`` limits
    each of its ``choices``; None: no limit."""

    prompt_bytes: int = 0
    attached: int = 0
    max_tokens: int | None = None
    choices: int = 1


NOT_MEASURED = RequestSize()


@dataclass(slots=True, eq=False)
class _Shape:
    """What is known about requests of one shape."""

    size: RequestSize  # without the messages
    shared: WeakKeyDictionary[Conversation, Counted]  # the prefix that all rows share
    latest: WeakKeyDictionary[Conversation, Counted]  # the latest prompt of each conversation


class PromptSizes:
    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[RequestShape, _Shape] = WeakKeyDictionary()
        self._limits: WeakKeyDictionary[RequestShape, int | None] = WeakKeyDictionary()

    def limit(self, shape: RequestShape, max_tokens: int | None) -> None:
        """Set the limit of an answer that requests of this shape have, unless the user's own fields have one."""
        self._limits[shape] = max_tokens

    def measure(self, request: ModelRequest) -> RequestSize:
        shape = self._shape(request.shape)
        if request.client is not None:
            fields = request.client.fields
            return client_size(fields, self._max_tokens(request.shape, fields))
        size, text, attached = shape.size, shape.size.prompt_bytes, shape.size.attached
        # An answer's sealed parts are sent back. Later turns know what the server counted for them.
        sealed = request.conversation not in shape.latest
        for message in request.conversation.messages:
            message_bytes, message_attached = _message_size(message, sealed=sealed)
            text += message_bytes
            attached += message_attached
        return RequestSize(text, attached, size.max_tokens, size.choices)

    def known(self, request: ModelRequest) -> Counted | None:
        """Return the longest prefix of the prompt that was counted before."""
        shape, conversation = self._shape(request.shape), request.conversation
        found = shape.latest.get(conversation)
        if found is None and conversation.parent is not None:
            found = shape.shared.get(conversation.parent)
        return found

    def learn(self, request: ModelRequest, size: RequestSize, usage: Usage) -> Counted:
        """Learn from an answer. ``size`` is that of the request when it was sent. Returns what the server counted for
        the first time: all of the prompt, or what is new in it since the previous turn."""
        counted = Counted(size.prompt_bytes, usage.prompt_tokens, size.attached)
        if not usage.prompt_tokens:
            return Counted(0, 0)
        shape, conversation = self._shape(request.shape), request.conversation
        before = shape.latest.get(conversation)
        # Some wires send encrypted reasoning back; it then counts as prompt.
        tokens = usage.prompt_tokens + usage.reasoning_tokens
        shape.latest[conversation] = Counted(size.prompt_bytes, tokens, size.attached)
        if (parent := conversation.parent) is not None:
            least = shape.shared.get(parent)
            if least is None:
                text, attached = _messages_size(parent.messages)
                text, attached = text + shape.size.prompt_bytes, attached + shape.size.attached
                shape.shared[parent] = Counted(text, usage.prompt_tokens, attached)
            elif usage.prompt_tokens < least.tokens:
                shape.shared[parent] = Counted(least.prompt_bytes, usage.prompt_tokens, least.attached)
        if before is None:
            return counted
        return Counted(
            max(0, counted.prompt_bytes - before.prompt_bytes),
            max(0, counted.tokens - before.tokens),
            max(0, counted.attached - before.attached),
        )

    def _shape(self, shape: RequestShape) -> _Shape:
        known = self._shapes.get(shape)
        if known is None:
            size = _shape_size(shape, self._max_tokens(shape, shape.extra_body))
            known = _Shape(size, WeakKeyDictionary(), WeakKeyDictionary())
            self._shapes[shape] = known
        return known

    def _max_tokens(self, shape: RequestShape, fields: Mapping[str, JsonValue]) -> int | None:
        """Return the limit of an answer that applies beside those in ``fields``. A limit that the backend sets itself
        applies only if there is no other."""
        return self._limits.get(shape, shape.max_tokens) if fields.keys().isdisjoint(LIMITS) else shape.max_tokens


def _messages_size(messages: Iterable[Message]) -> tuple[int, int]:
    sizes = [_message_size(message, sealed=False) for message in messages]
    return sum(size for size, _ in sizes), sum(attached for _, attached in sizes)


def _message_size(message: Message, *, sealed: bool) -> tuple[int, int]:
    """Return the bytes of the text, and the usual tokens of the pictures and files."""
    size, attached, content = MESSAGE_BYTES, 0, message.content
    if isinstance(content, str):
        size += size_bytes(content)
    else:
        for part in content:
            if isinstance(part, str):
                size += size_bytes(part)
            else:
                attached += part.tokens
    for call in message.tool_calls:
        size += MESSAGE_BYTES + size_bytes(call.name) + size_bytes(call.arguments)
    if sealed and message.sealed is not None:
        size += len(to_json(message.sealed.value))
    return size, attached


def _shape_size(shape: RequestShape, max_tokens: int | None) -> RequestSize:
    """Return the size of the tools, the schema and the user's own fields. Providers write an enforced schema into the
    prompt too."""
    size = 0 if shape.schema is None else len(to_json(shape.schema))
    size += sum(size_bytes(tool_text(tool)) for tool in shape.tools)
    if not shape.extra_body:
        return RequestSize(size, max_tokens=max_tokens)
    extra = client_size(shape.extra_body, max_tokens)
    return RequestSize(size + extra.prompt_bytes, extra.attached, extra.max_tokens, extra.choices)


# The fields of a body


def client_size(fields: Mapping[str, JsonValue], max_tokens: int | None) -> RequestSize:
    """Return the size of a body, or of the fields that a user adds to one. ``max_tokens`` is the limit of the run."""
    files, part_bytes = _files(fields)
    tools = fields.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") not in CLIENT_TOOLS:
            files += IMAGE_TOKENS
    files += IMAGE_TOKENS * sum(fields.get(name) is not None for name in (*STORED, *SERVER_TOOLS))
    size = max(0, len(to_json(fields)) - part_bytes)
    inner = fields.get("additionalModelRequestFields")
    given = {**fields, **inner} if isinstance(inner, dict) else fields
    choices = max([1, *(number for name in CHOICES if (number := _whole(given.get(name))))])
    return RequestSize(size, files, _limit(given, max_tokens), choices)


def _limit(fields: Mapping[str, JsonValue], max_tokens: int | None) -> int | None:
    """Return the largest limit of an answer among these fields and the run's own; None if one of them lifts it."""
    limits = [] if max_tokens is None else [max_tokens]
    for name in LIMITS:
        if name in fields:
            number = _whole(fields[name])
            if number is None:
                return None
            limits.append(number)
    return max(limits, default=None)


def _whole(value: JsonValue) -> int | None:
    """Return a number as servers read it: some accept "512" and 512.0 too."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value) if len(value) < 20 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**53:
        return None
    return int(value)


def _files(fields: Mapping[str, JsonValue]) -> tuple[int, int]:
    """Return the usual tokens of all pictures and files, and the bytes of their parts, which are not text."""
    tokens = part_bytes = 0
    rest: list[object] = list(fields.values())
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, Mapping):
            if _is_file(value):
                tokens += IMAGE_TOKENS
                part_bytes += len(to_json(value))
            else:
                rest += value.values()
    return tokens, part_bytes


def _is_file(part: Mapping[str, object]) -> bool:
    kind = part.get("type")
    if not isinstance(kind, str):  # vLLM accepts parts without a type
        return not FILE_PARTS.isdisjoint(part)
    if kind not in FILE_PARTS:
        return False
    source = part.get("source")
    return not (isinstance(source, Mapping) and source.get("type") in ("text", "content"))
