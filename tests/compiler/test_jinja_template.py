"""Tasks that are Jinja templates: loops over plain data, and nothing but data."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from batch_agent import BatchAgent
from batch_agent.compiler.plan import Plan, compile_plan
from batch_agent.errors import InputError, SpecError
from batch_agent.spec import BatchSpec
from batch_agent.testing import Say, ScriptedBackend


class User(BaseModel):
    name: str
    born: datetime.date = datetime.date(1815, 12, 10)

    def shout(self) -> str:
        return self.name.upper()


def plan_of(task: str, *rows: object, **options: object) -> Plan:
    spec = BatchSpec(task=task, template="jinja", inputs=list(rows), **options)
    return compile_plan(spec, schema=None, inject_schema=False)


def prompt(task: str, row: object) -> str:
    return plan_of(task, row).job(0, row).prompt


@pytest.mark.parametrize(
    ("task", "row", "filled"),
    [
        ("{{ text }}\n", {"text": "<b>&\n"}, "<b>&\n\n"),
        ("{% for x in items %}{{ loop.index }}. {{ x.name }}\n{% endfor %}", {"items": [{"name": "a"}]}, "1. a\n"),
        ("{{ a }} {{ b }} {{ c }}", {"a": None, "b": True, "c": [1, {"k": "é"}]}, ' true [1,{"k":"é"}]'),
        ("{{ user.name }} {{ user.born }}", {"user": User(name="Ada")}, "Ada 1815-12-10"),
        ("{{ name }}", User(name="Ada"), "Ada"),
        ("{{ input | upper }}", "abc", "ABC"),
        ("{{ row['First Name'] }}", {"First Name": "Ada"}, "Ada"),
        ("{{ row }}", {"row": "its own"}, "its own"),
        ("{{ order['items'] }} {{ order.items }}", {"order": {"items": [1]}}, "[1] [1]"),
        ("{% for k, v in user.items() %}{{ k }}={{ v }};{% endfor %}", {"user": {"a": 1, "b": "x"}}, "a=1;b=x;"),
        ("{% if note is defined %}{{ note }}{% else %}none{% endif %}{{ a }}", {"a": 1}, "none1"),
        ('{"literal": {"json": "{a}"}} {{ a }}', {"a": 1}, '{"literal": {"json": "{a}"}} 1'),
        ("{{ a }}", {"a": "{{ b }}", "b": "never"}, "{{ b }}"),
        ("{{ a }}", {"a": 1, "unused": object()}, "1"),
    ],
)
def test_a_template_is_filled_from_the_row(task: str, row: object, filled: str) -> None:
    assert prompt(task, row) == filled


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("{{ txt }}", r"'txt' is undefined \(the input's fields: user, text\)"),
        ("{{ user.age }}", "'age'"),
        ("{{ user.shout() }}", "'shout'"),
        ("{{ text.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__ }}", "SecurityError"),
        ("{{ user.update({'a': 1}) }}", "SecurityError"),
        ("{{ range(10000000) | list }}", "OverflowError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
    ],
)
def test_what_is_no_data_of_the_first_row_is_refused_before_any_job(task: str, says: str) -> None:
    with pytest.raises(SpecError, match=f"the task cannot be filled from the first input: .*{says}"):
        plan_of(task, {"user": User(name="Ada"), "text": "abc"})


@pytest.mark.parametrize(
    "task", ["{{ a", "{% for %}", "{% endif %}", "{{ a | nofilter }}", "{{ a | random }}"], ids=lambda task: task
)
def test_a_template_that_is_none_is_refused(task: str) -> None:
    with pytest.raises(SpecError, match="task is no Jinja template: line 1: "):
        plan_of(task, {"a": 1})


def test_a_later_row_that_cannot_fill_it_fails_alone_and_so_does_a_first_one_that_cannot_be_written() -> None:
    rows: list[dict[str, object]] = [{"a": object()}, {"a": 1}, {"b": 1}, {"a": "text"}, {"a": "half \ud800"}]
    plan = plan_of("{{ a }}{{ a + 1 }}", *rows)
    assert plan.job(1, rows[1]).prompt == "12"
    for row, says in ((rows[0], "'a' cannot be written"), (rows[2], "'a' is undefined"), (rows[3], "TypeError")):
        with pytest.raises(InputError, match=says):
            plan.job(0, row)
    with pytest.raises(InputError):
        plan.job(0, rows[4])


def test_nothing_is_hoisted_and_the_text_in_front_counts_as_shared() -> None:
    rows = [{"q": n, "document": "long " * 500} for n in range(3)]
    plan = plan_of("12345678{{ q }} {{ document }}", *rows)
    assert (tuple(plan.hoisted), plan.system, plan.prefix_tokens) == ((), "", 2)
    job = plan.job(1, rows[1])
    assert plan.question(job) == job.prompt == f"123456781 {rows[1]['document']}"


def test_a_template_without_any_name_is_a_warning() -> None:
    assert plan_of("Say hello {{ 1 + 1 }}", {"a": 1}, {"a": 2}).warning
    assert plan_of("Say hello {{ a }}", {"a": 1}, {"a": 2}).warning is None


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "batch_agent.compiler.jinja", raising=False)
    with pytest.raises(SpecError, match="needs the package jinja2; install it with: pip install jinja2"):
        plan_of("{{ a }}", {"a": 1})


def test_an_iterator_is_settled_by_its_first_row() -> None:
    def rows() -> Iterator[object]:
        raise AssertionError("read")
        yield

    plan = compile_plan(BatchSpec(task="{{ a }}", template="jinja", inputs=rows()), schema=None, inject_schema=False)
    with pytest.raises(SpecError, match="'a' is undefined"):
        plan.check_first({"b": 1})
    plan.check_first({"a": 1})
    assert plan.job(0, {"a": 2}).prompt == "2"


@pytest.mark.parametrize(
    ("task", "pieces"),
    [
        ("x {{ a }}!", [("x ", False), ("1", True), ("!", False)]),
        ("{% macro m(v) %}<{{ v }}>{% endmacro %}{{ m(a) }}", [("<", True), ("1", True), (">", True)]),
        ("{% set s %}{{ a }}{% endset %}{{ s | length }}", [("1", False)]),  # the marks would be counted
    ],
)
def test_what_was_filled_in_is_told_apart_where_that_is_possible(task: str, pieces: list[tuple[str, bool]]) -> None:
    described = plan_of(task, {"a": 1}).describe([{"a": 1}])
    assert [piece for piece in described.first_pieces if piece[0]] == pieces
    assert "".join(text for text, _ in described.first_pieces) == described.first_prompt


@given(st.text(max_size=20), st.text(max_size=20))
def test_values_are_text_whatever_is_in_them(first: str, second: str) -> None:
    assert prompt("{{ a }}|{{ b }}", {"a": first, "b": second}) == f"{first}|{second}"


async def test_a_resumed_run_asks_again_when_only_the_language_of_the_task_has_changed(tmp_path: Path) -> None:
    async def requests(template: str, **options: object) -> list[str]:
        backend = ScriptedBackend(lambda request: Say("ok"))
        spec = {"task": "Is {a} a letter?", "inputs": [{"a": "x"}], "backend": backend, "model": "m", "resume": True}
        await BatchAgent.run(BatchSpec(template=template, run_dir=tmp_path, **spec, **options))
        return [request.text for request in backend.requests]

    assert await requests("braces") == ["Is x a letter?"]
    assert await requests("braces", force_resume=True) == []
    assert await requests("jinja", on_change="resend") == ["Is {a} a letter?"]
    assert await requests("jinja") == []
    assert await requests("braces") == []  # its own answer is still there
