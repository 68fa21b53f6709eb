"""A resume does not send rows that failed and that people have answered since: their answer is the one delivered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.record.redis_servers import needs_redis
from tests.record.reviewed import SCHEMA, says, tickets, truth
from tests.run.process_work import WarmCrew

from batch_agent import BatchAgent, Pipeline
from batch_agent.record.people import PeopleReview
from batch_agent.testing import ScriptedServer
from batch_agent.trust.review import REPAIR

FAILED = [3, 10, 17, 24]  # of 30 tickets
SHAPES = ["directory", "processes", "pipeline", pytest.param("redis", marks=needs_redis)]


async def run(server: ScriptedServer, place: Any, shape: str = "directory", **options: Any) -> None:
    known = {"backend": server.backend_url, "model": "small", "run_dir": place, "max_retries": 0, **options}
    what: dict[str, Any] = {"task": "What is it about? {text}", "output_schema": SCHEMA}
    rows = known.pop("inputs", tickets(30))
    if shape == "pipeline":
        await Pipeline(rows).map(name="label", **what).run(**known)
        return
    crew = {"cluster": WarmCrew()} if shape == "processes" else {}
    await BatchAgent.run(inputs=rows, **what, **crew, **known)


def judge(place: Any) -> None:
    """Let a person answer the rows that failed; for the last one, no right answer exists."""
    with PeopleReview.open(str(place)) as review:
        while (shown := review.next("ann", REPAIR)) is not None:
            row = shown.row
            answer = None if row.row == FAILED[-1] else {"label": truth(row.row), "why": "so"}
            review.judge("ann", row.row, REPAIR, "none" if answer is None else "answer", answer, row.input)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_resume_sends_no_row_that_people_have_answered_unless_it_is_asked_to(
    shape: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue("url") if shape == "redis" else tmp_path / "run"
    async with ScriptedServer(says, models=["small"]) as server:
        await run(server, place, shape)
        judge(place)
        before = server.received
        await run(server, place, shape, resume=True)
        assert server.received == before
        await run(server, place, shape, resume=True, retry_failed=True)
        assert server.received == before + len(FAILED)


async def test_failed_rows_without_an_answer_of_people_and_edited_ones_are_sent(tmp_path: Path) -> None:
    place, rows = tmp_path / "run", tickets(30)
    async with ScriptedServer(says, models=["small"]) as server:
        await run(server, place)
        with PeopleReview.open(str(place)) as review:
            for _ in range(2):
                shown = review.next("ann", REPAIR)
                assert shown is not None
                review.judge("ann", shown.row.row, REPAIR, "answer", {"label": "billing", "why": "so"}, shown.row.input)
                answered = shown.row.row
        before = server.received
        await run(server, place, resume=True)
        assert server.received == before + 2
        rows[answered]["text"] = f"ticket {answered} again"
        await run(server, place, resume=True, inputs=rows)
        assert server.received == before + 5  # the edited one, and again the two that nobody has answered


async def test_the_plan_of_a_resume_counts_them_as_kept_and_retry_failed_sends_them(tmp_path: Path) -> None:
    lines = [json.dumps({"id": each["id"], "text": each["text"]}) for each in tickets(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    async with ScriptedServer(says, models=["small"]) as server:
        how = ("--backend", server.backend_url, "--model", "small", "--run-dir", "run", "--output", "out.jsonl")
        task = ("--task", "What is it about? {text}", "--schema", json.dumps(SCHEMA), "--set", "max_retries=0")
        assert (await batch_agent(tmp_path, "run", *task, "rows.jsonl", *how)).code == 2
        judge(tmp_path / "run")
        before = server.received
        planned = await batch_agent(tmp_path, "resume", "run", "--dry-run")
        assert "kept 30, to send 0" in planned.stdout + planned.stderr
        assert (await batch_agent(tmp_path, "resume", "run")).code == 2
        assert server.received == before
        await batch_agent(tmp_path, "retry-failed", "run")
        assert server.received == before + len(FAILED)
