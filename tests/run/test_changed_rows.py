"""A resume compares its rows with the record before it sends anything: no paid answer of a row that still exists is
dropped without being asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, SpecError, Tool
from batch_agent.messages import Usage
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse

Row = dict[str, object]
PRICES = {"input": 1, "output": 2}


async def go(directory: Path, inputs: Any, script: Any = None, **options: Any) -> list[str]:
    """Run or resume, and return what was asked, in order."""
    backend = ScriptedBackend(script or (lambda request: Say(f"re: {request.text}")))
    known = {"task": "Say {text}", "backend": backend, "run_dir": directory, "resume": True, "max_retries": 0}
    results = await BatchAgent.run(inputs=inputs, **{**known, **options})
    assert len(results) == len(list(inputs)) or isinstance(inputs, Iterator)
    return sorted(request.text for request in backend.requests)


async def counts(directory: Path, inputs: Any, **options: Any) -> str:
    """Return the first line of the comparison that a refused resume has."""
    with pytest.raises(SpecError, match="on_change=") as refused:
        await go(directory, inputs, **options)
    return next(line for line in str(refused.value).splitlines() if "kept" in line).partition(", about")[0]


def rows(*texts: str, ids: bool = False) -> list[Row]:
    return [{"id": f"n{text}", "text": text} if ids else {"text": text} for text in texts]


@pytest.mark.parametrize("ids", [False, True])
async def test_rows_that_were_edited_removed_and_added_are_counted(tmp_path: Path, ids: bool) -> None:
    before = [{"text": f"t{n}"} | ({"id": n} if ids else {}) for n in range(42)]
    await go(tmp_path, before)
    after = [dict(row) for row in before]
    for row in after[5:14]:
        row["text"] = f"{row['text']}."
    del after[20:22]
    after += [{"text": f"new {n}"} | ({"id": 100 + n} if ids else {}) for n in range(3)]
    assert await counts(tmp_path, after) == "kept 31, to send 12 (9 changed, 3 new), no longer asked for 2"
    assert len(await go(tmp_path, after, on_change="resend")) == 12
    assert await go(tmp_path, after) == []


async def test_what_the_rest_costs_is_what_rows_have_cost(tmp_path: Path) -> None:
    options: dict[str, Any] = {"script": lambda _: Say("ok", usage=Usage(1000, 0, 1000)), "prices": PRICES}
    await go(tmp_path, rows("a", "b", "c"), **options)
    with pytest.raises(SpecError, match=r"kept 1, to send 2 \(2 changed\), about \$0\.006\n"):
        await go(tmp_path, rows("a", "b.", "c."), **options)


async def test_ids_that_changed_keep_answers_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["a", "b", "a", "c"]
    await go(tmp_path, [{"id": n, "text": text} for n, text in enumerate(texts)])
    renamed = [{"id": f"x{n}", "text": text} for n, text in enumerate(texts)]
    assert await go(tmp_path, renamed) == []
    assert "kept 4, to send 0" in caplog.text
    assert "4 rows with another id than before are matched by content" in caplog.text
    caplog.clear()
    assert await go(tmp_path, renamed) == []
    assert "another id" not in caplog.text
    assert await go(tmp_path, [*renamed, {"id": "new", "text": "a"}]) == ["Say a"]


async def test_ids_and_texts_that_changed_together_are_asked_about(tmp_path: Path) -> None:
    await go(tmp_path, rows("a", "b", ids=True))
    assert await counts(tmp_path, [{"id": "x", "text": "a."}, {"id": "y", "text": "b."}]) == (
        "kept 0, to send 2 (2 changed)"
    )


async def test_a_full_stop_after_every_text_is_asked_about(tmp_path: Path) -> None:
    await go(tmp_path, ["a", "b", "c"], task="Say {input}")
    assert await counts(tmp_path, ["a.", "b.", "c."], task="Say {input}") == "kept 0, to send 3 (3 changed)"
    assert await go(tmp_path, ["a.", "b.", "c."], task="Say {input}", on_change="keep") == []
    assert await go(tmp_path, ["a.", "b.", "c."], task="Say {input}") == []
    assert len(await go(tmp_path, ["a.", "b.", "c."], task="Say {input}", on_change="resend")) == 3


async def test_a_row_at_the_top_a_removed_row_and_a_column_that_is_not_used_drop_nothing(tmp_path: Path) -> None:
    await go(tmp_path, rows("a", "b", "c"))
    assert await go(tmp_path, rows("top", "a", "b", "c")) == ["Say top"]
    assert await go(tmp_path, rows("top", "b", "c")) == []
    assert await go(tmp_path, [row | {"note": "x"} for row in rows("top", "b", "c")]) == []
    assert await counts(tmp_path, rows("top", "b", "c!")) == "kept 2, to send 1 (1 changed)"


async def test_an_interrupted_run_compares_the_rows_that_are_done(tmp_path: Path) -> None:
    many = rows(*(f"t{n}" for n in range(8)))

    def script(request: Request) -> Any:
        return Hang() if request.text == "Say t4" else Say("ok")

    backend = ScriptedBackend(script)
    options: dict[str, Any] = {"task": "Say {text}", "backend": backend, "max_inflight": 1}
    async with BatchAgent.open(inputs=many, run_dir=tmp_path, **options) as run:
        left = 4
        async for _ in run.results():
            left -= 1
            if not left:
                break
    edited = [dict(row) for row in many]
    edited[1]["text"], edited[7]["text"] = "other", "also other"
    assert await counts(tmp_path, edited) == "kept 3, to send 5 (1 changed)"
    assert len(await go(tmp_path, edited, on_change="resend")) == 5


async def test_failed_rows_that_are_edited_are_sent_without_a_question(tmp_path: Path) -> None:
    def script(request: Request) -> Say | Fail:
        return Fail(400) if "bad" in request.text else Say("ok")

    await go(tmp_path, rows("a", "bad", "c"), script)
    assert await go(tmp_path, rows("a", "mended", "c"), script) == ["Say mended"]


async def test_an_agent_in_the_middle_of_its_work_goes_on_under_another_id(tmp_path: Path) -> None:
    looked: list[str] = []

    @Tool.define(effect="write")
    def look(key: str) -> str:
        looked.append(key)
        return "seen"

    def script(request: Request) -> Any:
        return CallTools(ToolUse("look", {"key": "k"})) if not request.turn else Say("done")

    backend = ScriptedBackend(script)
    options: dict[str, Any] = {"task": "Say {text}", "tools": [look], "run_dir": tmp_path}
    with pytest.raises(RuntimeError, match="stop"):
        async with BatchAgent.open(inputs=rows("a", ids=True), backend=backend, max_turns=1, **options) as run:
            async for _ in run.results():
                raise RuntimeError("stop")
    other = [{"id": "other", "text": "a"}]
    again = ScriptedBackend(script)
    [result] = await BatchAgent.run(inputs=other, backend=again, resume=True, retry_from="failure", **options)
    assert (result.ok, result.job_id, len(again.requests), looked) == (True, "other", 1, ["k"])


async def test_inputs_that_can_be_read_only_once_are_matched_as_they_come_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await go(tmp_path, rows("a", "b"))
    with caplog.at_level(logging.INFO, "batch_agent"):
        assert await go(tmp_path, iter(rows("a", "b!"))) == ["Say b!"]
    assert "the inputs can be read only once" in caplog.text


async def test_all_samples_of_a_changed_row_keep_their_answers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"samples": 3, "output_schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}}}
    numbers = iter(range(100))

    def script(request: Request) -> Say:
        return Say(f'{{"n": {1 + next(numbers) % 2}}}')

    assert len(await go(tmp_path, rows("a", "b", ids=True), script, **options)) > 3
    renamed: list[Row] = [{"id": "x", "text": "a"}, {"id": "y", "text": "b"}]
    assert await go(tmp_path, renamed, script, **options) == []
    renamed[1]["text"] = "b."
    assert await counts(tmp_path, renamed, **options) == "kept 1, to send 1 (1 changed)"
    assert await go(tmp_path, renamed, script, **options, on_change="keep") == []
    assert await go(tmp_path, renamed, script, **options) == []
    assert set(await go(tmp_path, renamed, script, **options, on_change="resend")) == {"Say b."}


async def test_an_object_that_can_be_read_again_is_compared(tmp_path: Path) -> None:
    class Source:
        def __init__(self, *texts: str) -> None:
            self.texts = texts

        def __len__(self) -> int:
            return len(self.texts)

        def __iter__(self) -> Iterator[Row]:
            return iter(rows(*self.texts))

    await go(tmp_path, Source("a", "b"))
    assert await counts(tmp_path, Source("a", "b.")) == "kept 1, to send 1 (1 changed)"


async def test_options_and_rows_that_changed_are_one_question(tmp_path: Path) -> None:
    await go(tmp_path, rows("a", "b", "c", ids=True))
    with pytest.raises(SpecError) as refused:
        await go(tmp_path, [*rows("a", "b", ids=True), {"id": "nc", "text": "c."}], task="Shout {text}")
    assert "task: 1 word: 'Say' → 'Shout'" in str(refused.value)
    assert "3 recorded answers would be dropped" in str(refused.value)
    assert "kept 0, to send 3 (3 changed)" in str(refused.value)


async def test_a_model_that_is_changed_and_changed_back_is_paid_once(tmp_path: Path) -> None:
    await go(tmp_path, rows("a", "b"), model="one")
    assert len(await go(tmp_path, rows("a", "b"), model="two", on_change="resend")) == 2
    assert await go(tmp_path, rows("a", "b"), model="one") == []
    assert await go(tmp_path, rows("a", "b"), model="two") == []


async def test_a_change_of_hoisting_is_named_and_drops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = "the same in all rows " * 200
    inputs: list[Row] = [{"text": text, "rules": shared} for text in "ab"]
    assert len(await go(tmp_path, inputs, task="{rules} {text}")) == 2
    assert await go(tmp_path, inputs, task="{rules} {text}", no_hoist=True) == []
    assert "no_hoist: not given → True" in caplog.text
    caplog.clear()
    assert await go(tmp_path, inputs, task="{rules} {text}") == []
    assert "no_hoist: True → not given" in caplog.text
