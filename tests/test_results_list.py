"""What ``run`` returns, and how results read."""

import asyncio
import gzip
import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from batch_agent import AgentError, AgentResult, BatchAgent, Failure, JobError, Results, Success, Usage
from batch_agent.errors import AgentTimeout, RateLimited, Timeout
from batch_agent.testing import Fail, Request, Say, ScriptedBackend


class Mark(BaseModel):
    score: int
    reasons: list[str] = []


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError("no")


def grade(request: Request) -> Say | Fail:
    row = int(str(request.messages[-1]["content"]))
    return Fail(400) if row == 2 else Say(json.dumps({"score": row, "reasons": ["x" * 2_000]}))


async def marks(count: int = 4) -> Results[Mark]:
    return await BatchAgent.run(
        task="{n}",
        inputs=[{"n": n, "text": "t" * 5_000} for n in range(count)],
        output_schema=Mark,
        backend=ScriptedBackend(grade),
        prices={"input": 1.0, "output": 2.0},
    )


async def test_the_results_of_a_run_are_a_list_in_input_order_with_what_one_asks_next() -> None:
    results = await marks()
    assert isinstance(results, list)
    assert [result.index for result in results] == [0, 1, 2, 3]
    assert [result.index for result in results.ok] == [0, 1, 3]
    assert [result.index for result in results.failed] == [2]
    assert [mark.score for mark in results.outputs] == [0, 1, 3]
    assert results.cost == results.summary.statistics.cost
    assert results.cost is not None
    assert results.cost > 0
    assert all(isinstance(result, AgentResult) for result in results)


async def test_the_summary_prints_as_the_lines_of_the_command_line() -> None:
    summary = (await marks()).summary
    lines = str(summary).splitlines()
    assert lines[0].startswith("4 rows in")
    assert lines[1].split() == ["failed", "1", "Rejected"]
    assert summary.statistics.failures == {"Rejected": 1}
    assert summary.to_json()["ended"] == "complete"


async def test_results_are_short_when_printed_whatever_their_rows_hold() -> None:
    results = await marks(40)
    assert repr(results).startswith("<Results: 40 rows, 39 ok, 1 failed (1 Rejected), $")
    assert len(repr(results)) < 100
    assert all(len(repr(result)) < 200 for result in results)
    assert repr(results[2]) == "<AgentResult 2 failed: Rejected: scripted:// answered 400: scripted failure 400>"
    assert repr(Success(3, "a b", "x", True, "y")) == "<AgentResult 3 'a b' ok: 'y'>"


def test_a_result_whose_output_cannot_be_shown_is_shown_without_it() -> None:
    assert repr(Success(0, "0", "x", True, Unshowable())).startswith("<AgentResult 0 ok: Unshowable (")
    assert "\x1b" not in repr(Failure(0, "0", "x", False, None, AgentError("infer", "Invalid", "\x1b[31m\nred")))


async def test_the_html_view_shows_the_first_rows_and_a_failure_and_escapes_what_they_say() -> None:
    def answer(request: Request) -> Say | Fail:
        return Fail(400) if "row 90" in str(request.messages[-1]["content"]) else Say("<script>")

    rows = [f"row {n}" for n in range(100)]
    view = (await BatchAgent.run(task="{input}", inputs=rows, backend=ScriptedBackend(answer)))._repr_html_()
    assert "<script>" not in view
    assert "&lt;script&gt;" in view
    assert "row 90" in view
    assert view.count("<tr") < 30
    assert "more</p>" in view


async def test_a_failed_result_raises_what_happened_when_it_is_unwrapped() -> None:
    results = await marks()
    assert results[1].unwrap().score == 1
    with pytest.raises(JobError, match="scripted failure 400") as caught:
        results[2].unwrap()
    assert (caught.value.type, caught.value.stage) == ("Rejected", "infer")
    assert caught.value.__notes__ == ["in row 2"]


@pytest.mark.parametrize("kind", [RateLimited, Timeout, AgentTimeout])
def test_what_is_raised_is_of_the_class_that_the_error_was(kind: type[JobError]) -> None:
    failed = Failure(0, "0", "x", False, None, AgentError.of(kind("too much")))
    with pytest.raises(kind) as caught:
        failed.unwrap()
    assert str(caught.value) == "too much"


def test_an_error_type_of_somebody_elses_is_raised_as_a_job_error_that_carries_it() -> None:
    with pytest.raises(JobError) as caught:
        Failure(0, "0", "x", False, None, AgentError("infer", "Odd", "m", retryable=True)).unwrap()
    assert type(caught.value) is JobError
    assert (caught.value.type, caught.value.stage, caught.value.retryable) == ("Odd", "infer", True)
    assert (JobError.type, JobError.retryable) == ("JobError", False)


