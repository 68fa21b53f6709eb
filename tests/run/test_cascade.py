"""Cascades: which rows go to the next entry, what results say of it, and that nothing is asked or written twice."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, Pipeline, Results, Tool
from batch_agent.backends.base import Capabilities
from batch_agent.errors import SpecError
from batch_agent.messages import TokenChance, Usage
from batch_agent.run.cascade import MOST_WAITING
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

CAN_DOUBT = Capabilities(native_schema=True, logprobs=True)
MOODS = {"mood": "good|bad"}
GOOD, BAD = '{"mood": "good"}', '{"mood": "bad"}'


def text_of(request: Request) -> str:
    return next(str(message["content"]) for message in request.messages if message["role"] == "user")


def says(answers: dict[str, str], otherwise: str = GOOD, **known: Any) -> Callable[[Request], Say]:
    return lambda request: Say(answers.get(text_of(request), otherwise), **known)


def doubting(chance: Callable[[str], float | None], mood: str = "good") -> Callable[[Request], Say]:
    """Answer with these chances of the field; None: the server reports no tokens."""

    def script(request: Request) -> Say:
        known = chance(text_of(request))
        parts = ['{"mood": "', mood, '"}']
        if known is None:
            return Say("".join(parts))
        logs = [0.0, math.log(known), 0.0]
        return Say(
            "".join(parts), tokens=[TokenChance(part.encode(), log) for part, log in zip(parts, logs, strict=True)]
        )

    return script


async def run(small: Any, large: Any, **options: Any) -> tuple[Results[Any], ScriptedBackend, ScriptedBackend]:
    backends = [each if isinstance(each, ScriptedBackend) else ScriptedBackend(each) for each in (small, large)]
    known: dict[str, Any] = {"task": "{input}", "inputs": ["a", "b"], "output_schema": MOODS, "max_retries": 0}
    first, second = options.pop("first", {}), options.pop("second", {})
    people = ["people"] if options.pop("people", False) else []
    cascade = [{"backend": backends[0], "name": "small", **first}, {"backend": backends[1], "name": "large", **second}]
    results = await BatchAgent.run(cascade=[*cascade, *people], **{**known, **options})
    return results, backends[0], backends[1]


def by(results: list[AgentResult[Any]]) -> list[str | None]:
    return [result.answered_by for result in results]


@virtual_clock
async def test_only_rows_without_a_valid_answer_go_to_the_next_entry() -> None:
    results, small, large = await run(says({"b": "no json"}), says({}, BAD))
    assert [result.output for result in results] == [{"mood": "good"}, {"mood": "bad"}]
    assert by(results) == ["small", "large"]
    assert (len(small.requests), len(large.requests)) == (2, 1)
    assert results[0].earlier == ()
    [earlier] = results[1].earlier
    assert (earlier.name, earlier.output) == ("small", None)
    assert earlier.error is not None
    assert earlier.error.type == "NotJSON"
    assert not any(result.escalated for result in results)
    assert results[1].turns == 2
    assert results[1].usage.prompt_tokens > results[0].usage.prompt_tokens


@virtual_clock
@pytest.mark.parametrize("recorded", [False, True])
async def test_a_row_that_does_not_fit_the_first_model_goes_to_a_larger_one(recorded: bool, tmp_path: Path) -> None:
    place: dict[str, Any] = {"run_dir": tmp_path / "run"} if recorded else {}
    long = "long " * 2000
    sizes = {"first": {"model_max_context": 1000}, "second": {"model_max_context": 100_000}, **place}
    results, small, large = await run(says({}), says({}, BAD), inputs=["a", long], **sizes)
    assert by(results) == ["small", "large"]
    assert results[1].earlier[0].error is not None
    assert results[1].earlier[0].error.type == "OVERSIZED"
    assert (len(small.requests), len(large.requests)) == (1, 1)
    if recorded:
        again, small, large = await run(says({}), says({}, GOOD), inputs=["a", long], **sizes, resume=True)
        assert [result.output for result in again] == [result.output for result in results]
        assert small.requests == large.requests == []


@virtual_clock
async def test_an_answer_that_was_cut_goes_to_the_next_entry() -> None:
    results, _, _ = await run(
        lambda request: Say("half", finish_reason="length"), says({}, "whole"), output_schema=None, inputs=["a"]
    )
    assert (results[0].output, results[0].answered_by, results[0].truncated) == ("whole", "large", False)
    assert results[0].earlier[0].output == "half"


@virtual_clock
async def test_a_row_whose_server_is_away_or_refuses_for_load_does_not_go_on() -> None:
    def busy(request: Request) -> Say | Fail:
        return Fail(429) if text_of(request) == "b" else Say(GOOD)

    results, _, large = await run(busy, says({}, BAD))
    assert [result.ok for result in results] == [True, False]
    assert results[1].error is not None
    assert results[1].error.type == "RateLimited"
    assert large.requests == []
    assert not results[1].escalated


@virtual_clock
async def test_a_doubtful_answer_goes_on_and_its_doubt_stays_with_it() -> None:
    results, small, large = await run(
        ScriptedBackend(doubting({"a": 0.9, "b": 0.6, "c": None}.get), capabilities=CAN_DOUBT),
        says({}, BAD),
        inputs=["a", "b", "c"],
        escalate="doubt > 0.3",
    )
    assert by(results) == ["small", "large", "large"]
    assert results[0].doubt == pytest.approx(0.1)
    assert results[1].doubt is None
    assert results[1].earlier[0].doubt == pytest.approx(0.4)
    assert results[1].earlier[0].output == {"mood": "good"}
    assert results[2].earlier[0].doubt is None
    assert all(request.body["logprobs"] for request in small.requests)
    assert "logprobs" not in large.requests[0].body


@virtual_clock
async def test_votes_decide_and_the_next_entry_has_its_own_samples() -> None:
    def small(request: Request) -> Say:
        return Say(GOOD if text_of(request) == "a" or request.body["seed"] % 2 else BAD)

    results, first, second = await run(
        small, says({}, BAD), escalate="votes.mood.against > 0", first={"samples": 3, "seed": 1}, second={"samples": 3}
    )
    assert by(results) == ["small", "large"]
    assert results[0].votes == {"mood": {"counts": {"good": 2}, "against": 0}}
    assert results[1].votes == {"mood": {"counts": {"bad": 2}, "against": 0}}
    assert results[1].earlier[0].votes == {"mood": {"counts": {"good": 2, "bad": 1}, "against": 1}}
    assert len(results[1].samples) == 2
    assert (len(first.requests), len(second.requests)) == (5, 2)  # two equal answers of three decide


@virtual_clock
async def test_a_field_of_the_answer_decides() -> None:
    answers = {"a": '{"mood": "good", "unsure": false}', "b": '{"mood": "good", "unsure": true}'}
    schema = {"mood": "good|bad", "unsure": "boolean"}
    results, _, _ = await run(
        says(answers), says({}, '{"mood": "bad", "unsure": false}'), output_schema=schema, escalate="output.unsure"
    )
    assert by(results) == ["small", "large"]


class Mood(BaseModel):
    mood: Literal["good", "bad"]


@virtual_clock
async def test_a_function_of_the_result_decides_and_gets_an_instance_of_the_schema() -> None:
    seen: list[object] = []

    def unsure(result: AgentResult[Any]) -> bool:
        seen.append(result.output)
        return bool(result.output.mood == "bad")

    results, _, _ = await run(says({"b": BAD}), says({}, GOOD), output_schema=Mood, escalate=unsure)
    assert by(results) == ["small", "large"]
    assert seen == [Mood(mood="good"), Mood(mood="bad")]
    assert results[1].earlier[0].output == {"mood": "bad"}


@virtual_clock
async def test_a_function_that_raises_fails_its_row_with_what_it_raised() -> None:
    def broken(result: AgentResult[Any]) -> bool:
        raise KeyError("mood")

    results, _, large = await run(says({}), says({}), escalate=broken)
    assert {result.error.type for result in results if result.error is not None} == {"WorkerFailed"}
    assert results[0].error is not None
    assert "escalate: KeyError: 'mood'" in results[0].error.message
    assert large.requests == []


@virtual_clock
async def test_rows_that_no_model_can_answer_wait_for_people() -> None:
    answers = {"b": "no json"}
    results, _, _ = await run(says({**answers, "c": "no"}), says(answers, BAD), people=True, inputs=["a", "b", "c"])
    assert by(results) == ["small", None, "large"]
    assert [result.waits_for for result in results] == [None, "people", None]
    assert not results[1].ok
    assert [each.name for each in results[1].earlier] == ["small"]
    assert "people: 1 row came to them" in str(results.summary)


@virtual_clock
@pytest.mark.parametrize("people", [False, True])
async def test_a_failed_row_is_retried_at_the_last_model_unless_people_have_it(people: bool, tmp_path: Path) -> None:
    place = {"run_dir": tmp_path / "run", "inputs": ["a"], "people": people}
    await run(says({}, "no json"), says({}, "no json"), **place)
    results, small, large = await run(says({}), says({}, BAD), **place, resume=True)
    assert small.requests == []
    assert len(large.requests) == (0 if people else 1)
    assert (results[0].ok, results[0].waits_for) == ((False, "people") if people else (True, None))


@virtual_clock
async def test_an_answer_that_waits_for_people_is_delivered_meanwhile() -> None:
    results, _, _ = await run(says({}), says({}), people=True, escalate="output.mood == 'good'", inputs=["a"])
    assert (results[0].output, results[0].answered_by, results[0].waits_for) == ({"mood": "good"}, "large", "people")
    assert [each.name for each in results[0].earlier] == ["small"]


@virtual_clock
async def test_a_doubtful_answer_stays_if_the_last_model_has_none() -> None:
    results, _, _ = await run(says({}), says({}, "no json"), escalate="output.mood == 'good'", inputs=["a"])
    assert (results[0].output, results[0].answered_by, results[0].escalated) == ({"mood": "good"}, "small", False)
    assert [(each.name, each.error is not None and each.error.type) for each in results[0].earlier] == [
        ("large", "NotJSON")
    ]


@virtual_clock
async def test_each_entry_has_its_own_prompt_sampling_tools_and_a_new_conversation() -> None:
    @Tool.define(effect="read", cacheable=True)
    def look(word: str) -> str:
        """Look a word up."""
        return word.upper()

    def large(request: Request) -> Say | CallTools:
        if any(message["role"] == "tool" for message in request.messages):
            return Say(BAD)
        return CallTools(ToolUse("look", {"word": "x"}))

    results, first, second = await run(
        says({}, "no json"),
        large,
        inputs=["a"],
        system_prompt="Judge.",
        temperature=0.1,
        second={"system_prompt": "Judge well.", "temperature": 0.9, "tools": [look], "max_turns": 3, "max_tokens": 77},
    )
    assert results[0].output == {"mood": "bad"}
    assert [message["role"] for message in second.requests[0].messages] == ["system", "user"]
    assert first.requests[0].messages[0]["content"].startswith("Judge.")
    assert second.requests[0].messages[0]["content"].startswith("Judge well.")
    bodies = first.requests[0].body, second.requests[0].body
    assert [body["temperature"] for body in bodies] == [0.1, 0.9]
    assert [body.get("max_tokens") for body in bodies] == [None, 77]
    assert ["tools" in body for body in bodies] == [False, True]


@virtual_clock
async def test_a_tool_of_another_entry_is_unknown_to_a_model() -> None:
    calls: list[str] = []

    @Tool.define(effect="read")
    def secret(word: str) -> str:
        """Only for the second entry."""
        calls.append(word)
        return word

    @Tool.define(effect="read")
    def open_one(word: str) -> str:
        """For the first entry."""
        return word

    def small(request: Request) -> Say | CallTools:
        told = [message["content"] for message in request.messages if message["role"] == "tool"]
        return (
            Say(json.dumps({"mood": "bad"}))
            if told and "there is no tool" in told[0]
            else CallTools(ToolUse("secret", {"word": "x"}))
        )

    results, _, _ = await run(small, says({}), inputs=["a"], first={"tools": [open_one]}, second={"tools": [secret]})
    assert results[0].output == {"mood": "bad"}
    assert calls == []


@virtual_clock
@pytest.mark.parametrize("recorded", [False, True])
async def test_a_write_with_the_same_arguments_is_not_made_again(recorded: bool, tmp_path: Path) -> None:
    written: list[str] = []

    @Tool.define(effect="write")
    async def book(row: str) -> str:
        """Write."""
        written.append(row)
        return f"booked {len(written)}"

    def script(answer: str, *rows: str) -> Callable[[Request], Say | CallTools]:
        def reply(request: Request) -> Say | CallTools:
            told = [str(message["content"]) for message in request.messages if message["role"] == "tool"]
            if told:
                return Say(answer.replace("TOLD", "; ".join(told)))
            return CallTools(*(ToolUse("book", {"row": row}) for row in rows))

        return reply

    place: dict[str, Any] = {"run_dir": tmp_path / "run"} if recorded else {}
    results, _, _ = await run(
        script("no json", "x", "x"),
        script(json.dumps({"told": "TOLD"}), "x", "y", "x", "x"),
        inputs=["a"],
        tools=[book],
        output_schema={"told": "text"},
        **place,
    )
    assert sorted(written) == ["x", "x", "x", "y"]  # of the three of the second entry, the first made two
    assert sorted(results[0].output["told"].split("; "))[:2] == ["booked 1", "booked 2"]


@virtual_clock
async def test_rows_go_on_while_others_are_still_asked() -> None:
    order: list[tuple[str, str]] = []

    def small(request: Request) -> Say:
        order.append(("small", text_of(request)))
        return Say("no", latency=1 if text_of(request) == "a" else 50)

    def large(request: Request) -> Say:
        order.append(("large", text_of(request)))
        return Say(GOOD, latency=1)

    await run(small, large, inputs=["a", "b", "c"], max_inflight=2)
    assert order.index(("large", "a")) < order.index(("small", "c")) or order.index(("large", "a")) == 2


@virtual_clock
async def test_an_entry_that_is_down_does_not_stop_the_others_and_its_rows_keep_their_answers() -> None:
    down = ScriptedBackend(lambda request: Fail(503))
    answers = {f"{n}": GOOD for n in range(20)} | {"x": "no json"}
    results, small, _ = await run(
        says(answers), down, inputs=[*map(str, range(20)), "x", "y"], escalate="output.mood == 'bad'", max_outage=60
    )
    assert {text_of(request) for request in small.requests} > {*map(str, range(20)), "x", "y"}
    assert all(result.ok for result in results[:20])
    assert not results[20].ok
    assert results[20].waits_for == "large"
    summary = results.summary.to_json()
    assert (summary["ended"], summary["cascade"]["waiting"]) == ("unreachable", {"large": 1})
    assert "1 row waits for large: " in summary["reason"]


@virtual_clock
async def test_a_doubtful_answer_is_delivered_marked_if_the_next_entry_is_down_and_is_asked_later(
    tmp_path: Path,
) -> None:
    away = True

    def large(request: Request) -> Say | Fail:
        return Fail(503) if away else Say(BAD)

    rule = {"escalate": "output.mood == 'good'", "inputs": ["a"], "max_outage": 20, "run_dir": tmp_path / "run"}
    [result], _, _ = await run(says({}), large, **rule)
    assert (result.output, result.answered_by, result.waits_for) == ({"mood": "good"}, "small", "large")
    away = False
    [result], small, _ = await run(says({}), large, **rule, resume=True)
    assert (result.output, result.answered_by, result.waits_for) == ({"mood": "bad"}, "large", None)
    assert small.requests == []


class Elsewhere(ScriptedBackend):
    """At another address than other scripted backends, so that it has its own agents."""

    @property
    def name(self) -> str:
        return "elsewhere://"


@virtual_clock
@pytest.mark.parametrize("down", [False, True])
async def test_rows_that_wait_for_a_later_entry_are_limited_and_one_that_is_down_stops_no_row(down: bool) -> None:
    count, waiting, most = MOST_WAITING + 200, 0, 0

    async def slow(request: Request) -> Say | Fail:
        nonlocal waiting, most
        if down:
            return Fail(503)
        waiting = len(small.requests) - len(done)
        most = max(most, waiting)
        await asyncio.sleep(1)
        done.append(request.number)
        return Say(BAD)

    done: list[int] = []
    small, large = ScriptedBackend(says({})), Elsewhere(slow)
    cascade = [{"backend": small, "name": "small"}, {"backend": large, "name": "large"}]
    results = await BatchAgent.run(
        task="{input}",
        inputs=[f"row {number}" for number in range(count)],
        output_schema=MOODS,
        cascade=cascade,
        escalate="output.mood == 'good'",
        max_inflight=64,
        max_outage=60,
    )
    assert len(small.requests) >= count
    assert {result.answered_by for result in results} == {"small" if down else "large"}
    assert {result.waits_for for result in results} == {"large" if down else None}
    assert down or MOST_WAITING / 2 < most <= MOST_WAITING


async def test_a_server_that_is_not_there_at_the_start_does_not_stop_the_run() -> None:
    async with ScriptedServer(says({}), models=["m"]) as server:
        results = await BatchAgent.run(
            task="{input}",
            inputs=["a", "b"],
            output_schema=MOODS,
            cascade=[{"backend": server.backend_url}, {"backend": "vllm://127.0.0.1:9"}],
        )
    assert by(results) == ["m", "m"]


async def test_the_default_name_of_an_entry_is_its_model_and_equal_names_are_refused() -> None:
    async with (
        ScriptedServer(says({}, "no"), models=["small"]) as one,
        ScriptedServer(says({}), models=["large"]) as two,
    ):
        known: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "output_schema": MOODS, "max_retries": 0}
        places = [{"backend": server.backend_url} for server in (one, two)]
        [result] = await BatchAgent.run(**known, cascade=places)
        assert (result.answered_by, result.earlier[0].name) == ("large", "small")
        with pytest.raises(SpecError, match="two entries are called 'x'"):
            await BatchAgent.run(**known, cascade=[{**place, "name": "x"} for place in places])
        with pytest.raises(SpecError, match="two entries are called 'vllm:"):
            await BatchAgent.run(**known, cascade=[places[0], {**places[0], "samples": 3}])
        assert one.received + two.received == 2


@virtual_clock
async def test_the_summary_has_rows_and_cost_of_each_entry_and_of_the_last_model_alone() -> None:
    prices = {"input": 1.0, "output": 0.0}
    usage = Usage(1_000_000)
    results, _, _ = await run(
        says({"b": "no json"}, usage=usage),
        says({}, usage=usage),
        inputs=list("abcd"),
        first={"prices": prices},
        second={"prices": {"input": 10.0, "output": 0.0}},
    )
    shown = results.summary.to_json()["cascade"]
    assert [(each["name"], each["asked"], each["answered"], each["cost"]) for each in shown["entries"]] == [
        ("small", 4, 3, 4.0),
        ("large", 1, 1, 10.0),
    ]
    assert shown["last_alone"] == 40.0
    assert (results[1].cost, results[1].earlier[0].cost) == (11.0, 1.0)
    assert "large alone: about $40" in str(results.summary)


@virtual_clock
async def test_a_budget_holds_for_all_entries_together() -> None:
    usage = Usage(1_000_000)
    results, _, large = await run(
        says({}, "no json", usage=usage),
        says({}, usage=usage),
        inputs=list("abcdefgh"),
        prices={"input": 1.0, "output": 0.0},
        max_cost=9.0,
        max_inflight=1,
        max_tokens=1,
    )
    summary = results.summary.to_json()
    assert summary["ended"] == "out of budget"
    assert summary["cost"] <= 9.0
    assert len(large.requests) == sum(result.ok for result in results) > 0


@virtual_clock
async def test_rows_of_a_finished_run_are_not_asked_again_and_say_the_same(tmp_path: Path) -> None:
    place = {"run_dir": tmp_path / "run"}
    before, _, _ = await run(says({"b": "no json"}), says({}, BAD), **place)
    after, small, large = await run(says({}), says({}), **place, resume=True)
    assert small.requests == large.requests == []
    for one, other in zip(before, after, strict=True):
        assert (one.output, one.answered_by, one.earlier, one.waits_for) == (
            *(other.output, other.answered_by, other.earlier, other.waits_for),
        )
        assert other.resumed
    shown = after.summary.to_json()["cascade"]["entries"]
    assert [(each["asked"], each["answered"]) for each in shown] == [(2, 1), (1, 1)]


@virtual_clock
async def test_a_stricter_rule_sends_finished_rows_on_and_a_laxer_one_takes_no_answer_back(tmp_path: Path) -> None:
    place = {"run_dir": tmp_path / "run"}
    await run(says({}), says({}, BAD), **place, inputs=["a"])
    [result], small, large = await run(
        says({}), says({}, BAD), **place, inputs=["a"], resume=True, escalate="output.mood == 'good'"
    )
    assert (result.answered_by, len(small.requests), len(large.requests)) == ("large", 0, 1)
    [result], small, large = await run(says({}), says({}, BAD), **place, inputs=["a"], resume=True, escalate="invalid")
    assert (result.answered_by, len(small.requests), len(large.requests)) == ("large", 0, 0)


@virtual_clock
async def test_a_run_without_a_cascade_is_continued_with_one_and_keeps_its_answers(tmp_path: Path) -> None:
    known: dict[str, Any] = {"task": "{input}", "inputs": ["a", "b"], "output_schema": MOODS, "max_retries": 0}
    first = ScriptedBackend(says({"b": "no json"}))
    await BatchAgent.run(**known, backend=first, run_dir=tmp_path / "run")
    results, small, large = await run(says({}), says({}, BAD), run_dir=tmp_path / "run", resume=True)
    assert by(results) == ["small", "large"]
    assert (len(small.requests), len(large.requests)) == (0, 1)


@virtual_clock
async def test_an_edited_entry_drops_its_own_answers_only_and_asks_before(tmp_path: Path) -> None:
    place = {"run_dir": tmp_path / "run"}
    await run(says({"b": "no json"}), says({}, BAD), **place)
    edited = {"second": {"system_prompt": "Again."}, **place, "resume": True}
    with pytest.raises(SpecError, match="1 recorded answer would be dropped") as raised:
        await run(says({}), says({}, GOOD), **edited)
    assert "cascade: entry 2: system_prompt: not given → Again." in str(raised.value)
    kept, small, large = await run(says({}), says({}, GOOD), **edited, on_change="keep")
    assert [result.output for result in kept] == [{"mood": "good"}, {"mood": "bad"}]
    assert small.requests == large.requests == []
    again, small, large = await run(says({}), says({}, GOOD), **edited, on_change="resend")
    assert [result.output for result in again] == [{"mood": "good"}, {"mood": "good"}]
    assert (len(small.requests), len(large.requests)) == (0, 1)


@virtual_clock
async def test_a_cancelled_row_ends_at_the_entry_where_it_is() -> None:
    going = asyncio.Event()

    async def large(request: Request) -> Say:
        going.set()
        await asyncio.sleep(1000)
        return Say(BAD)

    one, two = ScriptedBackend(says({}, "no json")), ScriptedBackend(large)
    async with BatchAgent.open(
        task="{input}",
        inputs=["a"],
        output_schema=MOODS,
        max_retries=0,
        cascade=[{"backend": one, "name": "small"}, {"backend": two, "name": "large"}],
    ) as opened:
        await going.wait()
        assert opened.live_row("0")["messages"]
        with pytest.raises(SpecError, match="several entries of a cascade"):
            opened.retry_row("0")
        opened.cancel_row("0")
        results = [result async for result in opened.results()]
    assert results[0].error is not None
    assert results[0].error.type == "Cancelled"
    assert [each.name for each in results[0].earlier] == ["small"]


@virtual_clock
async def test_the_stage_of_a_pipeline_may_be_a_cascade() -> None:
    one, two, after = (
        ScriptedBackend(says({"b": "no json"})),
        ScriptedBackend(says({}, BAD)),
        ScriptedBackend(says({}, "ok")),
    )
    entries = [{"backend": one, "name": "small"}, {"backend": two, "name": "large"}]
    stages = Pipeline(["a", "b"]).map(name="judge", task="{input}", output_schema=MOODS, max_retries=0, cascade=entries)
    outcome = await stages.map(name="tell", task="{mood}").run(backend=after)
    assert [result.output for result in outcome.results["tell"]] == ["ok", "ok"]
    assert by([*outcome.results["judge"]]) == ["small", "large"]
    assert (len(one.requests), len(two.requests)) == (2, 1)
    assert sorted(text_of(request) for request in after.requests) == ["bad", "good"]
    shown = outcome.summary.to_json()["cascade"]["entries"]
    assert [(each["name"], each["asked"]) for each in shown] == [("small", 2), ("large", 1)]


async def test_an_entry_may_be_a_batch_api(tmp_path: Path) -> None:
    async with BatchServer(says({}, BAD)) as batches, ScriptedServer(says({"b": "no json"}), models=["m"]) as server:
        results = await BatchAgent.run(
            task="{input}",
            inputs=["a", "b"],
            output_schema=MOODS,
            max_retries=0,
            run_dir=tmp_path / "run",
            cascade=[
                {"backend": server.backend_url},
                {"backend": batches.backend_url, "model": "batched", "api_key": "k"},
            ],
        )
    assert by(results) == ["m", "batched"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cascade": ["people"]}, "has no model"),
    ({"cascade": [{"backend": "local://"}]}, "one entry"),
    ({"cascade": ["people", {"backend": "local://"}]}, 'entry 1 is "people"'),
    ({"cascade": [{"backend": "local://"}, "people", "people"]}, "once, as the last"),
    ({"cascade": [{"backend": "local://"}, {"name": "x"}]}, "entry 2 needs a backend"),
    ({"cascade": [{"backend": "local://"}, {"backend": "local://", "task": "x"}]}, "option of the whole run"),
    ({"cascade": [{"backend": "local://"}, {"backend": "local://", "sample": 3}]}, "no option 'sample'"),
    ({"cascade": [{"backend": "local://"}, "persons"]}, "neither a mapping"),
    ({"cascade": "no-such-file.json"}, "neither JSON nor a file"),
    ({"cascade": '[{"backend": '}, "its JSON cannot be read"),
    ({"backend": "local://"}, "backend and cascade exclude each other"),
    ({"model": "m"}, "model and cascade exclude each other"),
    ({"worker": print}, "cascade is for the tool loop"),
    ({"oversized": "chunk", "model_max_context": 10_000}, "exclude each other"),
    ({"escalate": "doubt >"}, "at character 8"),
    ({"escalate": "doubt > 0.3", "doubt": False}, "leave doubt out"),
    ({"escalate": "votes.mood.against > 0"}, "asks each row once"),
    ({"escalate": "output.sure"}, "no such field, but mood"),
    ({"escalate": "doubts.sure > 0.3", "samples": 3}, "no field 'sure'"),
    ({"escalate": "no_such_module:unsure"}, "cannot be imported"),
    ({"escalate": "doubt > 0.3"}, "reports no log-probabilities"),
    ({"cascade": None, "escalate": "invalid"}, "there is no cascade"),
    (
        {
            "cascade": [
                {"backend": "simulated://", "prices": {"gpu_hour": 2.0}},
                {"backend": "simulated://", "name": "b"},
            ]
        },
        "a price per gpu_hour is one of the whole run",
    ),
    ({"max_cost": 1.0}, "no price of"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
async def test_what_cannot_be_meant_is_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    plain = ScriptedBackend(says({}))
    cascade = [{"backend": plain, "name": "small"}, {"backend": plain, "name": "large"}]
    known: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "output_schema": MOODS, "cascade": cascade}
    with pytest.raises(SpecError) as raised:
        await BatchAgent.run(**{**known, **options})
    assert words in str(raised.value)
    assert plain.requests == []
