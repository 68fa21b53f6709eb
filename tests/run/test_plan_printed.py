"""A plan as a person reads it."""

from collections.abc import AsyncIterator
from pathlib import Path

from batch_agent import BatchAgent
from batch_agent.testing import ScriptedBackend


def planned(inputs: object, **more: object) -> str:
    known = {"task": "Say {text}.", "system_prompt": "Be short.", "backend": ScriptedBackend(), "model": "m"}
    return str(BatchAgent.plan(inputs=inputs, **{**known, **more}))


def facts(text: str) -> dict[str, str]:
    lines = text.split("\n\n")[1].splitlines()
    return {line[:17].strip(): line[17:].strip() for line in lines}


def test_a_plan_prints_as_what_would_be_sent() -> None:
    text = planned([{"text": "a"}, {"text": "bb"}, {"no": 1}], prices={"input": 1, "output": 1}, max_tokens=10)
    assert facts(text)["rows"] == "3"
    assert facts(text)["cost"].startswith("$")
    assert "Be short." in text
    assert "Say «a»." in text
    assert "input 2: InputError" in text


def test_a_plan_in_a_list_of_values_is_one_line() -> None:
    plan = BatchAgent.plan(task="{input}", inputs=["a"], backend="simulated://", model="m")
    assert repr(plan) == "<Prepared: 1 row for m at simulated://simulated; print it for what would be sent>"
    assert "First message" in plan._repr_html_()


async def test_an_iterator_is_not_read_by_printing_its_plan() -> None:
    async def later() -> AsyncIterator[str]:
        yield "a"

    rows = iter([{"text": "a"}])
    for inputs in (rows, later()):
        text = planned(inputs)
        assert facts(text)["rows"] == "unknown until they are read"
        assert "own per row" not in facts(text)
    assert next(rows) == {"text": "a"}


def test_the_plan_of_a_large_file_shows_its_first_row_and_prints_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + ("y" * 1_000 + "\n") * 20_000)
    plan = BatchAgent.plan(task="Say {text}", inputs=path, backend=ScriptedBackend(), model="m")
    text = str(plan)
    assert facts(text)["rows"].startswith("about ")
    assert "Say «yyy" in text
    assert str(plan) == text


def test_a_plan_without_a_number_says_that_it_will_be_found() -> None:
    plan = BatchAgent.plan(task="{input}", inputs=["a"], backend="http://127.0.0.1:9/v1", model="m")
    assert "the number of model calls is found during the run" in str(plan)


def test_a_cell_of_megabytes_is_cut_where_it_is_printed_and_warned_of_by_its_real_size() -> None:
    text = planned([{"text": "word " * 1_000_000}])
    assert len(text) < 6_000
    assert "[… 4,996,000 characters more …]" in text
    assert facts(text)["warning"].startswith("the first message has 5,000,005 characters, about 1,250,002 tokens")
