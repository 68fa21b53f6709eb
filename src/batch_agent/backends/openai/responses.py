"""OpenAI's ``/responses``, the only API of some models: reads its answers, whole or streamed, and writes its requests.

Nothing is stored on the server (``store: false``): each request has the whole conversation, as items. Reasoning arrives
encrypted and is sent back unchanged between the calls that it led to. So a sealed answer is sent as its original items.

An answer is a list of items: reasoning, calls, messages. A stream reports each item when it is done, and repeats all of
them at the end; the reported calls are those of the Reply. An incomplete answer (cut, failed, filtered) is raised as a
BackendError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import JsonValue

from batch_agent.backends.base import OnToolCall, RequestShape
from batch_agent.backends.http.wire import (
    EventReader,
    Naming,
    counted,
    echoed,
    object_of,
    objects_of,
    string_of,
    usage_of,
    written_options,
)
from batch_agent.backends.openai.chat import JsonView, OpenAIServer, check_finish, error_in
from batch_agent.backends.openai.providers import Dialect, reasons
from batch_agent.errors import SpecError
from batch_agent.messages import (
    Content,
    Document,
    JsonObject,
    Message,
    Part,
    Reply,
    Sealed,
    ToolCall,
    Usage,
)

WIRE = "responses"

_ENDS = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
_TEXT = {"response.output_text.delta", "response.refusal.delta"}
_REASONING = {"response.reasoning_summary_text.delta", "response.reasoning_text.delta"}


def read_response(body: bytes, naming: Naming) -> Reply:
    document = object_of(body, naming.faults)
    items = objects_of(document.get("output"))
    calls = {place: _call(item, naming) for place, item in enumerate(items) if _is_call(item)}
    return _reply(document, items, calls, naming, None)


class ResponseStream(EventReader):
    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        super().__init__(naming, on_tool_call, clock, said)
        self._items: dict[int, JsonObject] = {}  # by position, as far as known
        self._calls: dict[int, ToolCall] = {}
        self._end: JsonObject | None = None

    def finish(self) -> Reply:
        self._close()
        if self._end is None:
            raise self._unfinished()
        items = objects_of(self._end.get("output")) or [self._items[place] for place in sorted(self._items)]
        for place, item in enumerate(items):
            if _is_call(item) and self._end.get("status") == "completed":
                self._settle(place, item)
        return _reply(self._end, items, self._calls, self._naming, self._first_token, self._so_far)

    def _event(self, name: str, event: JsonObject) -> None:
        kind, delta = event.get("type"), string_of(event.get("delta"))
        if kind in _TEXT and delta:
            self._said.append(delta)
        if delta:
            self._begun()
        item, place = event.get("item"), event.get("output_index")
        if kind == "error" or (kind is None and "error" in event):
            raise self._faults.reported(error_in(event) or event)
        if kind in _ENDS:
            response = event.get("response")
            self._end = response if isinstance(response, dict) else {}
            self._done = True
        elif isinstance(place, int):
            if isinstance(item, dict):
                self._items[place] = item
            if kind == "response.function_call_arguments.done" and place in self._items:
                self._settle(place, self._items[place] | {"arguments": event.get("arguments")})
            elif kind == "response.output_item.done" and _is_call(self._items.get(place, {})):
                self._settle(place, self._items[place])

    def _settle(self, place: int, item: JsonObject) -> None:
        """Report a complete call."""
        if place not in self._calls:
            self._calls[place] = _call(item, self._naming)
            self._on_tool_call(self._calls[place])


def _reply(
    document: JsonObject,
    items: list[JsonObject],
    calls: dict[int, ToolCall],
    naming: Naming,
    first_token: float | None,
    said: str = "",
) -> Reply:
    """Build the Reply. ``said`` is the streamed text, for servers that do not repeat it at the end."""
    faults = naming.faults
    if error := error_in(document):
        raise faults.reported(error)
    text = "".join(_text(item) for item in items if item.get("type") == "message") or said
    usage = _usage(document.get("usage"))
    check_finish(_finish(document, bool(calls)), text, bool(calls), usage, faults)
    if not isinstance(document.get("output"), list) and not items:
        raise faults.bad("the answer has no output")
    reasoning = "\n\n".join(filter(None, (_reasoning(item) for item in items)))
    in_order = tuple(calls[place] for place in sorted(calls))
    finish = "tool_calls" if calls else "stop"
    sealed, model = _sealed(items, calls), string_of(document.get("model"))
    return Reply(text, in_order, usage, reasoning, first_token, finish, sealed=sealed, model=model)


def _finish(document: JsonObject, has_calls: bool) -> str:
    """Return the finish reason in the terms of the chat wire, which ``check_finish`` knows."""
    status = string_of(document.get("status"))
    if status == "incomplete":
        details = document.get("incomplete_details")
        reason = string_of(details.get("reason")) if isinstance(details, dict) else ""
        return reason if reason in ("max_output_tokens", "content_filter") else "aborted"
    if status == "completed":
        return "tool_calls" if has_calls else "stop"
    return "cancelled" if status == "cancelled" else "aborted"


def _sealed(items: list[JsonObject], calls: dict[int, ToolCall]) -> Sealed | None:
    """Return all items unchanged if one of them is encrypted reasoning, because reasoning belongs to the items that
    follow it; None otherwise. A call keeps the id that its result will use."""
    if not any(item.get("type") == "reasoning" and item.get("encrypted_content") for item in items):
        return None
    sealed: list[JsonValue] = [
        item | {"call_id": calls[place].id} if place in calls else item for place, item in enumerate(items)
    ]
    return Sealed(WIRE, sealed)


def _is_call(item: JsonObject) -> bool:
    return item.get("type") == "function_call"


def _call(item: JsonObject, naming: Naming) -> ToolCall:
    call_id, name, arguments = (string_of(item.get(field)) for field in ("call_id", "name", "arguments"))
    return naming.call(call_id, name, arguments)


def _text(item: JsonObject) -> str:
    content = item.get("content")
    return "".join(string_of(part.get("text")) or string_of(part.get("refusal")) for part in objects_of(content))


def _reasoning(item: JsonObject) -> str:
    if item.get("type") != "reasoning":
        return ""
    parts = objects_of(item.get("summary")) or objects_of(item.get("content"))
    return "\n\n".join(filter(None, (string_of(part.get("text")) for part in parts)))


def _usage(value: JsonValue) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    details = value.get("input_tokens_details")
    return usage_of(
        prompt=counted(value, "input_tokens"),
        cached=counted(details, "cached_tokens"),
        completion=counted(value, "output_tokens"),
        reasoning=counted(value.get("output_tokens_details"), "reasoning_tokens"),
        written=counted(details, "cache_write_tokens"),
    )


def encode_head(shape: RequestShape, stream: bool, dialect: Dialect) -> bytes:
    """Return the body up to and including the bracket that opens the input. ``extra_body`` overrides other fields."""
    for name, value in {"seed": shape.seed, "stop": shape.stop or None}.items():
        if value is not None:
            raise SpecError(f"{name}: {shape.model} is served at /responses, which accepts no {name}; leave it out")
    fields: dict[str, object] = {
        "model": dialect.deployment or shape.model,
        "max_output_tokens": shape.max_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "store": False,
    }
    if dialect.openai_models and reasons(shape.model):
        fields["include"] = ["reasoning.encrypted_content"]  # a model without reasoning refuses this field
    if shape.tools:
        fields["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,  # the default is true, which would refuse the parameters
            }
            for tool in shape.tools
        ]
        fields["tool_choice"] = _tool_choice(shape.tool_choice)
    if shape.schema is not None:
        form = dialect.schema_form(shape.schema)
        schema = {"type": "json_schema", "name": shape.schema_name, "schema": form.schema, "strict": form.strict}
        fields["text"] = {"format": schema}
    if stream:
        fields["stream"] = True
    return written_options(shape, fields, ("input", "stream"))[:-1] + b',"input":['


class ItemView(JsonView):
    __slots__ = ()

    def extend(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.own += items_of(message)


def items_of(message: Message) -> list[JsonValue]:
    sealed, content = message.sealed, message.content
    if sealed is not None and sealed.wire == WIRE and isinstance(sealed.value, list):
        return sealed.value
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": _content(content)}]
    calls: list[JsonValue] = [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": echoed(call.arguments)}
        for call in message.tool_calls
    ]
    if calls and not content:
        return calls
    return [{"type": "message", "role": message.role, "content": _content(content)}, *calls]


def _content(content: Content) -> JsonValue:
    if isinstance(content, str):
        return content
    return [_part(part) for part in content]


def _part(part: Part) -> JsonValue:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if isinstance(part, Document):
        return {"type": "input_file", "filename": part.name, "file_data": part.url}
    return {"type": "input_image", "image_url": part.url, "detail": "auto"}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "name": choice}
    return choice


class ResponsesBackend(OpenAIServer):
    path = "/responses"
    wire = WIRE
    read_whole = staticmethod(read_response)
    read_stream = ResponseStream
    view = ItemView

    def write_head(self, shape: RequestShape, streamed: bool) -> bytes:
        return encode_head(shape, streamed, self._dialect)
