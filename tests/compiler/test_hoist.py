"""Long shared values behind varying ones move to the system prompt, once."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from batch_agent.compiler.plan import Plan, compile_plan
from batch_agent.compiler.system import constants_of
from batch_agent.errors import InputError
from batch_agent.spec import BatchSpec

LONG = "The whole contract, clause after clause. " * 60
TASK = "Answer {question} from this: {document} Be brief."


def plan_of(inputs: object, task: str = TASK, **options: object) -> Plan:
    return compile_plan(BatchSpec(task=task, inputs=inputs, **options), schema=None, inject_schema=False)


def rows(count: int, document: object = LONG) -> list[dict[str, object]]:
    return [{"question": f"q{number}", "document": document} for number in range(count)]


def sent(plan: Plan, index: int, row: object) -> str:
    return plan.system + plan.job(index, row).prompt


def test_a_long_shared_value_behind_a_varying_one_moves_to_the_end_of_the_system_prompt() -> None:
    inputs = rows(3)
    plan = plan_of(inputs, system_prompt="You are careful.")
    assert tuple(plan.hoisted) == ("document",)
    assert plan.system == f'You are careful.\n\n<input name="document">\n{LONG}\n</input>'
    prompt = plan.job(1, inputs[1]).prompt
    assert prompt.startswith("Answer q1 from this: [document: ")
    assert '<input name="document">' in prompt
    assert prompt.endswith(" Be brief.")
    assert sent(plan, 1, inputs[1]).count(LONG) == 1


@pytest.mark.parametrize(
    ("inputs", "task", "options"),
    [
        (rows(1), TASK, {}),
        (rows(3), TASK, {"no_hoist": True}),
        (iter(rows(3)), TASK, {}),
        (rows(3), "{document} then {question}", {}),
        (rows(3), "{document} alone", {}),
        (rows(3, "short"), TASK, {}),
        ([*rows(3), {"question": "q", "document": LONG + "."}], TASK, {}),
    ],
    ids=["one row", "turned off", "an iterator", "in front", "nothing varies", "short", "one row differs"],
)
def test_everything_else_is_sent_as_written(inputs: object, task: str, options: dict[str, object]) -> None:
    plan = plan_of(inputs, task, **options)
    row = {"question": "q0", "document": LONG}
    plan.check_first(row)
    assert tuple(plan.hoisted) == ()
    assert plan.system == ""
    assert plan.job(0, row).prompt == task.format(**row)


def test_a_value_that_is_named_twice_is_sent_once() -> None:
    inputs = rows(2)
    plan = plan_of(inputs, "{document} {question} {document}")
    assert tuple(plan.hoisted) == ("document",)
    assert sent(plan, 0, inputs[0]).count(LONG) == 1


def test_shared_structures_move_as_their_json_and_equal_is_not_enough() -> None:
    ones = [1] * 800
    same, other = {"question": "q", "document": [1] * 800}, {"question": "q", "document": [1.0] * 800}
    assert tuple(plan_of([*rows(1, ones), same]).hoisted) == ("document",)
    assert tuple(plan_of([*rows(1, ones), other]).hoisted) == ()
    assert str(ones).replace(" ", "") in plan_of([*rows(1, ones), same]).system


def test_models_and_dataclasses_are_compared_by_their_fields() -> None:
    class Model(BaseModel):
        question: str
        document: str

    @dataclass
    class Data:
        question: str
        document: str

    for kind in (Model, Data):
        assert tuple(plan_of([kind(question=q, document=LONG) for q in "ab"]).hoisted) == ("document",)


def test_a_row_that_cannot_be_rendered_does_not_stop_the_others_and_still_fails() -> None:
    broken: list[object] = [{"question": "q"}, {"question": "q", "document": object()}, 5]
    plan = plan_of([*rows(2), *broken])
    assert tuple(plan.hoisted) == ("document",)
    with pytest.raises(InputError, match="'document'"):
        plan.job(2, broken[0])
    with pytest.raises(InputError, match="'document' cannot be written"):
        plan.job(3, broken[1])
    with pytest.raises(InputError):
        plan.job(4, broken[2])


def test_a_field_that_cannot_be_rendered_does_not_hide_another_that_varies() -> None:
    inputs: list[dict[str, object]] = [{"a": n, "b": LONG, "c": LONG} for n in range(2)]
    inputs.append({"a": 2, "b": object(), "c": "this row's own"})
    plan = plan_of(inputs, "{a}{b}{c}")
    assert tuple(plan.hoisted) == ("b",)
    with pytest.raises(InputError, match="'b'"):
        plan.job(2, inputs[2])


def test_a_row_that_changes_after_the_plan_is_not_sent_with_the_others_value() -> None:
    inputs = rows(3)
    plan = plan_of(inputs)
    inputs[1]["document"] = "another document"
    assert plan.job(0, inputs[0]).prompt
    with pytest.raises(InputError, match="'document' is another one than when the run was planned"):
        plan.job(1, inputs[1])


def test_a_row_that_can_be_read_at_the_second_try_is_not_sent_with_the_others_value() -> None:
    class Late(UserDict[str, object]):
        ready = False

        def __iter__(self) -> Iterator[str]:
            if not self.ready:
                raise OSError("not yet")
            return super().__iter__()

    late = Late(question="q", document="its own")
    plan = plan_of([*rows(2), late])
    assert tuple(plan.hoisted) == ("document",)
    Late.ready = True
    with pytest.raises(InputError, match="'document'"):
        plan.job(2, late)


def test_the_hoisted_value_counts_towards_the_prefix() -> None:
    assert plan_of(rows(2)).prefix_tokens > len(LONG) // 4
    assert plan_of(rows(2), no_hoist=True).prefix_tokens < 10


def test_a_field_is_not_read_again_after_its_first_difference() -> None:
    reads: list[str] = []

    class Watched(UserDict[str, object]):
        def __iter__(self) -> Iterator[str]:
            reads.append("row")
            return super().__iter__()

    constants_of([Watched(a=number) for number in range(100)], ["a"])
    assert 1 <= len(reads) <= 2


texts = st.sampled_from(["short", "other", LONG, LONG + "!"])


@given(st.lists(st.fixed_dictionaries({"a": texts, "b": texts, "c": texts}), min_size=1, max_size=5))
def test_whatever_is_hoisted_every_value_still_reaches_the_model_and_no_hoisted_one_twice(
    inputs: list[dict[str, str]],
) -> None:
    plan = plan_of(inputs, "{a}|{b}|{c}|{a}")
    for index, row in enumerate(inputs):
        prompt = plan.job(index, row).prompt
        for name, value in row.items():
            if name in plan.hoisted:
                assert f'<input name="{name}">\n{value}\n</input>' in plan.system
            else:
                assert value in prompt.split("|")
    for name in plan.hoisted:
        assert len({row[name] for row in inputs}) == 1
        assert plan.system.count(f'<input name="{name}">') == 1
