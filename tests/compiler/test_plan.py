"""From a spec to jobs: inputs of every kind, what is checked before any request, what fails as data."""

from __future__ import annotations

import datetime
import enum
from collections import UserDict, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel, RootModel, computed_field, field_serializer

from batch_agent import spec as spec_module
from batch_agent.compiler.plan import Plan, compile_plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.tokens import estimate_tokens
from batch_agent.errors import InputError, Oversized, SpecError
from batch_agent.messages import Message, ToolSpec


def plan_of(task: str, inputs: object, **options: object) -> Plan:
    schema = OutputSchema.of(options.pop("schema", None))
    tools = options.pop("tool_specs", ())
    spec = spec_module.BatchSpec(task=task, inputs=inputs, **options)
    return compile_plan(spec, schema=schema, inject_schema=True, tools=tools)


class Row(BaseModel):
    path: str
    when: datetime.date = datetime.date(2024, 5, 1)

    @computed_field
    def shout(self) -> str:
        return self.path.upper()


@dataclass
class Point:
    x: int
    tags: list[str]


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("task", "value", "prompt"),
    [
        ("{path}", {"path": "a.py"}, "a.py"),
        ("say {input}", "hello {input}", "say hello {input}"),
        ("{path} {when} {shout}", Row(path="a"), "a 2024-05-01 A"),
        ("{x} {tags}", Point(3, ["é", "b"]), '3 ["é","b"]'),
        ("{root}", RootModel[list[int]]([1, 2]), "[1,2]"),
        ("{a} {b} {c}", {"a": None, "b": True, "c": 1.5}, " true 1.5"),
        ("{a}", {"a": {"k": [1, {"z": None}]}}, '{"k":[1,{"z":null}]}'),
        ("{a}", {"a": float("nan")}, ""),
        ("{a}", {"a": 10**30}, str(10**30)),
        ("{a} {b} {c}", {"a": Path("x/y"), "b": Colour.RED, "c": datetime.date(2024, 1, 2)}, "x/y red 2024-01-02"),
        ("{a}", {"a": Row(path="p", when=datetime.date(2024, 1, 2))}, '{"path":"p","when":"2024-01-02","shout":"P"}'),
        ("{a}", {"a": '{"quoted": "\\n"}'}, '{"quoted": "\\n"}'),
    ],
)
def test_an_input_of_any_kind_fills_the_task(task: str, value: object, prompt: str) -> None:
    job = plan_of(task, [value]).job(0, value)
    assert job.prompt == prompt
    assert job.input is value


@pytest.mark.parametrize(
    ("value", "job_id"),
    [({"id": "abc"}, "abc"), ({"id": 7}, "7"), ({"id": True}, "4"), ({"id": ""}, "4"), ({"x": 1}, "4"), ("id", "4")],
)
def test_a_job_is_named_by_its_input_or_by_its_position(value: object, job_id: str) -> None:
    assert plan_of("go", [value]).job(4, value).job_id == job_id


@pytest.mark.parametrize("inputs", ["text", b"bytes", {"path": "a"}, Row(path="a"), 5, None])
def test_inputs_that_are_one_thing_are_refused(inputs: object) -> None:
    with pytest.raises(SpecError, match="inputs"):
        plan_of("go", inputs)


@pytest.mark.parametrize("first", [5, None, ["a"], Row, Point, b"x"])
def test_a_first_input_of_no_known_kind_is_refused(first: object) -> None:
    with pytest.raises(SpecError, match="a dict, a string, an Image, a pydantic model or a dataclass"):
        plan_of("go", [first])


def test_a_field_that_the_first_of_a_list_lacks_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match=r"\{path\}.*its fields: file"):
        plan_of("Review {path}", [{"file": "a"}, {"path": "b"}])


def test_an_iterator_is_not_touched_and_its_first_item_is_checked_when_shown() -> None:
    def rows() -> Iterator[object]:
        raise AssertionError("read")
        yield

    plan = plan_of("Review {path}", rows())
    assert plan.total is None
    with pytest.raises(SpecError, match="its fields: input"):
        plan.check_first("a string")
    plan.check_first({"path": "a"})
    assert plan.job(0, {"path": "a"}).prompt == "Review a"


def test_an_async_iterator_is_not_touched_either() -> None:
    class Rows:
        def __aiter__(self) -> AsyncIterator[object]:
            raise AssertionError("read")

    plan = plan_of("Review {input}", Rows())
    plan.check_first("a")
    assert plan.job(0, "b").prompt == "Review b"


def test_a_row_that_was_not_checked_as_the_first_fails_alone() -> None:
    plan = plan_of("{word}", iter("a"))
    with pytest.raises(InputError, match=r"the field \{word\}, which this row does not have \(its fields: other\)"):
        plan.job(0, {"other": "x"})
    assert plan.job(1, {"word": "b"}).prompt == "b"


def test_no_inputs_make_an_empty_plan() -> None:
    plan = plan_of("Review {path}", [])
    assert plan.total == 0
    assert plan.describe([]).rows == 0


