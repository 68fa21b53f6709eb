"""``truth="last"``: a threshold between two models is learned in the run, by an audit that no person makes."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.record.redis_servers import needs_redis
from tests.run.process_work import ROOT, WarmCrew
from tests.run.promised import MOODS, answer, doubting, standing
from tests.warm import start

from batch_agent import BatchAgent
from batch_agent.errors import SpecError
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, ScriptedServer
from batch_agent.trust.promise import fixed_size, read_promise

ROWS = 400
PROMISE = "mood.accuracy >= 0.9"
AUDITED = fixed_size(read_promise(PROMISE), ROWS)


def table(rows: int = ROWS, *, wrong: float = 0.15, broken: float = 0.0, seed: int = 1) -> list[dict[str, str]]:
    """Return rows whose text says what the small model answers, how sure it is, and what the large one answers."""
    draw, found = random.Random(seed), []
    for row in range(rows):
        right = draw.choice(["angry", "calm"])
        is_wrong = draw.random() < wrong
        said = right if not is_wrong else "calm" if right == "angry" else "angry"
        chance = min(0.99, max(0.02, draw.gauss(0.55 if is_wrong else 0.9, 0.1)))
        large = "fail" if draw.random() < broken else right
        found.append({"id": f"r{row}", "text": f"{large} {row}: {said} {chance:.3f}"})
    return found


def small(request: Request) -> Say | Fail:
    return answer(request)


def large(request: Request) -> Say | Fail:
    said = str(request.messages[-1]["content"]).split()[0]
    return Fail(400) if said == "fail" else Say(json.dumps({"mood": said}))


def options(one: Any, two: Any, place: Any, **more: Any) -> dict[str, Any]:
    """``one`` and ``two``: backends, or their URLs."""
    cascade = [{"backend": one, "model": "small"}, {"backend": two, "model": "large"}]
    known = {"task": "{text}", "inputs": table(), "output_schema": MOODS, "cascade": cascade, "run_dir": place}
    return {**known, "promise": PROMISE, "truth": "last", "max_retries": 0, "progress": False, **more}


pytestmark = pytest.mark.usefixtures("state")


@pytest.fixture
def one() -> ScriptedBackend:
    return doubting(small)


@pytest.fixture
def two() -> ScriptedBackend:
    return ScriptedBackend(large)


@pytest.fixture
async def first() -> AsyncIterator[str]:
    async with ScriptedServer(small, models=["small"]) as found:
        yield found.backend_url


@pytest.fixture
async def second() -> AsyncIterator[str]:
    async with ScriptedServer(large, models=["large"]) as found:
        yield found.backend_url


def differing(results: list[Any], rows: list[dict[str, str]]) -> int:
    """Return the rows whose delivered answer is not that of the large model."""
    return sum(
        not result.ok or result.output["mood"] != row["text"].split()[0]
        for result, row in zip(results, rows, strict=True)
    )


async def test_the_promise_is_kept_in_one_run_and_the_large_model_gets_few_rows(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    results = await BatchAgent.run(**options(one, two, tmp_path / "run"))
    found = standing(tmp_path / "run")
    assert found.state == "kept"
    assert results.summary.promise == found
    assert found.audited == AUDITED
    assert found.truth == "the answers of large, which are taken to be right"
    assert found.bound is not None and found.bound <= 0.1
    assert differing(results, table()) <= 0.1 * ROWS
    assert len(one.requests) == ROWS
    assert AUDITED < len(two.requests) < 0.6 * ROWS
    assert found.threshold is not None
    for result in results:
        if result.answered_by == "small":
            assert result.doubt is not None and result.doubt <= found.threshold


async def test_both_answers_and_thresholds_are_in_the_log_before_an_answer_outside_of_the_audit_is_asked(
    two: ScriptedBackend, tmp_path: Path
) -> None:
    log, seen = tmp_path / "run" / "review.jsonl", list[int]()

    def first(request: Request) -> Say | Fail:
        seen.append(log.read_text().count('"frozen"') if log.exists() else 0)
        return small(request)

    await BatchAgent.run(**options(doubting(first), two, tmp_path / "run"))
    assert seen == [0] * AUDITED + [AUDITED] * (ROWS - AUDITED)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["thresholds"] + ["frozen"] * AUDITED


async def test_a_run_that_is_killed_and_resumed_decides_as_one_that_is_not(first: str, tmp_path: Path) -> None:
    asked: list[str] = []
    async with ScriptedServer(large, models=["large"]) as two:
        await BatchAgent.run(**options(first, two.backend_url, tmp_path / "whole"))
        whole, received = standing(tmp_path / "whole"), two.received
    for stop in (AUDITED // 2, AUDITED + 20):  # in the audit, and after it
        going, name = asyncio.Event(), f"killed {stop}"

        async def waits(request: Request, stop: int = stop, going: asyncio.Event = going) -> Say | Fail:
            asked.append(str(request.messages[-1]["content"]))
            if len(asked) > stop:
                await going.wait()
            return large(request)

        asked.clear()
        async with ScriptedServer(waits, models=["large"]) as two:
            words = ("-m", "tests.run.test_learned", first, two.backend_url, str(tmp_path / name))
            process = await start(*words, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL)
            async with asyncio.timeout(60):
                await two.wait_until(lambda stop=stop: two.received > stop)
            process.kill()
            await process.wait()
            going.set()
            given = options(first, two.backend_url, tmp_path / name, resume=True)
            await BatchAgent.run(**given)
            assert standing(tmp_path / name) == whole
            log = (tmp_path / name / "review.jsonl").read_text()
            assert log.count('"thresholds"') == 1
            before = two.received
            await BatchAgent.run(**given)
            assert two.received == before, "a finished row was asked again"
            assert len(set(asked)) == received


async def test_a_log_whose_append_was_interrupted_is_completed_with_the_same_thresholds(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    given = options(one, two, tmp_path / "run")
    await BatchAgent.run(**given)
    log, whole, received = tmp_path / "run" / "review.jsonl", standing(tmp_path / "run"), len(two.requests)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:40]) + lines[40][:30])
    assert standing(tmp_path / "run").state == "not yet"
    await BatchAgent.run(**{**given, "resume": True})
    assert standing(tmp_path / "run") == whole
    assert len(two.requests) == received
    again = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["kind"], each.get("output")) for each in again] == [
        (each["kind"], each.get("output")) for each in map(json.loads, lines)
    ]


async def test_with_worker_processes_the_same_rows_go_to_the_large_model(
    first: str, second: str, tmp_path: Path
) -> None:
    alone = await BatchAgent.run(**options(first, second, tmp_path / "one"))
    more = await BatchAgent.run(**options(first, second, tmp_path / "two", cluster=WarmCrew()))
    assert [result.answered_by for result in alone] == [result.answered_by for result in more]
    assert standing(tmp_path / "one") == standing(tmp_path / "two")


@needs_redis
async def test_a_run_in_redis_learns_the_same_threshold_and_is_certified(
    first: str, second: str, url: str, tmp_path: Path
) -> None:
    alone = await BatchAgent.run(**options(first, second, tmp_path / "one"))
    shared = await BatchAgent.run(**options(first, second, url))
    assert [result.answered_by for result in alone] == [result.answered_by for result in shared]
    assert standing(url) == standing(tmp_path / "one")
    written = await batch_agent(tmp_path, "certify", url, "-o", "certificate.json")
    assert written.code == 0, written.stderr
    checked = await batch_agent(tmp_path, "certify", "--check", "certificate.json", url)
    assert checked.code == 0, checked.stderr


async def test_a_promise_that_the_large_model_cannot_keep_ends_and_says_so(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    rows = table(broken=0.3)
    results = await BatchAgent.run(**options(one, two, tmp_path / "run", inputs=rows))
    found = standing(tmp_path / "run")
    assert found.state == "impossible"
    assert "random rows have no answer of large" in found.why
    assert len(two.requests) == AUDITED  # no other row is paid for
    assert all(result.ok for result in results)
    assert found.bound is None


async def test_if_small_differs_everywhere_all_rows_go_to_the_large_model(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    rows = table(300, wrong=1.0)
    results = await BatchAgent.run(**options(one, two, tmp_path / "run", inputs=rows))
    found = standing(tmp_path / "run")
    assert found.state == "kept"
    assert differing(results, rows) <= 30
    assert len(two.requests) >= 270


async def test_rows_without_a_doubt_and_rows_that_failed_by_content_go_on(two: ScriptedBackend, tmp_path: Path) -> None:
    def first(request: Request) -> Say | Fail:
        text = str(request.messages[-1]["content"])
        number = int(text.split()[1].rstrip(":"))
        if number % 10 == 0:
            return Say("no json")
        if number % 10 == 1:
            return Say(json.dumps({"mood": text.split()[2]}))  # without log-probabilities
        return small(request)

    results = await BatchAgent.run(**options(doubting(first), two, tmp_path / "run"))
    assert {result.answered_by for result in results if result.index % 10 < 2} == {"large"}
    assert standing(tmp_path / "run").state == "kept"


async def test_rows_that_cannot_be_read_count_as_wrong_once(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    rows = table()
    unreadable = rows[20::40]
    for row in unreadable:
        del row["text"]
    results = await BatchAgent.run(**options(one, two, tmp_path / "run", inputs=rows))
    assert sum(not result.ok for result in results) == len(unreadable)
    found = standing(tmp_path / "run")
    assert found.state == "kept"
    assert found.bound is not None and len(unreadable) / ROWS <= found.bound <= 0.1
    assert found.coverage == pytest.approx(1 - len(unreadable) / ROWS)


async def test_while_the_large_model_is_away_nothing_is_learned_and_a_resume_completes_it(
    one: ScriptedBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    down = True

    def away(request: Request) -> Say | Fail:
        return Fail(503) if down else large(request)

    async with ScriptedServer(away, models=["large"]) as server:
        given = options(one, server.backend_url, tmp_path / "run", inputs=table(300), max_outage=0.2)
        with caplog.at_level(logging.WARNING):
            results = await BatchAgent.run(**given)
        assert all(result.waits_for == "large" for result in results)
        found = standing(tmp_path / "run")
        assert (found.state, found.next, found.threshold) == ("not yet", "models", None)
        assert not (tmp_path / "run" / "review.jsonl").exists()
        assert "so no threshold is learned" in caplog.text
        down = False
        await BatchAgent.run(**{**given, "resume": True})
    assert standing(tmp_path / "run").state == "kept"


async def test_another_prompt_is_proved_on_the_next_rows_of_the_order(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    given = options(one, two, tmp_path / "run")
    await BatchAgent.run(**given)
    rows = {json.loads(line)["row"] for line in _frozen(tmp_path / "run")}
    changed = {**given, "system_prompt": "Be careful.", "resume": True, "on_change": "resend"}
    await BatchAgent.run(**changed)
    lines = [json.loads(line) for line in (tmp_path / "run" / "review.jsonl").read_text().splitlines()]
    begun = [line for line in lines if line["kind"] == "thresholds"]
    assert [each.get("rows", 0) for each in begun] == [0, AUDITED]
    after = lines[lines.index(begun[1]) + 1 :]
    assert rows < {line["row"] for line in after}
    assert len(after) == 2 * AUDITED
    assert standing(tmp_path / "run").state == "kept"


def _frozen(run: Path) -> list[str]:
    return [line for line in (run / "review.jsonl").read_text().splitlines() if '"frozen"' in line]


async def test_a_certificate_proves_it_and_an_edited_answer_is_named(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    rows = table(600)  # so many that one answer more that differs breaks no promise
    await BatchAgent.run(**options(one, two, tmp_path / "run", inputs=rows))
    written = await batch_agent(tmp_path, "certify", "run", "-o", "certificate.json")
    assert written.code == 0, written.stderr
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert "the answers of large" in certificate["says"]
    assert "repaired" not in certificate["says"]
    assert len(certificate["audit"]) == fixed_size(read_promise(PROMISE), len(rows))
    checked = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "run")
    assert checked.code == 0, checked.stderr + checked.stdout
    log = tmp_path / "run" / "review.jsonl"
    first = next(line for line in _frozen(tmp_path / "run") if '"right":{"mood":"calm"}' in line)
    log.write_text(log.read_text().replace(first, first.replace('"right":{"mood":"calm"}', '"right":{"mood":"angry"}')))
    for words in (("--check", "certificate.json", "run"), ("run", "-o", "another.json")):
        forged = await batch_agent(tmp_path, "certify", *words)
        assert forged.code == 1
        why = f"the audited row {json.loads(first)['id']} has other answers in the log than in the results"
        assert why in forged.stderr


async def test_the_command_line_ends_with_0_and_names_the_truth(first: str, second: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, table(200))))
    cascade = [{"backend": first, "model": "small"}, {"backend": second, "model": "large"}]
    words = ("--task", "{text}", "--schema", json.dumps(MOODS), "rows.jsonl", "--cascade", json.dumps(cascade))
    how = ("--run-dir", "run", "--output", "out.jsonl", "--promise", PROMISE, "--truth", "last")
    ended = await batch_agent(tmp_path, "run", *words, *how)
    assert ended.code == 0, ended.stderr
    assert "is kept" in ended.stderr
    assert "by the answers of large, which are taken to be right" in ended.stderr
    assert "people" not in ended.stderr
    status = json.loads((await batch_agent(tmp_path, "status", "run", "--json")).stdout)["promise"]
    assert (status["state"], status["last"], status["left"]) == ("kept", "large", None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"escalate": "doubt > 0.3"}, "leave escalate out"),
        ({"pilot": 20}, "leave pilot out"),
        ({"max_people": 20}, "leave max_people out"),
        ({"cascade": None, "backend": "simulated://"}, "needs a cascade"),
        ({"more": ["people"]}, 'the cascade ends with "people"'),
        ({"more": [{"backend": "simulated://", "name": "third"}]}, "and the cascade has 3"),
    ],
)
async def test_what_cannot_be_learned_is_refused_by_name(
    change: dict[str, Any], words: str, one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    given = options(one, two, tmp_path / "run")
    given["cascade"] = [*given["cascade"], *change.pop("more", [])]
    with pytest.raises(SpecError, match=words):
        await BatchAgent.run(**{**given, **change})
    assert not one.requests


async def test_a_budget_that_is_used_up_ends_the_run_and_the_promise_is_not_kept(
    one: ScriptedBackend, two: ScriptedBackend, tmp_path: Path
) -> None:
    given = options(one, two, tmp_path / "run", inputs=table(200), max_inflight=4)
    given["cascade"][1]["prices"] = given["prices"] = {"input": 1.0, "output": 1.0}
    async with asyncio.timeout(60):
        results = await BatchAgent.run(**given, max_cost=0.001)
    assert results.summary.statistics.ended == "out of budget"
    found = standing(tmp_path / "run")
    assert (found.state, found.threshold) in (("impossible", None), ("not yet", None))
    assert len(two.requests) < AUDITED


async def test_a_run_that_is_drained_while_the_audit_works_ends_and_a_resume_keeps_the_promise(
    first: str, tmp_path: Path
) -> None:
    going = asyncio.Event()

    async def waits(request: Request) -> Say | Fail:
        await going.wait()
        return large(request)

    async with ScriptedServer(waits, models=["large"]) as two:
        given = options(first, two.backend_url, tmp_path / "run")
        async with asyncio.timeout(60):
            async with BatchAgent.open(**{name: each for name, each in given.items() if name != "progress"}) as run:
                await two.wait_until(lambda: two.received > 5)
                run.drain()
                going.set()
                done = [result async for result in run.results()]
            assert len(done) < ROWS
            assert standing(tmp_path / "run").state == "not yet"
            await BatchAgent.run(**{**given, "resume": True})
    assert standing(tmp_path / "run").state == "kept"


if __name__ == "__main__":
    asyncio.run(BatchAgent.run(**options(sys.argv[1], sys.argv[2], sys.argv[3])))
