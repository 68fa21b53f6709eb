"""Places in a field's data: what a name with dots and brackets leads to, and what it never reaches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from batch_agent.compiler.plan import Plan, compile_plan
from batch_agent.errors import InputError, SpecError
from batch_agent.spec import BatchSpec


class User(BaseModel):
    name: str
    tags: list[str] = []

    def shout(self) -> str:
        return self.name.upper()


@dataclass
class Point:
    x: int
    inner: object = None

    @property
    def double(self) -> int:
        return 2 * self.x


def plan_of(task: str, *rows: object, **options: object) -> Plan:
    return compile_plan(BatchSpec(task=task, inputs=list(rows), **options), schema=None, inject_schema=False)


def prompt(task: str, row: object) -> str:
    return plan_of(task, row).job(0, row).prompt


@pytest.mark.parametrize(
    ("task", "row", "filled"),
    [
        ("{user.name}", {"user": {"name": "Ada"}}, "Ada"),
        ("{items[0]} {items[-1]}", {"items": ["a", 2]}, "a 2"),
        ("{a.b[1].c}", {"a": {"b": [0, {"c": [1, "é"]}]}}, '[1,"é"]'),
        ("{user[first name]} {user[0]}", {"user": {"first name": "Ada", "0": "zero"}}, "Ada zero"),
        ("{user.name}{user.tags[0]}", {"user": User(name="Ada", tags=["x"])}, "Adax"),
        ("{p.x} {p.inner.x}", {"p": Point(1, Point(2))}, "1 2"),
        ("{inner.x}", Point(1, Point(2)), "2"),
        ("{tags[0]}", User(name="Ada", tags=["x"]), "x"),
        ("{a.b}", {"a.b": "a column", "a": {"b": "inside"}}, "a column"),
        ('{"k": {user.name}}', {"user": {"name": "Ada"}}, '{"k": Ada}'),
        ("{user.items}", {"user": {"items": [1]}}, "[1]"),
    ],
)
def test_a_name_leads_into_the_data(task: str, row: object, filled: str) -> None:
    assert prompt(task, row) == filled


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("{user.nam}", {"user": {"name": "Ada"}}, r"no 'nam' in 'user' \(its fields: name\)"),
        ("{items[2]}", {"items": [1, 2]}, r"no '2' in 'items' \(a list of 2\)"),
        ("{items.count}", {"items": [1, 2]}, "no 'count' in 'items'"),
        ("{text.upper}", {"text": "abc"}, r"no 'upper' in 'text' \(text\)"),
        ("{text[0]}", {"text": "abc"}, r"\(text\)"),
        ("{a.b.c}", {"a": {"b": None}}, r"no 'c' in 'a.b' \(null\)"),
        ("{user.shout}", {"user": User(name="Ada")}, r"its fields: name, tags"),
        ("{user.__class__}", {"user": User(name="Ada")}, "no '__class__'"),
        ("{p.double}", {"p": Point(1)}, r"its fields: x, inner"),
        ("{path.name}", {"path": Path("a/b")}, r"no 'name' in 'path' \(PosixPath\)"),
        ("{kind.x}", {"kind": Point}, "a class"),
    ],
)
def test_what_is_no_data_of_the_first_row_is_refused_before_any_job(task: str, row: object, says: str) -> None:
    with pytest.raises(SpecError, match=f"the task cannot be filled from the first input: .*{says}"):
        plan_of(task, row)


def test_a_later_row_without_the_place_fails_alone() -> None:
    rows = [{"user": {"name": "Ada"}}, {"user": {}}, {"user": "Bob"}]
    plan = plan_of("{user.name}", *rows)
    assert plan.job(0, rows[0]).prompt == "Ada"
    for row in rows[1:]:
        with pytest.raises(InputError, match="no 'name' in 'user'"):
            plan.job(1, row)


def test_data_whose_own_code_raises_fails_its_row_alone() -> None:
    class Broken(UserDict[str, object]):
        def __iter__(self) -> Iterator[str]:
            raise OSError("gone")

    row = {"user": Broken(name="Ada")}
    with pytest.raises(InputError, match="gone"):
        plan_of("{user.name}", row).job(0, row)


def test_a_long_shared_value_inside_a_field_moves_to_the_system_prompt_under_its_full_name() -> None:
    long = "Clause after clause. " * 100
    rows = [{"q": n, "case": {"contract": long, "number": n}} for n in range(3)]
    plan = plan_of("{q}: {case.contract} {case.number}", *rows)
    assert tuple(plan.hoisted) == ("case.contract",)
    assert plan.system == f'<input name="case.contract">\n{long}\n</input>'
    job = plan.job(2, rows[2])
    assert long not in job.prompt and job.prompt.endswith(" 2")
    assert plan.question(job) == f"2: {long} 2"


@pytest.mark.parametrize(
    ("task", "rows", "warns"),
    [
        ("Review it", [{"path": "a"}, {"path": "b"}], True),
        ("Review it", ["a", "b"], True),
        ("Review {path}", [{"path": "a"}, {"path": "b"}], False),
        ("Review it", [{"path": "a"}], False),
        ("Throw a die", [{}] * 3, False),
        ("Throw a die", [{"id": 1}, {"id": 2}], False),
    ],
)
def test_a_task_that_uses_no_field_of_its_rows_is_a_warning(task: str, rows: list[object], warns: bool) -> None:
    assert bool(plan_of(task, *rows).warning) == warns
    lazily = compile_plan(BatchSpec(task=task, inputs=iter(rows)), schema=None, inject_schema=False)
    lazily.check_first(rows[0])
    assert bool(lazily.warning) == (warns or len(rows) == 1)


def test_the_first_prompt_is_described_with_what_was_filled_in_told_apart() -> None:
    rows = [{"a": "{b}", "b": 2}]
    assert plan_of("x {a}{b} y", *rows).describe(rows).first_pieces == (
        ("x ", False),
        ("{b}", True),
        ("", False),
        ("2", True),
        (" y", False),
    )
