"""``batch-agent doctor --thorough``: what it finds of good, bad and dead servers, and what it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

import pytest
from tests.cli.thorough_requests import FOLDER, KEY, MODELS, examined, recorded, well

from batch_agent.backends.registry import open_backend
from batch_agent.cli.main import main
from batch_agent.conformance.examination import CHECKS, examine
from batch_agent.conformance.finding import STATUSES, Finding
from batch_agent.conformance.serving import judge_at_once
from batch_agent.door import Handler
from batch_agent.messages import Usage
from batch_agent.testing import Fail, Hang, Say, ScriptedServer, TokenChance
from batch_agent.testing.contract.wire import WireServer, stream
from batch_agent.testing.wire import Request


async def findings(server: ScriptedServer | str, *ids: str, seconds: float = 20.0) -> dict[str, Finding]:
    backend, _ = open_backend(server if isinstance(server, str) else server.backend_url)
    asked = [check for check in CHECKS if check.id in ids]
    async with backend:
        report = await examine(backend, "m", questions=asked, question_seconds=seconds)
    return {answer.id: answer.finding for answer in report.answers}


@pytest.mark.parametrize("kind", MODELS)
async def test_the_requests_to_a_paid_api_are_those_on_record(kind: str) -> None:
    report, requests = await examined(kind)
    assert {answer.id for answer in report.answers} == {check.id for check in CHECKS}
    assert report.answers_at_all
    assert recorded(requests) == json.loads((FOLDER / f"{kind}.json").read_text()), (
        "the requests changed: look at them, then run python -m tests.cli.thorough_requests"
    )


async def test_a_good_server_does_what_is_asked_of_it() -> None:
    async with ScriptedServer(well, models=["m"], api_key=None) as server:
        asked = ("plain", "usage", "token_limit", "stream_usage", "tool_auto", "tool_named", "tool_parallel", "schema")
        found = await findings(server, *asked, "schema_bounds", "tool_result", "stream_form", "unknown_model")
    assert {id: finding.status for id, finding in found.items()} == dict.fromkeys(found, "works")
    assert len(found) == len(asked) + 4


async def test_what_a_bad_server_lacks_is_said_with_the_flag() -> None:
    def bad(request: Request) -> Say:
        return Say("whatever you say", usage=Usage())

    async with ScriptedServer(bad) as server:
        found = await findings(server, "usage", "token_limit", "tool_named", "unknown_model", "wrong_key", "schema")
        found |= await findings(server, "cache_report", "tool_required")
    missing = {id for id, finding in found.items() if finding.status == "missing"}
    assert missing == {*found} - {"schema"}
    assert found["schema"].status == "emulated"
    assert "--tool-call-parser" in found["tool_named"].flag
    assert "--enable-prompt-tokens-details" in found["cache_report"].flag


@pytest.mark.parametrize(
    ("tokens", "status", "words"),
    [
        (
            (TokenChance(b"re", -0.1, ((b"re", -0.1), (b"bl", -3.0))), TokenChance(b"d", 0.0)),
            "works",
            "with alternatives",
        ),
        ((TokenChance(b"red", -0.1),), "works", "without alternatives"),
        ((TokenChance(b"blue", -0.1),), "missing", "are not its answer"),
        ((), "missing", "it reports none"),
    ],
)
async def test_log_probabilities_are_worth_something_if_their_tokens_are_the_answer(
    tokens: Sequence[TokenChance], status: str, words: str
) -> None:
    async with ScriptedServer(lambda request: Say("red", tokens=tokens)) as server:
        found = (await findings(server, "logprobs"))["logprobs"]
    assert found.status == status
    assert words in found.note


async def test_a_stream_without_a_finish_reason_is_a_fault() -> None:
    async with WireServer(stream({"choices": [{"index": 0, "delta": {"content": "one"}}]})) as server:
        found = await findings(server.url, "stream_form")
    assert "no finish_reason" in found["stream_form"].note


async def test_a_model_that_talks_about_a_tool_is_no_fault_of_the_server() -> None:
    async with ScriptedServer(lambda request: Say("Use weather.Paris() {so}.")) as server:
        assert (await findings(server, "tool_auto"))["tool_auto"].status == "unclear"
    async with ScriptedServer(lambda request: Say('{"name": "weather", "arguments": {}}')) as server:
        assert (await findings(server, "tool_auto"))["tool_auto"].status == "missing"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Fail(500, "out of memory"), "an error of the server (500)"),
        (Say("yes", usage=Usage(4_000, completion_tokens=1)), "to 4,000 and reported no error"),
    ],
)
async def test_a_prompt_that_is_too_long_and_not_refused_is_a_fault(answer: Say | Fail, words: str) -> None:
    async with ScriptedServer(lambda request: answer) as server:
        found = await findings(server, "overflow")
    assert found["overflow"].status == "missing"
    assert words in found["overflow"].note


async def test_a_server_without_metrics_lacks_its_load_and_nothing_else() -> None:
    class WithoutMetrics(ScriptedServer):
        def table(self) -> dict[str, Mapping[str, Handler]]:
            return {path: handlers for path, handlers in super().table().items() if path != "/metrics"}

    async with WithoutMetrics(well, models=["m"]) as server:
        found = await findings(server, "load", "load_counts", "kv_size", "priority")
    assert {id: finding.status for id, finding in found.items()} == {
        "load": "missing",
        "load_counts": "not asked",
        "kv_size": "emulated",
        "priority": "unclear",
    }
    assert "--disable-log-stats" in found["load"].flag


@pytest.mark.parametrize(
    ("one", "together", "status"),
    [(2.0, 2.2, "works"), (2.0, 16.0, "missing"), (0.001, 0.03, "unclear"), (0.001, 0.002, "works")],
)
def test_short_requests_do_not_show_that_they_wait(one: float, together: float, status: str) -> None:
    assert judge_at_once(one, together, "--more").status == status


async def test_a_question_without_an_answer_ends_and_the_others_are_not_asked() -> None:
    async with ScriptedServer(lambda request: Hang()) as server:
        found = await findings(server, "plain", "usage", seconds=0.2)
    assert found["plain"].status == "unclear"
    assert "no answer in 0.2 s" in found["plain"].note
    assert found["usage"].status == "not asked"


async def test_an_error_of_the_server_is_no_feature() -> None:
    async with ScriptedServer(lambda request: Fail(500)) as server:
        found = await findings(server, "plain", "system_prompt")
    assert {finding.status for finding in found.values()} == {"unclear", "not asked"}


async def test_the_command_prints_a_table_or_json_and_succeeds_if_the_server_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with ScriptedServer(well, models=["m"]) as server:
        url = server.backend_url
        assert await asyncio.to_thread(main, ["doctor", "--backend", url, "--thorough", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(main, ["doctor", url, "--thorough"]) == 0
    table = capsys.readouterr().out
    assert len(report["answers"]) == len(CHECKS) and report["requests"] > 40
    assert set(report["counts"]) == set(STATUSES)
    assert all(answer["question"] in table for answer in report["answers"])
    assert "--api-key KEY" in table


def test_a_server_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "vllm://127.0.0.1:9", "--thorough"]) == 1
    assert "connection refused" in capsys.readouterr().err


async def test_a_server_that_wants_a_key_says_where_to_put_it(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedServer(models=["m"], api_key="sk-1") as server:
        await asyncio.to_thread(main, ["doctor", "--backend", server.url, "--thorough"])
    assert "401: Unauthorized (no key was sent: set BATCH_AGENT_API_KEY" in capsys.readouterr().err


async def test_a_paid_api_gets_nothing_without_yes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedServer(well, models=["gpt-4o-mini"], api_key=KEY) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        words = ["doctor", "--backend", "openai://", "--model", "gpt-4o-mini", "--thorough"]
        assert await asyncio.to_thread(main, words) != 0
        assert server.received == 0
    told = capsys.readouterr().err
    assert "--yes" in told and f"{len(CHECKS)} questions" in told
    assert KEY not in told


def test_a_fleet_is_refused(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("127.0.0.1:9\n")
    assert main(["doctor", "--backend", f"fleet://{hosts}", "--thorough"]) != 0
    assert "one server" in capsys.readouterr().err
