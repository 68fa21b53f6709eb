"""``doubt=True``: what a run asks a server for, what its results say, and what happens where nothing is reported."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from batch_agent import AgentResult, BatchAgent, Tool
from batch_agent.backends.base import Capabilities
from batch_agent.errors import SpecError
from batch_agent.messages import TokenChance
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ScriptedServer, ToolUse

MOODS = {"mood": "good|bad", "why": "text"}


def say(mood: str, chance: float = 0.8, *, why: str = "so", **options: Any) -> Say:
    other = b"bad" if mood == "good" else b"good"
    others = ((mood.encode(), math.log(chance)), (other, math.log(0.1)), (b"fine", math.log(0.05)))
    parts = ['{"mood": "', mood, '", "why": "', why, '"}']
    tokens = [TokenChance(part.encode(), math.log(chance) if part == mood else 0.0) for part in parts]
    tokens[1] = TokenChance(mood.encode(), math.log(chance), others)
    return Say("".join(parts), tokens=tokens, **options)


async def run(server: ScriptedServer, **options: Any) -> list[AgentResult[Any]]:
    known = {"task": "{input}", "inputs": ["a", "b"], "output_schema": MOODS, "doubt": True, "max_retries": 0}
    return await BatchAgent.run(**{**known, "backend": server.backend_url, "model": "scripted", **options})


async def test_a_result_has_the_doubt_of_each_field_and_the_largest() -> None:
    async with ScriptedServer(lambda request: say("good"), models=["scripted"]) as server:
        [result, _] = await run(server)
        [plain, _] = await run(server, doubt=False)
    assert result.doubts == {"mood": pytest.approx(1 - 0.8 / 0.9), "why": 0.0}
    assert result.doubt == result.doubts["mood"]
    asked = [request.body for request in server.requests]
    assert [(body.get("logprobs"), body.get("top_logprobs")) for body in asked] == [(True, 5)] * 2 + [(None, None)] * 2
    assert (plain.doubts, plain.doubt) == (None, None)


async def test_the_doubt_is_written_and_comes_back_from_the_record(tmp_path: Path) -> None:
    place = {"run_dir": tmp_path, "resume": True}
    async with ScriptedServer(lambda request: say("good", 0.7), models=["scripted"]) as server:
        first = await run(server, **place)
        again = await run(server, **place)
        assert server.received == 2
    assert [result.doubts for result in again] == [result.doubts for result in first]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["doubt"], line["doubts"]) for line in lines] == [(again[0].doubt, again[0].doubts)] * 2


async def test_a_tool_loop_has_the_doubt_of_its_last_answer_also_in_a_stream() -> None:
    @Tool.define(effect="read", cacheable=True)
    async def look_up(word: str) -> str:
        """Look a word up."""
        return word

    def script(request: Request) -> Say:
        return CallTools(ToolUse("look_up", {"word": "x"})) if request.turn == 0 else say("bad", 0.6)

    async with ScriptedServer(script, models=["scripted"]) as server:
        [result, _] = await run(server, tools=[look_up])
        assert any(request.body.get("stream") for request in server.requests)
    assert result.doubts == {"mood": pytest.approx(0.1 / 0.7), "why": 0.0}


async def test_an_answer_that_was_mended_has_no_doubt() -> None:
    text = "Here it is: {'mood': 'good', 'why': 'so'}"
    async with ScriptedServer(
        lambda r: Say(text, tokens=[TokenChance(text.encode(), -0.1)]), models=["scripted"]
    ) as server:
        [result, _] = await run(server)
    assert result.repaired
    assert (result.doubts, result.doubt) == ({"mood": None, "why": None}, None)


async def test_tokens_that_are_not_the_answer_give_no_doubt() -> None:
    told = say("good").tokens
    async with ScriptedServer(
        lambda r: Say('{"mood": "bad", "why": "so"}', tokens=told), models=["scripted"]
    ) as server:
        [result, _] = await run(server)
    assert result.doubts == {"mood": None, "why": None}


@pytest.mark.parametrize("named", [True, False])
async def test_a_server_that_refuses_the_field_is_asked_without_it_once_with_one_warning(
    named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: Request) -> Say | Fail:
        if "logprobs" in request.body:
            message = "logprobs are not supported" if named else "bad request"
            return Fail(400, {"error": {"message": message}})
        return Say('{"mood": "good", "why": "so"}')

    async with ScriptedServer(script, models=["scripted"]) as server:
        results = await run(server, inputs=["a", "b", "c", "d"], max_inflight=1)
        assert server.received == 5
    assert [(result.ok, result.doubt) for result in results] == [(True, None)] * 4
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["log-probabilities" in record.message for record in warnings] == [True]


async def test_a_refusal_with_another_reason_keeps_its_reason_and_the_log_probabilities() -> None:
    def script(request: Request) -> Say | Fail:
        return Fail(400, {"error": {"message": "bad row"}}) if request.text == "b" else say("good")

    async with ScriptedServer(script, models=["scripted"]) as server:
        results = await run(server, inputs=["a", "b", "c"], max_inflight=1)
        assert server.received == 3
    assert [result.ok for result in results] == [True, False, True]
    assert results[2].doubt is not None


async def test_a_server_that_reports_none_is_not_asked_again_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedServer(lambda r: Say('{"mood": "good", "why": "so"}'), models=["scripted"]) as server:
        results = await run(server, inputs=["a", "b", "c"], max_inflight=1)
        assert ["logprobs" in request.body for request in server.requests] == [True, False, False]
    assert [result.doubts for result in results] == [{"mood": None, "why": None}] * 3
    assert sum("reports no log-probabilities" in record.message for record in caplog.records) == 1


async def test_without_log_probabilities_votes_tell_the_doubt() -> None:
    moods = iter(["bad", "good", "good"])
    backend = ScriptedBackend(lambda request: Say(json.dumps({"mood": next(moods), "why": "so"})))
    [result] = await BatchAgent.run(
        task="{input}", inputs=["a"], output_schema=MOODS, doubt=True, samples=3, backend=backend
    )
    assert result.doubts == {"mood": pytest.approx(1 / 3), "why": None}
    assert result.doubt == pytest.approx(1 / 3)


async def test_with_both_the_log_probabilities_of_the_winners_tell_it() -> None:
    moods = iter([("bad", 0.5), ("good", 0.9), ("good", 0.7)])
    backend = ScriptedBackend(lambda r: say(*next(moods)), capabilities=Capabilities(native_schema=True, logprobs=True))
    [result] = await BatchAgent.run(
        task="{input}", inputs=["a"], output_schema=MOODS, doubt=True, samples=3, backend=backend
    )
    assert result.output["mood"] == "good"
    assert result.doubts == {"mood": pytest.approx(0.1), "why": 0.0}


async def test_doubt_is_refused_where_nothing_can_tell_it() -> None:
    backend = ScriptedBackend(lambda request: Say("{}"))
    with pytest.raises(SpecError, match="doubt: scripted:// reports no log-probabilities; give samples=3"):
        await BatchAgent.run(task="{input}", inputs=["a"], output_schema=MOODS, doubt=True, backend=backend)
    assert not backend.requests


async def test_a_cached_answer_keeps_its_doubt(tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: say("good"), models=["scripted"]) as server:
        first = await run(server, cache=tmp_path, temperature=0)
        again = await run(server, cache=tmp_path, temperature=0)
        assert server.received == 2
    assert [result.doubts for result in again] == [result.doubts for result in first]


async def test_doubt_does_not_change_the_question_of_a_recorded_answer(tmp_path: Path) -> None:
    place = {"run_dir": tmp_path, "resume": True}
    async with ScriptedServer(lambda request: say("good"), models=["scripted"]) as server:
        await run(server, doubt=False, inputs=["a"], **place)
        results = await run(server, inputs=["a", "b"], **place)
        assert server.received == 2
    assert [result.doubt is not None for result in results] == [False, True]


async def test_a_free_text_answer_has_the_field_output() -> None:
    told = [TokenChance(b"yes", math.log(0.75)), TokenChance(b"<|end|>", 0.0)]
    async with ScriptedServer(lambda request: Say("yes", tokens=told), models=["scripted"]) as server:
        [result, _] = await run(server, output_schema=None)
    assert result.doubts == {"output": pytest.approx(0.25)}


async def test_a_table_has_columns_of_doubt_and_votes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    moods = iter(["bad", "good", "good"] * 2)
    backend = ScriptedBackend(lambda request: Say(json.dumps({"mood": next(moods), "why": "so"})))
    results = await BatchAgent.run(
        task="{input}", inputs=["a"], output_schema=MOODS, doubt=True, samples=3, backend=backend
    )
    frame = await asyncio.to_thread(results.to_pandas)
    assert isinstance(frame, pandas.DataFrame)
    assert frame["doubt"].tolist() == [pytest.approx(1 / 3)]
    assert frame["votes"].tolist() == [{"mood": {"counts": {"bad": 1, "good": 2}, "against": 1}}]


async def test_a_token_whose_log_probability_the_server_does_not_know_gives_no_doubt() -> None:
    told = [TokenChance(b'{"mood": "', 0.0), TokenChance(b"good", -9999.0), TokenChance(b'", "why": "so"}', 0.0)]
    async with ScriptedServer(
        lambda request: Say('{"mood": "good", "why": "so"}', tokens=told), models=["scripted"]
    ) as server:
        [result, _] = await run(server)
    assert result.doubts == {"mood": None, "why": 0.0}


class Renamed(BaseModel):
    mood: Literal["good", "bad"] = Field(alias="Mood")


async def test_a_field_that_the_model_knows_by_another_name_has_its_own_name_in_votes_doubts_and_gold(
    state: Path,
) -> None:
    told = [TokenChance(b'{"Mood": "', 0.0), TokenChance(b"good", math.log(0.75)), TokenChance(b'"}', 0.0)]
    backend = ScriptedBackend(
        lambda request: Say('{"Mood": "good"}', tokens=told),
        capabilities=Capabilities(native_schema=True, logprobs=True),
    )
    results = await BatchAgent.run(
        task="{text}",
        inputs=[{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}],
        output_schema=Renamed,
        samples=3,
        doubt=True,
        gold="label",
        backend=backend,
    )
    assert results[0].votes == {"mood": {"counts": {"good": 2}, "against": 0}}
    assert results[0].doubts == {"mood": pytest.approx(0.25)}
    assert results[0].output == Renamed(Mood="good")
    assert results.score()["mood"].accuracy == 0.5
    assert [each.rows for each in results.calibration()["mood"]] == [0, 0, 0, 0, 2]
