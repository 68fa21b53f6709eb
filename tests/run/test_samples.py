"""Rows with samples: how often the server is asked, what the answers make of it, and that nothing is asked twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, model_validator
from tests.run.process_work import WarmCrew

from batch_agent import AgentResult, BatchAgent, Pipeline, Tool
from batch_agent.agent.dryrun import DryRun
from batch_agent.errors import SpecError
from batch_agent.testing import (
    BatchServer,
    CallTools,
    Fail,
    Request,
    Say,
    ScriptedBackend,
    ScriptedServer,
    ToolUse,
    virtual_clock,
)


class Answer(BaseModel):
    mood: Literal["good", "bad", "mixed"]
    why: str = ""


MOODS = {"mood": "good|bad|mixed"}


def by_row(answers: dict[str, list[str]]) -> Callable[[Request], Say | Fail]:
    """Answer the samples of each row one after the other."""
    asked: Counter[str] = Counter()

    def script(request: Request) -> Say | Fail:
        row = request.text
        word = answers[row][asked[row]]
        asked[row] += 1
        return Fail(400) if word == "fail" else Say(json.dumps({"mood": word}), latency=1)

    return script


async def run(script: Any, **options: Any) -> tuple[list[AgentResult[Any]], ScriptedBackend]:
    backend = script if isinstance(script, ScriptedBackend) else ScriptedBackend(script)
    known = {"task": "{input}", "inputs": ["a"], "output_schema": MOODS, "samples": 3, "max_retries": 0}
    return await BatchAgent.run(backend=backend, **{**known, **options}), backend


@virtual_clock
async def test_two_equal_answers_decide_and_the_third_is_not_asked() -> None:
    [result], backend = await run(by_row({"a": ["good", "good", "bad"]}))
    assert result.output == {"mood": "good"}
    assert result.votes == {"mood": {"counts": {"good": 2}, "against": 0}}
    assert result.samples == ({"mood": "good"}, {"mood": "good"})
    assert len(backend.requests) == 2


@virtual_clock
async def test_the_first_samples_are_asked_at_once_and_the_third_only_when_they_differ() -> None:
    [result], backend = await run(by_row({"a": ["good", "bad", "bad"]}))
    assert result.output == {"mood": "bad"}
    assert result.votes == {"mood": {"counts": {"good": 1, "bad": 2}, "against": 1}}
    assert result.turns == len(backend.requests) == 3
    assert result.timings.total == pytest.approx(2)


@virtual_clock
async def test_the_summary_says_what_the_stop_saved() -> None:
    results, _ = await run(
        by_row({row: ["good", "good"] for row in "abcd"} | {"e": ["good", "bad", "bad"]}), inputs=list("abcde")
    )
    summary = results.summary.to_json()  # type: ignore[attr-defined]
    assert summary["samples"] == {"rows": 5, "asked": 11, "spared": 4, "identical": False, "rows_identical": 4}
    assert "11 samples of 5 rows voted; 4 more (26 %) could not have changed a vote" in str(results.summary)  # type: ignore[attr-defined]


@virtual_clock
async def test_identical_samples_of_all_rows_are_reported() -> None:
    results, _ = await run(by_row({row: ["good", "good"] for row in "ab"}), inputs=list("ab"))
    assert "all samples of all rows were identical" in str(results.summary)  # type: ignore[attr-defined]


@virtual_clock
async def test_each_sample_has_its_own_seed_and_a_temperature() -> None:
    bodies: dict[str, list[Any]] = defaultdict(list)

    def script(request: Request) -> Say:
        bodies[request.text].append(request.body)
        return Say(json.dumps({"mood": ["good", "bad", "mixed"][len(bodies[request.text]) - 1]}))

    async with ScriptedServer(script) as server:
        for seed in (7, None):
            bodies.clear()
            await BatchAgent.run(
                task="{input}", inputs=["a", "b"], output_schema=MOODS, samples=3, seed=seed, backend=server.backend_url
            )
            assert {body["temperature"] for each in bodies.values() for body in each} == {0.7}
            seeds = [[body["seed"] for body in bodies[row]] for row in "ab"]
            if seed == 7:
                assert seeds == [[7, 8, 9]] * 2
            else:
                assert len({number for each in seeds for number in each}) == 6


@virtual_clock
async def test_a_failed_sample_is_no_vote_and_is_not_replaced() -> None:
    [result], backend = await run(by_row({"a": ["fail", "good", "bad"]}))
    assert result.output == {"mood": "good"}
    assert result.votes == {"mood": {"counts": {"good": 1, "bad": 1}, "against": 1}}
    assert result.samples == (None, {"mood": "good"}, {"mood": "bad"})
    assert len(backend.requests) == 3


@virtual_clock
async def test_below_half_of_the_samples_the_row_fails_with_the_reason_of_the_first() -> None:
    [result], backend = await run(by_row({"a": ["fail", "fail", "good"]}))
    assert result.error is not None
    assert result.error.type == "Rejected"
    assert result.error.message.startswith("2 of 3 samples failed; ")
    assert result.votes is None
    assert len(backend.requests) == 3  # the third was asked when the first had failed, and the second had not yet


@virtual_clock
async def test_a_typed_answer_is_typed_and_its_other_fields_come_from_a_winner() -> None:
    answers = iter(["good", "bad", "bad"])

    def script(request: Request) -> Say:
        mood = next(answers)
        return Say(json.dumps({"mood": mood, "why": f"it is {mood}"}))

    [result], _ = await run(script, output_schema=Answer)
    assert result.output == Answer(mood="bad", why="it is bad")
    assert result.samples[0] == Answer(mood="good", why="it is good")
    assert [*(result.votes or {})] == ["mood"]


class Pair(BaseModel):
    one: Literal["a", "b"]
    two: Literal["a", "b"]
    three: Literal["a", "b"]

    @model_validator(mode="after")
    def not_all_equal(self) -> Pair:
        if self.one == self.two == self.three:
            raise ValueError("all are equal")
        return self


@virtual_clock
async def test_winners_that_the_schema_does_not_allow_together_leave_the_answer_of_a_sample() -> None:
    answers = iter(["aab", "aba", "baa"])
    script = lambda request: Say(json.dumps(dict(zip(("one", "two", "three"), next(answers), strict=True))))  # noqa: E731
    [result], _ = await run(script, output_schema=Pair)
    assert result.output == Pair(one="a", two="a", three="b")


def last_of(values: list[Any]) -> Any:
    return values[-1]


def broken(values: list[Any]) -> Any:
    raise LookupError("no such value")


@virtual_clock
async def test_a_function_of_the_user_votes() -> None:
    for vote in ("tests.run.test_samples:last_of", last_of, {"mood": "tests.run.test_samples:last_of"}):
        [result], _ = await run(by_row({"a": ["good", "good", "bad"]}), vote=vote)
        assert result.output == {"mood": "bad"}
    [result], _ = await run(by_row({"a": ["good", "good", "bad"]}), vote=broken)
    assert result.error is not None
    assert (result.error.type, "no such value" in result.error.message) == ("WorkerFailed", True)


@virtual_clock
async def test_a_median_is_an_answer_that_was_given() -> None:
    numbers = iter([3, 10, 4])
    [result], _ = await run(
        lambda request: Say(json.dumps({"score": next(numbers)})), output_schema={"score": "number"}, vote="median"
    )
    assert result.output == {"score": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0}, "temperature above 0"),
        ({"extra_body": {"top_k": 1}}, "top_k=1"),
        ({"extra_body": {"seed": 5}}, "seed=5"),
        ({"extra_body": {"options": {"temperature": 0.0}}}, "temperature=0.0"),
        ({"top_p": 0.001}, "larger top_p"),
        ({"vote": {"tone": "majority"}}, "tone"),
        ({"vote": "no.such.module:f"}, "cannot be imported"),
        ({"samples": 0}, "samples: must be a whole number above 0"),
        ({"oversized": "chunk", "model_max_context": 1000}, "exclude each other"),
        ({"samples": 1, "vote": "majority"}, "vote needs samples"),
        ({"tools": [Tool.define(lambda row: "", name="save", description="Save.", effect="write")]}, "save"),
        ({"worker": broken, "output_schema": None}, "for the tool loop"),
    ],
)
async def test_what_makes_samples_equal_or_harmful_is_refused_before_anything_is_sent(
    options: dict[str, Any], words: str
) -> None:
    backend = ScriptedBackend(lambda request: Say("{}"))
    with pytest.raises(SpecError, match=words):
        await run(backend, **options)
    assert not backend.requests


@virtual_clock
async def test_the_cache_gives_no_sample_the_answer_of_another(tmp_path: Path) -> None:
    moods = iter(["good", "bad", "mixed"])
    options: dict[str, Any] = {"seed": 1, "cache": tmp_path}
    [result], backend = await run(lambda request: Say(json.dumps({"mood": next(moods)})), **options)
    assert len(backend.requests) == 3
    assert len(result.samples) == 3
    again, backend = await run(lambda request: Fail(500), **options)
    assert backend.requests == []
    assert again[0].votes == result.votes


@virtual_clock
async def test_a_finished_row_comes_back_from_the_record_with_its_votes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "resume": True, "inputs": ["a", "b"], "output_schema": Answer}
    script = by_row({"a": ["good", "bad", "bad"], "b": ["fail", "good", "good"]})
    first, _ = await run(script, **options)
    again, backend = await run(lambda request: Fail(500), **options)
    assert backend.requests == []
    for old, new in zip(first, again, strict=True):
        assert (new.votes, new.samples, new.output, new.usage) == (old.votes, old.samples, old.output, old.usage)
        assert new.resumed
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[0]["votes"] == first[lines[0]["index"]].votes


@virtual_clock
async def test_a_row_that_failed_asks_its_failed_samples_again_and_keeps_the_others(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "resume": True}
    [failed], _ = await run(by_row({"a": ["fail", "good", "fail"]}), **options)
    assert failed.error is not None
    [again], backend = await run(by_row({"a": ["good", "good", "good"]}), **options)
    assert again.output == {"mood": "good"}
    assert len(backend.requests) == 1


@virtual_clock
async def test_another_number_of_samples_is_another_question(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "resume": True}
    await run(by_row({"a": ["good", "bad", "good"]}), **options)
    with pytest.raises(SpecError, match="samples: 3 → 5"):
        await run(by_row({"a": []}), samples=5, **options)
    [more], backend = await run(by_row({"a": ["good", "good"]}), samples=5, on_change="keep", **options)
    assert (len(more.samples), len(backend.requests)) == (4, 1)


@pytest.mark.parametrize("wire", ["openai", "anthropic"])
async def test_a_batch_api_gets_all_samples_of_all_rows_in_one_job_and_the_plan_says_so(wire: str) -> None:
    moods = iter(["good", "bad"] * 9)
    async with BatchServer(lambda request: Say(json.dumps({"mood": next(moods)}))) as server:
        place = (
            f"openai-batch://{server.address}/v1?tls=false&"
            if wire == "openai"
            else f"anthropic-batch://{server.address}?"
        )
        where = f"{place}gather=0.05&look=0.01"
        known: dict[str, Any] = {"task": "{input}", "inputs": ["a", "b"], "output_schema": MOODS, "samples": 3}
        options = known | {"backend": where, "model": "claude-3-haiku", "api_key": "k", "max_tokens": 9}
        plan = BatchAgent.plan(**options)
        assert "3 of each row, all sent at once, because a batch API answers late" in str(plan)
        results = await BatchAgent.run(**options)
        assert [len(job.requests) for job in server.jobs] == [6]
    assert [len(result.samples) for result in results] == [3, 3]
    assert [sum(result.votes["mood"]["counts"].values()) for result in results if result.votes] == [3, 3]


def test_a_plan_says_how_many_samples_are_asked_and_which_fields_vote() -> None:
    options: dict[str, Any] = {"task": "{input}", "inputs": ["a"] * 10, "samples": 3, "backend": ScriptedBackend([])}
    plan = BatchAgent.plan(**options, output_schema=Answer)
    assert "3 of each row, 2 at once, the others only where those do not decide; voted: mood" in str(plan)
    alone = BatchAgent.plan(**{**options, "samples": 1}, output_schema=Answer)
    plans = [DryRun.untouched(each).to_json()["estimated_tokens"] for each in (plan, alone)]
    assert plans[0]["first_requests"] == 3 * plans[1]["first_requests"]  # type: ignore[index,call-overload,operator]


@virtual_clock
@pytest.mark.parametrize("limit", [{"max_agents": 1}, {"max_inflight": 1}, {"max_agents": 2, "max_inflight": 1}])
async def test_little_room_delays_samples_and_never_stops_them(limit: dict[str, int]) -> None:
    script = by_row({row: ["good", "bad", "mixed"] for row in "abcdef"})
    results, backend = await run(script, inputs=list("abcdef"), **limit)
    assert [len(result.samples) for result in results] == [3] * 6
    assert backend.peak_inflight == 1


@virtual_clock
async def test_a_row_whose_run_is_drained_still_gets_the_samples_that_it_needs() -> None:
    backend = ScriptedBackend(by_row({"a": ["good", "bad", "bad"], "b": ["good"] * 3}))
    async with BatchAgent.open(
        task="{input}", inputs=["a", "b"], output_schema=MOODS, samples=3, backend=backend, max_agents=1
    ) as opened:
        run: Any = opened
        while not backend.requests:
            await asyncio.sleep(0.1)
        run.drain()
        results = [result async for result in run.results()]
    done = {result.job_id: result for result in results if result.ok}
    assert done["0"].votes == {"mood": {"counts": {"good": 1, "bad": 2}, "against": 1}}
    assert len(backend.requests) == 3


@virtual_clock
async def test_a_run_out_of_budget_leaves_a_row_unfinished_and_a_resume_asks_the_rest(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "resume": True, "inputs": ["a"], "max_tokens": 20}
    short, backend = await run(by_row({"a": ["good", "bad", "bad"]}), max_total_tokens=45, **options)
    assert [result.error.type for result in short if result.error] == ["Interrupted"]
    asked = len(backend.requests)
    assert asked < 3
    again, backend = await run(by_row({"a": ["good", "bad", "bad"][asked:]}), **options)
    assert (len(again[0].samples), len(backend.requests)) == (3, 3 - asked)


@virtual_clock
async def test_a_request_that_fails_for_a_moment_is_no_failed_sample() -> None:
    answers = iter([Fail(503), Say('{"mood": "good"}'), Say('{"mood": "good"}')])
    [result], _ = await run(lambda request: next(answers), max_retries=3)
    assert result.votes == {"mood": {"counts": {"good": 2}, "against": 0}}
    assert result.attempts == 2


async def test_a_function_votes_in_other_processes(tmp_path: Path) -> None:
    answers: Counter[str] = Counter()

    def script(request: Request) -> Say:
        answers[request.text] += 1
        return Say(json.dumps({"mood": ["good", "good", "bad"][answers[request.text] - 1]}))

    async with ScriptedServer(script, models=["m"]) as server:
        results = await BatchAgent.run(
            task="{input}",
            inputs=["a", "b"],
            output_schema=MOODS,
            samples=3,
            vote={"mood": "tests.run.test_samples:last_of"},
            backend=server.backend_url,
            model="m",
            cluster=WarmCrew(),
            run_dir=tmp_path,
        )
    assert [result.output for result in results] == [{"mood": "bad"}] * 2
    assert results.summary.to_json()["samples"] == {
        "rows": 2,
        "asked": 6,
        "spared": 0,
        "identical": False,
        "rows_identical": 0,
    }


@virtual_clock
async def test_a_tool_that_reads_may_be_called_by_each_sample() -> None:
    @Tool.define(effect="read")
    async def look_up(word: str) -> str:
        """Look a word up."""
        return f"about {word}"

    def script(request: Request) -> Say:
        return CallTools(ToolUse("look_up", {"word": "x"})) if request.turn == 0 else Say('{"mood": "good"}')

    [result], _ = await run(script, tools=[look_up])
    assert (result.output, result.turns) == ({"mood": "good"}, 4)


@virtual_clock
async def test_a_row_with_samples_can_be_watched_and_cancelled() -> None:
    backend = ScriptedBackend(lambda request: Say('{"mood": "good"}', latency=20))
    async with BatchAgent.open(
        task="{input}", inputs=["a", "b"], output_schema=MOODS, samples=3, backend=backend
    ) as opened:
        run: Any = opened
        while len(backend.requests) < 4:
            await asyncio.sleep(1)
        assert run.live_row("0")["messages"][-1]["content"] == "a"
        with pytest.raises(SpecError, match="samples, which cannot start again"):
            run.retry_row("0")
        run.cancel_row("0")
        results = {result.job_id: result async for result in run.results()}
    assert results["0"].error.type == "Cancelled"
    assert results["1"].output == {"mood": "good"}
    assert Counter(request.text for request in backend.requests if request.text in "ab") == {"a": 2, "b": 2}


@virtual_clock
async def test_the_reduction_of_a_pipeline_is_asked_once_unless_it_wants_samples_itself() -> None:
    def script(request: Request) -> Say:
        return Say("all is well") if "Sum up" in request.text else Say('{"mood": "good"}')

    for own, reductions in ({}, 1), ({"samples": 3}, 2):
        backend = ScriptedBackend(script)
        stages = Pipeline(["a", "b"]).map(name="moods", task="{input}", output_schema=MOODS).reduce("Sum up", **own)
        outcome: Any = await stages.run(backend=backend, samples=3, vote={"mood": "majority"} if not own else None)
        assert outcome.outputs == ["all is well"]
        texts = Counter("Sum up" in request.text for request in backend.requests)
        assert texts == {False: 4, True: reductions}


async def test_a_server_that_refuses_seeds_is_asked_without_them_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(request: Request) -> Say | Fail:
        if "seed" in request.body:
            return Fail(422, {"error": {"message": "seed: extra fields are not permitted"}})
        return Say('{"mood": "good"}')

    async with ScriptedServer(script, models=["m"]) as server:
        options: dict[str, Any] = {"output_schema": MOODS, "samples": 3, "max_inflight": 1}
        results = await BatchAgent.run(
            task="{input}", inputs=["a", "b"], backend=server.backend_url, model="m", **options
        )
        assert server.received == 5
    assert [len(result.samples) for result in results] == [2, 2]
    assert sum("takes no seed" in record.message for record in caplog.records) == 1


async def test_a_resumed_run_takes_the_samples_of_a_pending_job_of_a_batch_api(tmp_path: Path) -> None:
    numbers = count()

    def script(request: Request) -> Say:
        return Say(json.dumps({"mood": ["good", "bad"][next(numbers) % 2]}))

    async with BatchServer(script, polls=3) as server:
        place = f"anthropic-batch://{server.address}?gather=0.05&look=0.1"  # its samples are equal requests
        known: dict[str, Any] = {"backend": place, "model": "claude-3-haiku", "api_key": "k", "max_tokens": 9}
        options = known | {"task": "{input}", "inputs": ["a", "b", "b"], "output_schema": MOODS, "samples": 3}
        options |= {"run_dir": tmp_path, "resume": True}
        running = asyncio.ensure_future(BatchAgent.run(**options))
        while not server.jobs or not server.jobs[0].polls:
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        results = await BatchAgent.run(**options)
        assert [len(job.requests) for job in server.jobs] == [9]
    assert [len(result.samples) for result in results] == [3, 3, 3]
