"""Questions on tool calls and on structured output."""

from __future__ import annotations

import re
from functools import partial

import jsonschema_rs
import orjson

from batch_agent.backends.engines.engine import at
from batch_agent.conformance.answers import call_pieces
from batch_agent.conformance.finding import Finding, emulated, missing, not_asked, unclear, works
from batch_agent.conformance.subject import CLOCK, WEATHER, RawAnswer, Subject, flag
from batch_agent.errors import BackendError, Rejected
from batch_agent.messages import JsonObject, Message, ToolCall

CALL_TOKENS, SCHEMA_TOKENS = 256, 256
CALL_AS_TEXT = re.compile(r'<tool_call>|<function|"(name|function)"\s*:\s*"weather"')  # forms of the usual templates
ASK_WEATHER = "What is the weather in Paris for the next 3 days? Use the tool weather."
HELLO = "Reply with the single word hello and nothing else."
ASK_BOTH = "Call the tool weather for Paris for 2 days, and the tool clock for Tokyo, both at once."
SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "sure": {"type": "boolean"},
    },
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
BOUNDED: JsonObject = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["number"],
    "additionalProperties": False,
}


# Tools


async def tool_auto(s: Subject) -> Finding:
    try:
        heard = await s.hear(ASK_WEATHER, tools=(WEATHER,), max_tokens=CALL_TOKENS)
    except Rejected as error:
        return missing(f"refused with {error.status}: {error}", flag(s, "tools"))
    if heard.tool_calls:
        return works(heard.tool_calls[0].arguments[:60])
    if CALL_AS_TEXT.search(heard.text):
        return missing(f"the call came as text, not as a call: {heard.text[:60]!r}", flag(s, "tools"))
    return unclear(f"the model did not call the tool: {heard.text[:60]!r}", flag(s, "tools"))


async def _forced(s: Subject, *, choice: str) -> Finding:
    try:
        heard = await s.hear(
            "What is the weather in Paris for the next 3 days, and what time is it there?",
            tools=(WEATHER, CLOCK),
            tool_choice=choice,
            max_tokens=CALL_TOKENS,
        )
    except Rejected as error:
        return missing(f"refused with {error.status}: {error}", flag(s, "tools"))
    if not heard.tool_calls:
        if heard.finish_reason == "length":
            return unclear("the call reached the token limit", flag(s, "whitespace"))
        return missing("the answer has no call: tool_choice is ignored", flag(s, "tools"))
    if choice != "required" and heard.tool_calls[0].name != choice:
        return missing(f"the model called {heard.tool_calls[0].name}, not {choice}")
    return works(f"finish_reason {heard.finish_reason}")


tool_required = partial(_forced, choice="required")
tool_named = partial(_forced, choice="clock")


async def tool_none(s: Subject) -> Finding:
    heard = await s.hear(ASK_WEATHER, tools=(WEATHER,), tool_choice="none", max_tokens=24)
    return missing("the model called a tool that was forbidden") if heard.tool_calls else works()


async def tool_arguments(s: Subject) -> Finding:
    heard = await s.hear(
        "What is the weather in Paris for the next 30 days?",
        tools=(WEATHER,),
        tool_choice="weather",
        max_tokens=CALL_TOKENS,
    )
    if not heard.tool_calls:
        return unclear("the model called no tool")
    written = heard.tool_calls[0].arguments
    if _fits(written, WEATHER.parameters):
        return works(written[:60])
    return emulated(
        f"arguments do not follow the schema ({written[:60]}): the model gets the error", flag(s, "arguments")
    )


async def tool_parallel(s: Subject) -> Finding:
    heard = await s.hear(ASK_BOTH, tools=(WEATHER, CLOCK), max_tokens=CALL_TOKENS)
    if len(heard.tool_calls) >= 2:
        return works(f"{len(heard.tool_calls)} calls in one answer")
    return unclear(f"{len(heard.tool_calls)} call in one answer: the model may not know how", flag(s, "tools"))


async def tool_result(s: Subject) -> Finding:
    heard = await s.hear(_talk(("call_a", "weather", "Sunny, 21 degrees.")), tools=(WEATHER,), max_tokens=24)
    return works() if heard.text or heard.tool_calls else unclear("the answer is empty")


async def tool_results(s: Subject) -> Finding:
    talk = _talk(("call_a", "weather", "Sunny."), ("call_b", "clock", "It is noon."))
    heard = await s.hear(talk, tools=(WEATHER, CLOCK), max_tokens=24)
    return works() if heard.text or heard.tool_calls else unclear("the answer is empty")


def _talk(*results: tuple[str, str, str]) -> list[Message]:
    """Return a conversation in which the model called tools and has their results."""
    arguments = {"weather": '{"city":"Paris","days":2}', "clock": '{"city":"Tokyo"}'}
    calls = tuple(ToolCall(id, name, arguments[name]) for id, name, _ in results)
    answers = [Message("tool", text, tool_call_id=id, tool_name=name) for id, name, text in results]
    return [Message("user", ASK_BOTH), Message("assistant", "", calls), *answers]


