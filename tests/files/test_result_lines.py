import json
from dataclasses import dataclass
from datetime import date
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_serializer

from batch_agent.errors import Invalid
from batch_agent.files.results import from_json, result_line, to_json, unwritten
from batch_agent.job import AgentError, AgentResult, Timings, UnreadableRow
from batch_agent.messages import Message, Usage


class Color(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    label: object = None


class Model(BaseModel):
    color: Color
    when: date


def record(output: object, **more: object) -> dict[str, object]:
    line = result_line(AgentResult(3, "job", {"a": 1}, True, output, **more))  # type: ignore[arg-type]
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_a_line_has_the_result_and_the_input_and_not_the_transcript() -> None:
    usage, timings = Usage(10, 4, 2, 1), Timings(0.1, 0.2, 0.3, 0.6, None)
    messages = (Message("user", "x"),)
    assert record("text", attempts=2, turns=1, usage=usage, timings=timings, messages=messages) == {
        "index": 3,
        "job_id": "job",
        "ok": True,
        "output": "text",
        "error": None,
        "attempts": 2,
        "turns": 1,
        "usage": {
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 2,
            "reasoning_tokens": 1,
            "cache_write_tokens": 0,
        },
        "timings": {"queued": 0.1, "inference": 0.2, "tool_wait": 0.3, "total": 0.6, "first_token": None},
        "input": {"a": 1},
    }


class Stubborn(BaseModel):
    word: str = "w"

    @field_serializer("word")
    def refuse(self, word: str) -> str:
        raise SystemExit("not today")


def test_an_output_that_cannot_be_written_is_invalid() -> None:
    result = AgentResult(3, "job", {"a": 1}, True, Stubborn(), raw_text="said")
    with pytest.raises(Invalid, match=r"the output cannot be written as JSON: .*not today") as caught:
        result_line(result)
    parsed = json.loads(result_line(unwritten(result, caught.value)))
    assert (parsed["ok"], parsed["output"], parsed["raw_text"], parsed["input"]) == (False, None, "said", {"a": 1})
    assert parsed["error"]["type"] == "Invalid"


def test_an_input_that_cannot_be_written_is_left_out() -> None:
    parsed = json.loads(result_line(AgentResult(3, "job", Stubborn(), True, "text")))
    assert (parsed["ok"], parsed["output"], parsed["input"]) == (True, "text", None)


def test_a_failed_line_has_the_error_and_the_raw_text() -> None:
    error = AgentError("validate", "NotJSON", "no JSON", False)
    parsed = json.loads(result_line(AgentResult(0, "0", "row", False, None, error, raw_text="prose")))
    assert parsed["error"] == {"stage": "validate", "type": "NotJSON", "message": "no JSON", "retryable": False}
    assert (parsed["ok"], parsed["raw_text"], parsed["input"]) == (False, "prose", "row")


def test_an_unreadable_row_has_no_input() -> None:
    result: AgentResult[object] = AgentResult(0, "0", UnreadableRow("line 3"), False, None)
    assert json.loads(result_line(result))["input"] is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Model(color=Color.RED, when=date(2024, 1, 2)), {"color": "red", "when": "2024-01-02"}),
        ([Point(1, Color.RED)], [{"x": 1, "label": "red"}]),
        ({"n": 2**80, "c": Color.RED, "p": Point(1)}, {"n": 2**80, "c": "red", "p": {"x": 1, "label": None}}),
        ({"s": {1}, "f": float("nan"), 1: date(2024, 1, 2)}, {"s": [1], "f": None, "1": "2024-01-02"}),
        ("half \ud83d", "half \ud83d"),
    ],
)
def test_any_output_becomes_json(output: object, expected: object) -> None:
    assert record(output)["output"] == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_was_written_is_read_again(value: object) -> None:
    assert from_json(to_json(value)) == value


@pytest.mark.parametrize("slow", [2**80, "half \ud83d"])
def test_what_is_no_number_is_null_also_beside_what_orjson_refuses(slow: object) -> None:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    value = {"slow": slow, "f": [float("nan"), float("inf")], "p": Point(1, -float("inf")), "text": "NaN"}
    parsed = json.loads(to_json(value), parse_constant=refuse)
    assert parsed == {"slow": slow, "f": [None, None], "p": {"x": 1, "label": None}, "text": "NaN"}


def test_half_a_character_is_read_again() -> None:
    assert from_json(to_json(["\ud83d"])) == ["\ud83d"]
