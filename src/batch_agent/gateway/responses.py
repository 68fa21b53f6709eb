"""The dialect of ``/v1/responses``: writes answers, whole or as numbered events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batch_agent.backends.http.wire import echoed_object
from batch_agent.gateway.chat import ChatDialect
from batch_agent.gateway.client_request import ClientRequest, Envelope, RequestKind, objects, own_document, sse
from batch_agent.gateway.responses_request import custom_tools, namespaces, read_items, read_shape, stored
from batch_agent.messages import JsonObject, Message, Reply, Usage

CUT = {"length", "max_tokens", "max_output_tokens"}
ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text"),
    *("tool_choice", "tools", "top_p", "truncation", "user"),
)
DEFAULTS: JsonObject = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


class ResponsesDialect(ChatDialect):
    """Errors have the same format as in the chat dialect."""

    wire = "responses"

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        lost = stored(body)
        return RequestKind(read_shape(body, model, lost), lost, custom_tools(body), namespaces(body))

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        return read_items(body, lost)

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        if (own := own_document(reply, self.wire)) is not None:
            return own
        is_cut = reply.finish_reason in CUT
        echoed: JsonObject = {name: request.body.get(name, DEFAULTS.get(name)) for name in ECHOED}
        return {
            "id": f"resp_{envelope.name}",
            "object": "response",
            "created_at": envelope.created,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": envelope.model,
            "output": [*_items(reply, request, envelope.name)],
            "previous_response_id": None,
            "store": False,
            **echoed,
            "usage": _written_usage(reply.usage),
        }

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        for place, event in enumerate(_events(document)):
            yield sse({**event, "sequence_number": place}, str(event["type"]))

    def error_event(self, status: int, message: str) -> bytes:
        error: JsonObject = {"code": "server_error" if status >= 500 else "invalid_request", "message": message}
        response: JsonObject = {"object": "response", "status": "failed", "error": error, "output": []}
        return sse({"type": "response.failed", "response": response, "sequence_number": 0}, "response.failed")


def _items(reply: Reply, request: ClientRequest, name: str) -> Iterator[JsonObject]:
    if reply.reasoning:
        summary: JsonObject = {"type": "summary_text", "text": reply.reasoning}
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [summary]}
    if reply.text or not reply.tool_calls:
        text: JsonObject = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        yield {"id": f"msg_{name}", "type": "message", "status": "completed", "role": "assistant", "content": [text]}
    for place, call in enumerate(reply.tool_calls):
        head: JsonObject = {"id": f"fc_{name}_{place}", "status": "completed", "call_id": call.id, "name": call.name}
        if call.name in request.kind.custom_tools:
            given = echoed_object(call.arguments).get("input")
            yield {**head, "type": "custom_tool_call", "input": given if isinstance(given, str) else call.arguments}
        else:
            space = request.kind.namespaces.get(call.name)
            own: JsonObject = {} if space is None else {"namespace": space[0], "name": space[1]}
            yield {**head, **own, "type": "function_call", "arguments": call.arguments}


def _events(document: JsonObject) -> Iterator[JsonObject]:
    started = {**document, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for place, item in enumerate(objects(document.get("output"), "output")):
        at: JsonObject = {"output_index": place}
        beside: JsonObject = {**at, "item_id": item.get("id")}
        opened, inner = _inside(item)
        yield {"type": "response.output_item.added", **at, "item": opened}
        for event in inner:
            yield {**event, **beside}
        yield {"type": "response.output_item.done", **at, "item": item}
    ends = {"completed", "incomplete", "failed"}
    status = document.get("status")
    yield {"type": f"response.{status if status in ends else 'completed'}", "response": document}


def _inside(item: JsonObject) -> tuple[JsonObject, Sequence[JsonObject]]:
    """Return the start of an item, and the events that fill it."""
    begun = {**item, "status": "in_progress"} if "status" in item else item
    match item.get("type"):
        case "message":
            return {**begun, "content": []}, [*_parts(item)]
        case "reasoning":
            return {**begun, "summary": []}, [*_summary(item)]
        case "function_call":
            arguments = item.get("arguments")
            kind = "response.function_call_arguments"
            told: list[JsonObject] = [{"type": f"{kind}.delta", "delta": arguments}]
            return {**begun, "arguments": ""}, [
                *told,
                {"type": f"{kind}.done", "arguments": arguments, "name": item.get("name")},
            ]
        case "custom_tool_call":
            given, kind = item.get("input"), "response.custom_tool_call_input"
            return {**begun, "input": ""}, [
                {"type": f"{kind}.delta", "delta": given},
                {"type": f"{kind}.done", "input": given},
            ]
    return begun, []


def _parts(item: JsonObject) -> Iterator[JsonObject]:
    for index, part in enumerate(objects(item.get("content"), "content")):
        at: JsonObject = {"content_index": index}
        name = "refusal" if part.get("type") == "refusal" else "text"
        kind = "response.refusal" if name == "refusal" else "response.output_text"
        words = part.get(name)
        extra: JsonObject = {} if name == "refusal" else {"logprobs": []}
        yield {"type": "response.content_part.added", **at, "part": {**part, name: ""}}
        if words:
            yield {"type": f"{kind}.delta", **at, "delta": words, **extra}
        yield {"type": f"{kind}.done", **at, name: words, **extra}
        yield {"type": "response.content_part.done", **at, "part": part}


def _summary(item: JsonObject) -> Iterator[JsonObject]:
    kind = "response.reasoning_summary"
    for index, part in enumerate(objects(item.get("summary"), "summary")):
        at: JsonObject = {"summary_index": index}
        text = part.get("text")
        yield {"type": f"{kind}_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": f"{kind}_text.delta", **at, "delta": text}
        yield {"type": f"{kind}_text.done", **at, "text": text}
        yield {"type": f"{kind}_part.done", **at, "part": part}


def _written_usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
