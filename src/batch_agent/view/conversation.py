"""The conversation of a row for the page: the prompts, and each turn with its times, tool calls and results.

Prompts are made again from the recorded task and the row's input. A repair prompt is shown as the error of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from batch_agent.compiler.fields import field_names, fields_of
from batch_agent.compiler.system import reference
from batch_agent.compiler.template import Template
from batch_agent.errors import BatchAgentError
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.observe.summary import usage_json
from batch_agent.record.steps import Past, PastTurn, Used
from batch_agent.record.timeline import Line


def prompts(asked: JsonObject, value: object) -> tuple[str, str | None]:
    """Return the system prompt and the message of a row; None for a message that cannot be made again."""
    system = str(asked.get("system") or "")
    task = str(asked.get("task") or "")
    if asked.get("template") != "braces" or not task:
        return system, None
    hoisted = asked.get("hoisted")
    try:
        template = Template.parse(task, field_names(value))
        names = [str(name) for name in hoisted if str(name) in template.names] if isinstance(hoisted, list) else []
        return system, template.bind({name: reference(name) for name in names}).render(fields_of(value))
    except (BatchAgentError, ValueError, TypeError):
        return system, None


def conversation(
    record: Record, past: Past | None, asked: JsonObject | None, spans: Sequence[Line]
) -> list[JsonObject]:
    """Return the messages of a row, in order."""
    said: list[JsonObject] = []
    value = record.get("input")
    system, user = prompts(asked, value) if asked is not None else ("", None)
    if system:
        said.append({"role": "system", "text": system})
    if user is not None:
        said.append({"role": "user", "text": user})
    else:
        said.append({"role": "input", "value": cast(JsonValue, value), "task": (asked or {}).get("task")})
    if past is None:
        return said
    before = Used()
    timings = record.get("timings")
    last_wait = timings.get("tool_wait") if isinstance(timings, dict) else None
    for number, turn in enumerate(past.turns, start=1):
        after = past.turns[number].spent.tool_wait if number < len(past.turns) else last_wait
        said.append(_turn(number, turn, before, after, [span for span in spans if span[4] == number]))
        before = turn.spent
        rejected = next((span for span in spans if span[0] == "rejected" and span[4] == number), None)
        if rejected is not None:
            said.append({"role": "repair", "text": str(rejected[6]), "error": rejected[5], "turn": number})
        elif not turn.reply.tool_calls and number < len(past.turns):
            said.append({"role": "repair", "text": "", "error": None, "turn": number})
        if turn.compacted is not None:
            cut = turn.compacted.cut
            said.append({"role": "cut", "text": cut.note, "kept_from": cut.kept_from, "turn": number})
    return said


def _turn(number: int, turn: PastTurn, before: Used, after: object, spans: Sequence[Line]) -> JsonObject:
    reply, spent = turn.reply, turn.spent
    answered = next((span for span in spans if span[0] == "turn" and not span[8]), None)
    tools = [span for span in spans if span[0] == "tool"]
    wait = max(0.0, after - spent.tool_wait) if isinstance(after, int | float) else 0.0
    cost = None if spent.cost is None else spent.cost - (before.cost or 0.0)
    return {
        "role": "assistant",
        "turn": number,
        "text": reply.text,
        "reasoning": reply.reasoning,
        "calls": [_call(turn, place, tools) for place in range(len(reply.tool_calls))],
        "finish_reason": reply.finish_reason,
        "cached": reply.saved is not None,
        "answered_by": reply.answered_by or None,
        "usage": usage_json(reply.usage),
        "cost": cost,
        "queued": max(0.0, spent.queued - before.queued),
        "model": max(0.0, spent.inference - before.inference),
        "tools": wait,
        "first_token": reply.first_token,
        "endpoint": answered[5] if answered is not None else None,
        "at": answered[1] if answered is not None else None,
    }


def _call(turn: PastTurn, place: int, spans: Sequence[Line]) -> JsonObject:
    call, end = turn.reply.tool_calls[place], turn.outcomes.get(place)
    own = [span for span in spans if span[5] == call.name]
    nth = sum(other.name == call.name for other in turn.reply.tool_calls[:place])
    span = own[nth] if nth < len(own) else None
    return {
        "id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "result": None if end is None else end.text,
        "begun": place in turn.begun,
        "seconds": None if span is None else cast(float, span[2]) - cast(float, span[1]),
        "ok": None if span is None else span[6],
        "source": None if span is None else span[7],
    }


def failed_attempts(spans: Sequence[Line]) -> list[JsonObject]:
    """Return the failed requests of a row."""
    failed = (span for span in spans if span[0] == "turn" and span[8])
    return [
        {
            "turn": span[4],
            "endpoint": span[5],
            "type": span[8],
            "message": span[9],
            "at": span[1],
            "seconds": cast(float, span[2]) - cast(float, span[1]),
        }
        for span in failed
    ]


def live_conversation(row: Mapping[str, JsonValue]) -> list[JsonObject]:
    """Return the messages of a running row, from the answer of its run."""
    said: list[JsonObject] = []
    messages = row.get("messages")
    calls: dict[str, JsonObject] = {}
    turn = 0
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        role, content = message.get("role"), message.get("content")
        text = content if isinstance(content, str) else _parts_text(content)
        if role == "tool":
            call = calls.get(str(message.get("tool_call_id")))
            if call is not None:
                call["result"] = text
        elif role == "assistant":
            turn += 1
            asked = message.get("tool_calls")
            own = [_live_call(call) for call in asked if isinstance(call, dict)] if isinstance(asked, list) else []
            calls.update({str(call["id"]): call for call in own})
            said.append(
                {"role": role, "turn": turn, "text": text, "reasoning": message.get("reasoning") or "", "calls": [*own]}
            )
        else:
            kind = "repair" if role == "user" and turn else role
            said.append({"role": kind, "text": text})
    if row.get("saying") is not None:
        live: JsonObject = {"role": "assistant", "turn": turn + 1, "text": row["saying"], "reasoning": "", "calls": []}
        said.append({**live, "streaming": True, "endpoint": row.get("endpoint")})
    return said


def _live_call(call: Mapping[str, JsonValue]) -> JsonObject:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    named: JsonObject = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    return {**named, "result": None, "begun": True}


def _parts_text(content: JsonValue) -> str:
    """Return the text of a message with images; each image is shown as its address."""
    texts = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else None
            texts.append(str(part["text"]) if "text" in part else f"[image {str(url)[:100]}]")
    return "".join(texts)