def test_a_result_made_by_hand_is_a_success_or_a_failure() -> None:
    error = AgentError("infer", "Odd", "m")
    good, bad = AgentResult(0, "0", "x", True, "y"), AgentResult(1, "1", "x", ok=False, output=None, error=error)
    assert isinstance(good, Success)
    assert isinstance(bad, Failure)
    assert good
    assert not bad
    for result in (good, bad):
        assert pickle.loads(pickle.dumps(result)) == result
    assert good.as_failure(error) == Failure(0, "0", "x", False, None, error)


def test_a_success_does_not_become_a_failure_by_a_change_of_a_field() -> None:
    good = Success(0, "0", "x", True, "y")
    assert replace(good, output="z") == Success(0, "0", "x", True, "z")
    with pytest.raises(TypeError, match="a Success cannot have ok=False; see as_failure"):
        replace(good, ok=False)


def test_a_list_of_some_results_has_the_summary_they_add_up_to() -> None:
    good: AgentResult[str] = Success(0, "0", "x", True, "y", turns=2, usage=Usage(10, 0, 5), cost=0.5)
    bad: AgentResult[str] = Failure(1, "1", "x", False, None, AgentError("infer", "Odd", "m"), usage=Usage(1, 0, 1))
    results = pickle.loads(pickle.dumps(Results([good, bad])))
    assert results.summary.statistics.usage == Usage(11, 0, 6)
    assert results.summary.statistics.failures == {"Odd": 1}
    assert results.cost == 0.5
    assert repr(results) == "<Results: 2 rows, 1 ok, 1 failed (1 Odd), $0.5>"
    assert repr(Results()) == "<Results: 0 rows, 0 ok>"
    assert Results().cost is None


async def test_results_are_written_as_the_lines_of_the_command_line(tmp_path: Path) -> None:
    results = await marks()
    results.to_jsonl(tmp_path / "out.jsonl")
    results.to_jsonl(str(tmp_path / "out.jsonl.gz"))
    lines = (tmp_path / "out.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()) == lines
    records = [json.loads(line) for line in lines.splitlines()]
    assert [record["ok"] for record in records] == [True, True, False, True]
    assert records[1]["output"]["score"] == 1
    assert records[2]["error"]["type"] == "Rejected"


def test_an_output_that_cannot_be_written_is_a_failed_line(tmp_path: Path) -> None:
    @dataclass
    class Loop:
        again: object = None

    loop = Loop()
    loop.again = loop
    Results([Success(0, "0", "x", True, loop), Success(1, "1", "x", True, "y")]).to_jsonl(tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["ok"] for record in records] == [False, True]
    assert records[0]["error"]["type"] == "Invalid"


async def test_results_become_a_pandas_frame_with_a_column_for_each_field() -> None:
    pytest.importorskip("pandas")
    frame = (await marks()).to_pandas()
    assert list(frame["output.score"].astype("Int64").fillna(-1)) == [0, 1, -1, 3]
    assert list(frame["ok"]) == [True, True, False, True]
    assert str(frame["ok"].dtype) == "bool"
    assert str(frame["output.score"].dtype) == "Int64"
    assert str(frame["attempts"].dtype) == "int64"
    assert list(frame["n"]) == [0, 1, 2, 3]
    assert frame["error_type"][2] == "Rejected"
    assert len(Results().to_pandas()) == 0


def test_lists_and_objects_stay_what_they_are_in_a_pandas_frame() -> None:
    pytest.importorskip("pandas")
    frame = Results([Success(0, "0", {"n": 1}, True, {"tags": ["a", "b"], "at": {"x": 1}})]).to_pandas()
    assert frame["output.tags"][0] == ["a", "b"] and frame["output.at"][0] == {"x": 1}


async def test_results_become_a_polars_frame_with_the_same_columns() -> None:
    polars = pytest.importorskip("polars")
    results = await marks()
    frame = results.to_polars()
    assert frame["output.score"].to_list() == [0, 1, None, 3]
    assert frame.schema["output.score"] == polars.Int64
    assert frame.schema["ok"] == polars.Boolean
    assert frame["cost"].dtype == polars.Float64
    pytest.importorskip("pandas")
    assert frame.columns == list(results.to_pandas().columns)
    assert len(Results().to_polars()) == 0


async def test_a_run_that_is_cancelled_leaves_no_results_and_raises() -> None:
    async with asyncio.timeout(30):
        task = asyncio.create_task(marks())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
