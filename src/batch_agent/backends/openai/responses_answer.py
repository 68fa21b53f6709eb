"""Answers of ``/responses``, whole or streamed, read into a Reply. Pure.

An answer is a list of items: reasoning, calls, messages. A stream reports each item when it is done, and repeats all of
them at the end; the reported calls are those of the Reply. An incomplete answer (cut, failed, filtered) is raised as a
BackendError.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import JsonValue

from batch_agent.backends.base import OnToolCall
from batch_agent.backends.http.wire import EventReader, Naming, counted, object_of, objects_of, string_of, usage_of
from batch_agent.backends.openai.chat import check_finish, error_in
from batch_agent.messages import JsonObject, Reply, Sealed, ToolCall, Usage

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
            self._end, self._done = response if isinstance(response, dict) else {}, True
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
    """Return all items unchanged if there is encrypted reasoning among them, because it belongs to what follows it. A
    call keeps the id that its result will use."""
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
