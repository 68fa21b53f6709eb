"""The ``/responses`` wire from the server's side: how it answers, and what it refuses and hears of a request."""

from __future__ import annotations

import orjson
from tests.backends.strict_mode import Refused, judge

from batch_agent.gateway.responses import ResponsesDialect
from batch_agent.testing.contract.peer import Heard, Say, hear
from batch_agent.testing.contract.wire import dumped

FIELDS = {
    *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "text"),
    *("store", "include", "stream", "reasoning", "metadata", "prompt_cache_key", "parallel_tool_calls", "user"),
    *("previous_response_id", "truncation", "service_tier", "safety_identifier", "top_logprobs", "background"),
}


def items_of(say: Say) -> list[dict]:
    items: list[dict] = []
    if say.reasoning or say.sealed:
        summary = [{"type": "summary_text", "text": say.reasoning}] if say.reasoning else []
        items.append({"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": say.sealed or None})
    if say.text:
        part = {"type": "output_text", "text": say.text, "annotations": []}
        status = "incomplete" if say.cut else "completed"
        items.append(
            {"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": [part]},
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in enumerate(say.calls)
    ]
    return items


def document(say: Say, output: list[dict] | None = None, status: str | None = None) -> dict:
    usage = say.usage
    status = status or ("incomplete" if say.cut else "completed")
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 0,
        "model": "test-model",
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "output": items_of(say) if output is None else output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.cache_write_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def events_of(say: Say) -> list[object]:
    """The parts of a stream, the answer's end last."""
    begun = document(say, [], "in_progress") | {"usage": None}
    events: list[object] = [{"type": "response.created", "response": begun}]
    calls = 0
    for place, item in enumerate(items_of(say)):
        where = {"output_index": place, "item_id": item["id"]}
        empty = {"reasoning": {"summary": []}, "message": {"content": []}, "function_call": {"arguments": ""}}
        bare = item | empty[item["type"]] | ({} if item["type"] == "reasoning" else {"status": "in_progress"})
        events.append({"type": "response.output_item.added", "output_index": place, "item": bare})
        match item["type"]:
            case "reasoning":
                events += [_delta("reasoning_summary_text", c, where | {"summary_index": 0}) for c in say.reasoning]
            case "message":
                part = where | {"content_index": 0}
                shown = {"type": "output_text", "text": "", "annotations": []}
                events.append({"type": "response.content_part.added", **part, "part": shown})
                events += [_delta("output_text", c, part | {"logprobs": []}) for c in say.text]
                if not say.cut:
                    done = {"type": "response.output_text.done", "text": say.text, "logprobs": []}
                    events.append(done | part)
                    events.append({"type": "response.content_part.done", **part, "part": item["content"][0]})
            case "function_call":
                events += [_delta("function_call_arguments", c, where) for c in item["arguments"]]
                done = {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
                events.append(done | where | {"name": item["name"]})
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
        if item["type"] == "function_call" and calls == 0 and say.hold is not None:
            events.append(say.hold)
        calls += item["type"] == "function_call"
    end = document(say)
    return [*events, {"type": f"response.{end['status']}", "response": end}]


def as_bytes(events: list[object]) -> list[object]:
    numbered = enumerate(events)
    return [
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumped(event | {"sequence_number": number}))
        if isinstance(event, dict)
        else event
        for number, event in numbered
    ]


def _delta(kind: str, text: str, where: dict) -> dict:
    return {"type": f"response.{kind}.delta", "delta": text, **where}


def refuse_wrong(fields: dict) -> None:
    """Raises Refused for what the API would answer with a 400."""
    if unknown := fields.keys() - FIELDS:
        raise Refused(f"Unknown parameter: '{sorted(unknown)[0]}'.")
    model = fields["model"]
    if model.startswith(("o", "gpt-5")) and (wrong := {"temperature", "top_p"} & fields.keys()):
        raise Refused(f"Unsupported parameter: '{sorted(wrong)[0]}' is not supported with this model.")
    for tool in fields.get("tools", ()):
        if tool.get("strict", True):
            judge({"schema": tool["parameters"], "strict": True})
    if form := (fields.get("text") or {}).get("format"):
        judge(form)
    open_calls: set[str] = set()
    waits = ""
    for item in fields["input"]:
        kind = item.get("type", "message")
        if waits and kind not in ("function_call", "message", "reasoning"):
            raise Refused(f"Item '{waits}' of type 'reasoning' was provided without its required following item.")
        waits = ""
        if kind == "reasoning":
            if not item.get("encrypted_content"):
                raise Refused(
                    f"Item with id '{item.get('id')}' not found. Items are not persisted when `store` is false."
                )
            waits = item["id"]
        elif kind == "function_call":
            orjson.loads(item["arguments"])
            open_calls.add(item["call_id"])
        elif kind == "function_call_output":
            if item["call_id"] not in open_calls:
                raise Refused(f"No tool call found for function call output with call_id {item['call_id']}.")
            open_calls.remove(item["call_id"])
        elif kind != "message" or item["role"] not in ("user", "assistant", "system", "developer"):
            raise Refused(f"Invalid value: '{kind}'.")
    if open_calls:
        raise Refused(f"No tool output found for function call {sorted(open_calls)[0]}.")


def hear_responses(body: bytes) -> Heard:
    items = orjson.loads(body)["input"]
    return hear(ResponsesDialect(), body, [i["encrypted_content"] for i in items if i.get("type") == "reasoning"])
