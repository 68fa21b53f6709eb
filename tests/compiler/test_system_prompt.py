"""The system prompt as sent: session preambles stripped, the schema injected once."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from batch_agent.compiler.plan import compile_plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.system import strip_preamble
from batch_agent.spec import BatchSpec


class Review(BaseModel):
    file: str
    findings: list[str]


SCHEMA = Review.model_json_schema()


def system_of(system: str, *, inject: bool = True, task: str = "go", **options: object) -> str:
    spec = BatchSpec(task=task, inputs=["a", "b"], system_prompt=system, **options)
    return compile_plan(spec, schema=OutputSchema.of(Review), inject_schema=inject).system


@pytest.mark.parametrize(
    ("system", "stripped"),
    [
        ("x-anthropic-billing-header: cc=1\nYou are", "You are"),
        ("X-Amz-Date: 2024\r\n\r\nx-anthropic-a: 1\n\n\n  indented", "  indented"),
        ("\n x-amz-id: 1\nYou", "You"),
        ("x-anthropic-a: only", ""),
        ("You are\nx-anthropic-a: content", "You are\nx-anthropic-a: content"),
        ("x-amzn-other: kept", "x-amzn-other: kept"),
        ("x-anthropic-a is a header", "x-anthropic-a is a header"),
        ("\n\n  as written \n", "\n\n  as written \n"),
    ],
)
def test_only_session_lines_at_the_start_are_stripped(system: str, stripped: str) -> None:
    assert strip_preamble(system) == stripped


def test_the_preamble_stays_when_asked_to() -> None:
    text = "x-anthropic-a: 1\nYou"
    assert system_of(text, inject=False) == "You"
    assert system_of(text, inject=False, strip_preamble=False) == text


def test_the_schema_is_injected_once_after_the_users_words() -> None:
    system = system_of("You are careful.")
    assert system.startswith("You are careful.\n\n")
    assert json.loads(system[system.index("{") :]) == SCHEMA
    assert system_of("").startswith("Your final answer must be JSON")


def test_a_backend_that_takes_the_schema_natively_gets_no_text() -> None:
    assert system_of("You", inject=False) == "You"


@pytest.mark.parametrize("indent", [None, 1, 2, "\t"])
def test_a_schema_that_is_already_there_in_any_layout_is_not_repeated(indent: int | str | None) -> None:
    reordered = json.dumps(SCHEMA, indent=indent, sort_keys=True)
    text = f"Answer {{like}} this: {reordered} {{"
    assert system_of(text) == text
    assert system_of("You", task=f"Fit {reordered}: {{input}}") == "You"


def test_another_schema_there_does_not_count() -> None:
    assert "Your final answer" in system_of('Example: {"type": "object"}')


def test_hoisted_values_come_after_the_schema() -> None:
    long = "shared words " * 200
    rows = [{"q": q, "doc": long} for q in "ab"]
    spec = BatchSpec(task="{q} {doc}", inputs=rows, system_prompt="You")
    system = compile_plan(spec, schema=OutputSchema.of(Review), inject_schema=True).system
    assert system.index("Your final answer") < system.index(long)
    assert system.endswith("</input>")