async def tool_streamed(s: Subject) -> Finding:
    answer = await _raw_call(s, streamed=True)
    parts = call_pieces(answer)
    if not parts:
        return missing("a streamed answer has no tool call", flag(s, "tools"))
    if len(parts) == 1:
        return emulated("a streamed call comes in one piece: a tool cannot start before the answer ends")
    return works(f"in {len(parts)} pieces")


async def tool_reported(s: Subject) -> Finding:
    reported: list[ToolCall] = []
    heard = await s.hear(
        ASK_WEATHER,
        on_tool_call=reported.append,
        tools=(WEATHER,),
        tool_choice="weather",
        max_tokens=CALL_TOKENS,
    )
    if not heard.tool_calls:
        return unclear("the model called no tool")
    return works() if reported == list(heard.tool_calls) else missing("calls were not reported while the answer came")


async def tool_ids(s: Subject) -> Finding:
    ids = []
    for _ in range(2):
        calls = (await _raw_call(s)).message().get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return unclear("the model called no tool")
        ids.append(at(calls[0], "id"))
    if not all(isinstance(id, str) and id for id in ids):
        return emulated("calls have no ids: Batch Agent gives them some")
    return works(str(ids[0])) if ids[0] != ids[1] else emulated("ids repeat: Batch Agent gives calls others")


async def tool_finish(s: Subject) -> Finding:
    answer = await _raw_call(s)
    if not answer.message().get("tool_calls"):
        return unclear("the model called no tool")
    finish = answer.choice().get("finish_reason")
    if finish == "tool_calls":
        return works()
    return emulated(f"a forced call ends as {finish}: the call itself is what counts")


async def _raw_call(s: Subject, *, streamed: bool = False) -> RawAnswer:
    return await s.raw(ASK_WEATHER, tools=(WEATHER,), tool_choice="weather", max_tokens=CALL_TOKENS, streamed=streamed)


# Structured output


async def schema(s: Subject, *, streamed: bool = False, bounds: bool = False) -> Finding:
    prompt, wanted = ("What is 400 plus 100? Answer with the number.", BOUNDED) if bounds else (HELLO, SCHEMA)
    if not s.backend.capabilities.native_schema:
        note = s.backend.capabilities.schema_note or "this backend sends no schema"
        return emulated(f"{note}: the prompt has it, and answers are validated and repaired")
    heard = await s.hear(prompt, schema=wanted, max_tokens=SCHEMA_TOKENS, streamed=streamed)
    if _fits(heard.text, wanted):
        return works(heard.text[:60])
    if heard.finish_reason == "length":
        spaces = sum(map(str.isspace, heard.text))  # a grammar may allow them without limit
        spaced = flag(s, "whitespace") if spaces > len(heard.text) / 4 else ""
        return unclear(f"the answer reached {SCHEMA_TOKENS} tokens: {heard.text.strip()[:40]!r}", spaced)
    return emulated(f"answers are validated and repaired, because the server answered {heard.text[:40]!r}")


schema_streamed = partial(schema, streamed=True)
schema_bounds = partial(schema, bounds=True)


async def schema_with_tools(s: Subject) -> Finding:
    if not s.is_chat:
        can = s.backend.capabilities.schema_with_tools
        return not_asked("the wire combines them" if can else "one turn without tools follows instead")
    form: JsonObject = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    instead = "Batch Agent sends them apart: one turn without tools follows if the answer does not fit"
    try:
        answer = await s.raw(HELLO, {"response_format": form}, tools=(WEATHER,), max_tokens=SCHEMA_TOKENS)
    except BackendError as error:
        return emulated(f"refused with {error.status}: {instead}")
    text = str(answer.message().get("content") or "")
    if _fits(text, SCHEMA):
        return works("schema and tools in one request")
    return emulated(f"the schema is not enforced beside tools: {instead}")


async def json_mode(s: Subject) -> Finding:
    try:
        answer = await s.raw(
            'Reply with the JSON object {"word": "hello"}.',
            {"response_format": {"type": "json_object"}},
            max_tokens=SCHEMA_TOKENS,
        )
    except Rejected as error:
        return missing(f"refused with {error.status}")
    text = str(answer.message().get("content") or "")
    return works() if _fits(text, {"type": "object"}) else unclear(f"the answer is no JSON object: {text[:40]!r}")


async def bad_schema(s: Subject) -> Finding:
    form: JsonObject = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "nonsense"}}}
    try:
        await s.raw("Say hello.", {"response_format": form}, max_tokens=8)
    except Rejected as error:
        return works(f"refused with {error.status}")
    except BackendError as error:
        return missing(f"a schema that cannot be compiled is an error of the server ({error.status}), not a refusal")
    return missing("a schema that cannot be compiled is ignored")


def _fits(text: str, wanted: JsonObject) -> bool:
    try:
        return jsonschema_rs.is_valid(wanted, orjson.loads(text))
    except orjson.JSONDecodeError:
        return False
