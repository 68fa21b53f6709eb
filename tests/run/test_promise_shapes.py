"""A promise in every shape of a run: processes, Redis, a kill while people judge, two people at once, commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.record.redis_servers import needs_redis
from tests.run.process_work import WarmCrew
from tests.run.promised import MOODS, answer, judge, standing, table
from tests.warm import start

from batch_agent import BatchAgent
from batch_agent.record.people import PeopleReview
from batch_agent.testing import ScriptedServer

ROWS = 200


pytestmark = pytest.mark.usefixtures("state")


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(answer, models=["scripted"]) as found:
        yield found


async def run(server: ScriptedServer, rows: list[dict[str, Any]], place: Any, **options: Any) -> None:
    known = {"task": "{text}", "inputs": [{"id": row["id"], "text": row["text"]} for row in rows]}
    await BatchAgent.run(
        **{**known, "output_schema": MOODS, "backend": server.backend_url, "model": "scripted", "run_dir": place},
        **{"max_retries": 0, "promise": "mood.accuracy >= 0.85", **options},
    )


async def test_with_worker_processes_the_same_rows_are_audited_and_the_promise_is_kept(
    server: ScriptedServer, tmp_path: Path
) -> None:
    rows = table(ROWS)
    await run(server, rows, tmp_path / "one")
    await run(server, rows, tmp_path / "two", cluster=WarmCrew())
    heads = [(tmp_path / name / "audit.jsonl").read_text() for name in ("one", "two")]
    assert heads[0] == heads[1]
    for name in ("one", "two"):
        judge(tmp_path / name, rows)
    one, two = standing(tmp_path / "one"), standing(tmp_path / "two")
    assert one.state == two.state == "kept"
    assert (one.audited, one.wrong, one.bound) == (two.audited, two.wrong, two.bound)


@needs_redis
async def test_a_run_in_redis_is_proved_and_certified_there(server: ScriptedServer, url: str, tmp_path: Path) -> None:
    rows = table(120)
    await run(server, rows, url)
    judge(url, rows)
    assert standing(url).state == "kept"
    written = await batch_agent(tmp_path, "certify", url, "-o", "certificate.json")
    assert written.code == 0, written.stderr
    checked = await batch_agent(tmp_path, "certify", "--check", "certificate.json", url)
    assert checked.code == 0, checked.stderr
    copied = await batch_agent(tmp_path, "copy", url, "copied")
    assert copied.code == 0, copied.stderr
    again = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "copied")
    assert again.code == 0, again.stderr


KILLED = """
import sys
from pathlib import Path
from tests.run.promised import judge, standing, table
judge(Path(sys.argv[1]), table(int(sys.argv[2])))
"""


async def test_a_person_whose_process_is_killed_goes_on_where_the_record_ends(
    server: ScriptedServer, tmp_path: Path
) -> None:
    rows = table(ROWS)
    await run(server, rows, tmp_path / "run")
    log = tmp_path / "run" / "review.jsonl"
    root = Path(__file__).parents[2]
    for more in (6, 18):
        process = await start("-c", KILLED, str(tmp_path / "run"), str(ROWS), cwd=root)
        while not log.exists() or log.read_text().count('"answer"') < more:
            await asyncio.sleep(0.01)
            assert process.returncode is None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert standing(tmp_path / "run") == standing(tmp_path / "run")
    judge(tmp_path / "run", rows)
    after = standing(tmp_path / "run")
    assert after.state == "kept"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(line["kind"] == "thresholds" for line in lines) == 1
    audited = [line["row"] for line in lines if line["kind"] == "answer" and line["queue"] == "audit"]
    assert len(audited) == len(set(audited)) == after.audited
    await run(server, rows, tmp_path / "again")
    judge(tmp_path / "again", rows)
    other = standing(tmp_path / "again")
    assert (other.audited, other.wrong, other.bound, other.threshold) == (
        *(after.audited, after.wrong, after.bound),
        after.threshold,
    ), "a kill changed a decision"


async def test_two_people_at_once_audit_each_row_once_and_both_see_the_overlap(
    server: ScriptedServer, tmp_path: Path
) -> None:
    rows = table(ROWS)
    truth = {row["id"]: row["truth"] for row in rows}
    await run(server, rows, tmp_path / "run")
    with (
        PeopleReview.open(str(tmp_path / "run"), overlap=0.5) as one,
        PeopleReview.open(str(tmp_path / "run"), overlap=0.5) as two,
    ):
        people = [("ann", one), ("bob", two)]
        while people:
            for who, review in [*people]:
                shown = review.next(who)
                if shown is None:
                    people.remove((who, review))
                    continue
                row = shown.row
                review.judge(who, row.row, row.queue, "answer", {"mood": truth[row.id]}, row.input)
    found = standing(tmp_path / "run")
    assert found.state == "kept"
    assert found.twice > 5
    assert found.error == (0.0 if found.twice >= 30 else 0.02)


async def test_the_command_line_ends_with_6_until_the_promise_is_kept_and_then_with_0(
    server: ScriptedServer, tmp_path: Path
) -> None:
    rows = table(120)
    lines = [json.dumps({"id": row["id"], "text": row["text"]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = ("--task", "{text}", "--schema", json.dumps(MOODS), "rows.jsonl", "--backend", server.backend_url)
    how = ("--model", "scripted", "--run-dir", "run", "--output", "out.jsonl", "--promise", "mood.accuracy >= 0.85")
    how = (*how, "--max-people", "120", "--beacon", "drawn on Monday", "--truth", "people", "--people-error", "0.02")
    begun = await batch_agent(tmp_path, "run", *task, *how)
    assert begun.code == 6, begun.stderr
    assert "promise  mood.accuracy >= 0.85 is not yet kept" in begun.stderr
    assert "next: batch-agent review run" in begun.stderr
    status = json.loads((await batch_agent(tmp_path, "status", "run", "--json")).stdout)["promise"]
    assert (status["state"], status["next"]) == ("not yet", "audit")
    low, high = status["left"]["interval"]
    assert 0 < low <= high
    judge(tmp_path / "run", rows)
    assert "mood.accuracy >= 0.85 is kept" in (await batch_agent(tmp_path, "status", "run")).stdout
    again = await batch_agent(tmp_path, "resume", "run", "--json")
    assert again.code == 0, again.stderr
    assert re.search(r'"state": ?"kept"', again.stdout + again.stderr)
    priced = await batch_agent(tmp_path, "plan", "run", "--promise", "mood.accuracy >= 0.99")
    assert priced.code == 0
    assert "proves nothing" in priced.stdout


async def test_without_a_record_a_promise_is_refused_on_the_command_line(
    server: ScriptedServer, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "0: calm 0.9"}\n')
    task = ("--task", "{text}", "--schema", json.dumps(MOODS), "rows.jsonl", "--backend", server.backend_url)
    outcome = await batch_agent(tmp_path, "run", *task, "--no-run-dir", "--promise", "mood.accuracy >= 0.85")
    assert outcome.code == 1
    assert "leave --no-run-dir out" in outcome.stderr
    planned = await batch_agent(tmp_path, "plan", *task, "--promise", "mood.accuracy >= 0.85")
    assert planned.code == 0, planned.stderr


async def test_a_cascade_that_ends_with_people_keeps_a_promise(tmp_path: Path) -> None:
    rows = table(ROWS, wrong=0.1, failed=0.05)
    async with (
        ScriptedServer(answer, models=["small"]) as small,
        ScriptedServer(answer, models=["large"]) as large,
    ):
        entries = [{"backend": small.backend_url, "model": "small"}, {"backend": large.backend_url, "model": "large"}]
        results = await BatchAgent.run(
            task="{text}",
            inputs=[{"id": row["id"], "text": row["text"]} for row in rows],
            output_schema=MOODS,
            cascade=[*entries, "people"],
            escalate="doubt > 0.3",
            max_retries=0,
            run_dir=tmp_path / "run",
            promise="mood.accuracy >= 0.9",
        )
    waits = [result for result in results if result.waits_for == "people"]
    assert waits
    assert standing(tmp_path / "run").state == "not yet"
    judge(tmp_path / "run", rows)
    found = standing(tmp_path / "run")
    assert (found.state, found.coverage) == ("kept", 1.0)