def test_a_later_row_that_lacks_a_field_fails_alone() -> None:
    plan = plan_of("Review {path}", [{"path": "a"}, {"file": "b"}, defaultdict(str)])
    assert plan.job(0, {"path": "a"}).prompt == "Review a"
    with pytest.raises(InputError, match=r"'path' \(its fields: file\)"):
        plan.job(1, {"file": "b"})
    with pytest.raises(InputError, match=r"'path' \(its fields: none\)"):
        plan.job(2, defaultdict(str))
    with pytest.raises(InputError, match="not int"):
        plan.job(3, 5)


class Explosive(BaseModel):
    path: str

    @field_serializer("path")
    def explode(self, value: str) -> str:
        raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"path": object()}, "'path'"),
        ({"path": b"\xff"}, "'path'"),
        ({"path": "half \ud800"}, "'path'"),
        ({"path": ["half \ud800"]}, "'path'"),
        (Explosive(path="a"), "boom"),
    ],
)
def test_a_row_that_cannot_be_written_fails_alone_even_when_it_is_the_first(value: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        plan_of("Review {path}", [value, {"path": "b"}]).job(0, value)


class Unreadable(UserDict[str, object]):
    def __init__(self, error: BaseException) -> None:
        super().__init__(path="a")
        self.error = error

    def __iter__(self) -> Iterator[str]:
        raise self.error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(1), GeneratorExit(), Unspeakable()])
def test_a_row_whose_own_code_raises_anything_at_all_fails_alone(error: BaseException) -> None:
    with pytest.raises(InputError, match=type(error).__name__):
        plan_of("{path}", [{"path": "b"}, Unreadable(error)]).job(1, Unreadable(error))
    with pytest.raises(SpecError, match=f"the first input cannot be used.*{type(error).__name__}"):
        plan_of("{path}", [Unreadable(error)])


def test_a_value_that_contains_itself_fails_alone() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InputError, match="'path'"):
        plan_of("{path}", [{"path": loop}]).job(0, {"path": loop})


def test_text_that_cannot_be_sent_in_the_prompt_is_refused_before_any_job() -> None:
    with pytest.raises(SpecError, match="system_prompt"):
        plan_of("go", ["a"], system_prompt="\ud800")
    with pytest.raises(SpecError, match="task"):
        plan_of("\udfff", ["a"])


def test_the_system_prompt_is_the_shared_conversation_and_is_never_filled() -> None:
    plan = plan_of("{input}", ["a", "b"], system_prompt="Keep {input} and {{x}} as they are.\n")
    assert plan.system == "Keep {input} and {{x}} as they are.\n"
    assert plan.shared.messages == [Message("system", plan.system)]
    assert plan_of("{input}", ["a"]).shared.messages == []


def test_an_input_that_can_never_fit_fails_as_data_with_the_numbers() -> None:
    plan = plan_of("{input}", ["a"], system_prompt="s" * 400, model_max_context=1000, min_response_tokens=100)
    assert plan.job(0, "x" * 3200).prompt == "x" * 3200
    with pytest.raises(Oversized, match=r"901 tokens.*1,000.*100.*900") as caught:
        plan.job(1, "x" * 3201)
    assert caught.value.type == "OVERSIZED"


def test_tools_count_towards_the_context() -> None:
    tool = ToolSpec("search", "d" * 4000, {"type": "object"})
    options = {"model_max_context": 1000, "min_response_tokens": 100}
    assert plan_of("{input}", ["a"], **options).job(0, "a").prompt == "a"
    with pytest.raises(Oversized):
        plan_of("{input}", ["a"], tool_specs=[tool], **options).job(0, "a")


def test_tokens_are_estimated_from_utf8_bytes_rounded_up() -> None:
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "äöüß", "漢字漢字")] == [0, 1, 1, 2, 2, 3]


def test_the_prefix_ends_where_rows_begin_to_differ() -> None:
    rows = [{"same": "s" * 40, "path": p} for p in "ab"]
    listed = plan_of("12345678{same}{path} tail", rows)
    assert listed.prefix_tokens == 12
    lazily = plan_of("12345678{same}{path} tail", iter(rows))
    lazily.check_first(rows[0])
    assert lazily.prefix_tokens == 2


def test_a_plan_describes_itself_for_a_dry_run() -> None:
    rows = [{"path": "x" * 40}, {"path": "x" * 80}, {"file": "c"}]
    plan = plan_of("12345678{path}", rows, system_prompt="y" * 400)
    described = plan.describe(rows)
    assert described.rows == 3
    assert described.first_prompt == "12345678" + "x" * 40
    assert described.system == "y" * 400
    assert described.prefix_tokens == 102
    assert described.own_tokens == 15
    assert len(described.unusable) == 1
    assert described.unusable[0].startswith("input 2: InputError")
    assert plan_of("{input}", iter("a")).describe(["a"]).rows is None
