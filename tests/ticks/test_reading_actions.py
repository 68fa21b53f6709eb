from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
from pydantic import Field

from batch_agent.errors import Invalid, OutputError, SpecError
from batch_agent.ticks import Action, Agent
from batch_agent.ticks.agent import ActionSpace, read_call
from batch_agent.tools.base import Tool

NORTH = {"direction": "north", "steps": 2}
CALL = {"tool": "move", "params": NORTH, "reasoning": "food is there"}
TEXT = json.dumps(CALL)


def move(direction: Literal["north", "south"], steps: Annotated[int, Field(ge=1)] = 1) -> None:
    """Walk.

    Args:
        direction: where to.
    """


LOOK = {"name": "look", "description": "Look around.", "parameters": {"type": "object", "required": ["far"]}}


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"```json\n{TEXT}\n```",
        f"I see food in the north, so I go there.\n\n{TEXT}\n\nThat is my choice.",
        f"<think>where to?</think>{TEXT}",
        f"THINKING: it is north\nACTION: {TEXT}",
        TEXT[:-1],
        TEXT[: TEXT.index(', "reasoning')],
        TEXT[: TEXT.index("}")],
        TEXT.replace('"', "'"),
        json.dumps({"tool_name": "move", "parameters": NORTH}),
        json.dumps({"name": "move", "arguments": json.dumps(NORTH)}),
        json.dumps({"action": CALL}),
        'THINKING: hm\nACTION: move {"direction": "north", "steps": 2}',
        'Thinking: hm\n**Action:** move\nParams: {"direction": "north", "steps": 2}',
    ],
)
def test_an_action_is_read_from_what_models_write(text: str) -> None:
    action = ActionSpace([move]).read(text)
    assert (action.tool_name, action.parameters) == ("move", NORTH)


def test_the_thinking_before_an_action_is_its_reasoning() -> None:
    assert read_call('THINKING: the apple is near.\nACTION: {"tool": "eat", "params": {}}').reasoning == (
        "the apple is near."
    )
    assert read_call(TEXT).reasoning == "food is there"


def test_a_bare_name_after_action_needs_no_parameters() -> None:
    assert read_call("THINKING: nothing to do\nACTION: idle").tool_name == "idle"


@pytest.mark.parametrize("text", ["", "I would go north.", "[]", "{}", '{"tool": 3}', '{"params": {}}', "ACTION:"])
def test_words_without_an_action_are_an_error(text: str) -> None:
    with pytest.raises(OutputError):
        read_call(text)


def test_the_last_of_several_actions_counts() -> None:
    assert read_call('Maybe {"tool": "a", "params": {}}? No: {"tool": "b", "params": {}}').tool_name == "b"


def test_parameters_are_read_as_the_function_declares_them() -> None:
    assert ActionSpace([move]).read('{"tool": "move", "params": {"direction": "north", "steps": "3"}}').parameters == {
        "direction": "north",
        "steps": 3,
    }


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"tool": "fly", "params": {}}, "there is no tool 'fly'; there are move, look"),
        ({"tool": "move", "params": {"direction": "up"}}, "direction"),
        ({"tool": "move", "params": {"direction": "north", "stepz": 1}}, "stepz"),
        ({"tool": "look", "params": {}}, "far"),
        ({"tool": "move", "params": [1]}, "must be an object"),
    ],
)
def test_what_does_not_fit_the_tools_is_said_in_words(call: dict[str, object], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        ActionSpace([move, LOOK]).read(json.dumps(call))


def test_to_idle_needs_no_tool() -> None:
    assert ActionSpace([move]).read('{"tool": "idle", "params": {}}') == Action("idle")


def test_tools_come_in_every_form() -> None:
    in_openai_form = {"type": "function", "function": LOOK}
    known = ActionSpace([Tool.define(move), in_openai_form, "wait", {"name": "sing"}])
    assert [spec.name for spec in known.form.tools] == ["move", "look", "wait", "sing"]
    assert known.read('{"tool": "wait", "params": {"for": "ever"}}').parameters == {"for": "ever"}


def test_the_schema_has_one_form_for_each_tool() -> None:
    schema = ActionSpace([move, LOOK]).form.schema
    assert schema is not None and isinstance(schema["anyOf"], list)
    forms = [form for form in schema["anyOf"] if isinstance(form, dict)]
    names = [form["properties"]["tool"]["enum"] for form in forms]  # type: ignore[index,call-overload]
    assert names == [["move"], ["look"]]
    assert "anyOf" not in (ActionSpace([move]).form.schema or {})
    assert ActionSpace().form.schema is None


def test_definitions_of_two_tools_are_told_apart() -> None:
    def described(kind: str) -> dict[str, object]:
        parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": kind}}}
        return {"name": kind, "parameters": parameters}

    schema = ActionSpace([described("string"), described("integer")]).form.schema
    assert schema is not None
    assert schema["$defs"] == {"string.P": {"type": "string"}, "integer.P": {"type": "integer"}}
    assert "#/$defs/integer.P" in json.dumps(schema)


@pytest.mark.parametrize("tools", ["move", [{"description": "x"}], [{"name": "a", "parameters": 3}], ["a", "a"], [3]])
def test_tools_that_are_none_are_refused(tools: object) -> None:
    with pytest.raises(SpecError):
        Agent("a", tools=tools)  # type: ignore[arg-type]


def test_parse_action_never_raises_and_says_why_there_is_none() -> None:
    action = Agent("a", tools=[move])._parse_action("no idea")
    assert action is not None
    assert (action.tool_name, action.source) == ("idle", "fallback")
    assert action.reasoning and "not JSON" in action.reasoning
