"""Cascades on the command line: flags and spec files, exit statuses, what is shown, exported and continued."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from commandline import Outcome, batch_agent

from batch_agent.cli.exit_status import ALL_OK, REQUIRED, RUN_FAILED, UNREACHABLE
from batch_agent.testing import Request, Say, ScriptedServer

GOOD, BAD = '{"mood": "good"}', '{"mood": "bad"}'
TASK = ("run", "--task", "Judge {text}", "rows.jsonl", "--schema", '{"mood": "good|bad"}', "--retries", "0")


def small(request: Request) -> Say:
    return Say("no json" if "odd" in str(request.messages[-1]["content"]) else GOOD)


class Place:
    def __init__(self, directory: Path, one: ScriptedServer, two: ScriptedServer) -> None:
        self.directory, self.one, self.two, self.mood = directory, one, two, BAD
        rows = [{"id": f"r{number}", "text": "odd" if number % 3 == 2 else "even"} for number in range(6)]
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def entries(self, *more: object, large: str | None = None) -> list[Any]:
        return [{"backend": self.one.backend_url}, {"backend": large or self.two.backend_url, "name": "large"}, *more]

    async def __call__(self, *arguments: str) -> Outcome:
        return await batch_agent(self.directory, *arguments)

    async def begin(self, *arguments: str, people: bool = False) -> Outcome:
        cascade = json.dumps(self.entries(*(["people"] if people else [])))
        return await self(*TASK, "--cascade", cascade, "--run-dir", "kept", *arguments)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made: list[Place] = []
    async with (
        ScriptedServer(small, models=["small"]) as one,
        ScriptedServer(lambda request: Say(made[0].mood), models=["large"]) as two,
    ):
        made.append(Place(tmp_path, one, two))
        yield made[0]


async def test_a_cascade_runs_from_a_flag_and_its_results_name_their_entries(place: Place) -> None:
    done = await place.begin()
    assert done.code == ALL_OK
    assert [row["answered_by"] for row in done.results] == ["small", "small", "large"] * 2
    assert (place.one.received, place.two.received) == (6, 2)
    assert "large: asked 2 rows, answered 2" in done.stderr
    shown = await place("show", "kept", "--row", "2", "--full")
    assert "asked too: small" in shown.stdout
    assert "NotJSON" in shown.stdout
    status = await place("status", "kept")
    assert "large: asked 2 rows, answered 2" in status.stdout
    exported = await place("export", "kept", "--output", "out.csv")
    assert exported.code == ALL_OK
    with (place.directory / "out.csv").open() as file:
        assert [row["answered_by"] for row in csv.DictReader(file)] == ["small", "small", "large"] * 2


async def test_rows_that_wait_for_people_end_the_run_with_exit_status_6_and_say_how_to_review_them(
    place: Place,
) -> None:
    done = await place.begin("--escalate", "output.mood == 'good'", "--output", "out.csv", people=True)
    assert done.code == ALL_OK  # the large model says bad
    place.mood = GOOD
    more = ("--run-dir", "other", "--output", "out.csv", "--escalate", "output.mood == 'good'")
    done = await place(*TASK, "--cascade", json.dumps(place.entries("people")), *more)
    assert done.code == REQUIRED
    assert done.stderr.rstrip().splitlines()[-1] == "6 rows wait for people: batch-agent review other"
    with (place.directory / "out.csv").open() as file:
        assert {row["escalated"] for row in csv.DictReader(file)} == {"true"}
    asked = place.one.received, place.two.received
    again = await place("resume", "other")
    assert again.code == REQUIRED
    assert "6 rows wait for people: batch-agent review other" in again.stderr
    assert (place.one.received, place.two.received) == asked


async def test_an_entry_that_is_away_ends_the_run_as_unreachable_and_a_resume_asks_it(place: Place) -> None:
    cascade = json.dumps(place.entries(large="vllm://127.0.0.1:9"))
    common = ("--run-dir", "kept", "--output", "out.jsonl", "--max-outage", "1", "--escalate", "output.mood == 'good'")
    done = await place(*TASK, "--cascade", cascade, *common)
    assert done.code == UNREACHABLE
    assert "6 rows wait for large" in done.stderr
    lines = [json.loads(line) for line in (place.directory / "out.jsonl").read_text().splitlines()]
    assert sorted((line["ok"], line["waits_for"], line["escalated"]) for line in lines) == [
        *[(False, "large", True)] * 2,
        *[(True, "large", True)] * 4,
    ]
    again = await place(*TASK, "--cascade", json.dumps(place.entries()), *common, "--resume")
    assert again.code == ALL_OK
    assert (place.one.received, place.two.received) == (6, 6)


async def test_a_spec_file_and_a_file_of_entries_say_the_same(place: Place) -> None:
    (place.directory / "entries.json").write_text(json.dumps(place.entries()))
    spec = {"task": "Judge {text}", "inputs": "rows.jsonl", "output_schema": {"mood": "good|bad"}, "max_retries": 0}
    for name, cascade in (("list", place.entries()), ("file", "entries.json")):
        (place.directory / f"{name}.json").write_text(json.dumps({**spec, "cascade": cascade, "escalate": "invalid"}))
        done = await place("run", f"{name}.json", "--json", "--output", "out.jsonl")
        assert done.code == ALL_OK
        shown = json.loads(done.stdout)["cascade"]
        assert [(each["name"], each["asked"], each["answered"]) for each in shown["entries"]] == [
            ("small", 6, 4),
            ("large", 2, 2),
        ]


async def test_a_resume_continues_with_the_recorded_entries_and_a_new_rule(place: Place) -> None:
    await place.begin("--output", "out.jsonl")
    again = await place("resume", "kept", "--escalate", "output.mood == 'good'")
    assert again.code == ALL_OK
    assert (place.one.received, place.two.received) == (6, 6)
    assert "escalate: " in again.stderr


async def test_the_plan_shows_the_entries_and_sends_nothing(place: Place) -> None:
    plan = await place("plan", *TASK[1:], "--cascade", json.dumps(place.entries("people")), "--escalate", "invalid")
    assert plan.code == ALL_OK
    assert "→ large → people; to the next entry: invalid" in plan.stdout
    as_json = await place("plan", *TASK[1:], "--cascade", json.dumps(place.entries()), "--json")
    assert json.loads(as_json.stdout)["cascade"]["people"] is False
    assert place.one.received == place.two.received == 0


async def test_what_cannot_be_meant_is_refused_with_its_place(place: Place) -> None:
    wrong = await place.begin("--escalate", "doubt >> 0.3")
    assert wrong.code == RUN_FAILED
    assert "doubt >> 0.3\n" in wrong.stderr
    assert "        ^" in wrong.stderr
    unrecorded = await place(*TASK, "--cascade", json.dumps(place.entries("people")), "--no-run-dir")
    assert unrecorded.code == RUN_FAILED
    assert "leave out --no-run-dir" in unrecorded.stderr
    kept = await place.begin("--set", "keep=results", "--set", "processes=2", people=True)
    assert kept.code == RUN_FAILED
    assert "too little for people to review" in kept.stderr
    keys = await place(*TASK, "--cascade", '[{"backend": "openai://", "api_key": "k"}, "people"]')
    assert keys.code == RUN_FAILED
    assert "set it in the environment" in keys.stderr
    assert place.one.received == place.two.received == 0


async def test_rows_that_people_have_judged_wait_no_more(place: Place) -> None:
    done = await place.begin("--escalate", "output.mood == 'bad'", "--output", "out.jsonl", people=True)
    assert done.code == REQUIRED
    assert "2 rows wait for people" in done.stderr
    assert (await place("export", "kept", "--review", "queue.csv", "--who", "ada")).code == ALL_OK
    with (place.directory / "queue.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["id"] for row in rows} == {"r2", "r5"}
    answer = next(name for name in rows[0] if name.startswith("answer"))
    with (place.directory / "queue.csv").open("w") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows({**row, answer: "good"} for row in rows)
    imported = await place("import-review", "kept", "queue.csv", "--who", "ada")
    assert imported.code == ALL_OK, imported.stderr
    again = await place("resume", "kept")
    assert again.code == ALL_OK
    assert "wait for people" not in again.stderr


async def test_status_of_a_pipeline_says_which_stage_waits_for_people(place: Place) -> None:
    schema = {"mood": "good|bad"}
    first = {"name": "judge", "task": "Judge {text}", "output_schema": schema, "cascade": place.entries("people")}
    stages = [
        {"map": {**first, "escalate": "output.mood == 'bad'"}},
        {"map": {"name": "next", "task": "Even {mood}", "output_schema": schema}},
    ]
    spec = {"inputs": "rows.jsonl", "max_retries": 0, "backend": place.one.backend_url, "stages": stages}
    (place.directory / "spec.json").write_text(json.dumps(spec))
    done = await place("run", "spec.json", "--run-dir", "kept", "--output", "out.jsonl")
    assert done.code == REQUIRED
    assert "2 rows wait for people: batch-agent review kept --stage judge" in done.stderr
    assert "people   judge: 0 rows judged; 2 wait (2 repair)" in (await place("status", "kept")).stdout
    stage, other = json.loads((await place("status", "kept", "--json")).stdout)["stages"]
    assert stage["people"]["waiting"] == 2
    assert "people" not in other


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
async def test_rows_that_wait_for_people_are_sent_again_only_on_demand(
    place: Place, processes: tuple[str, ...]
) -> None:
    place.mood = "no json"
    done = await place.begin("--output", "out.jsonl", *processes, people=True)
    assert done.code == REQUIRED
    assert (place.one.received, place.two.received) == (6, 2)
    again = await place("resume", "kept")
    assert "kept 6, to send 0" in again.stderr
    assert (place.one.received, place.two.received) == (6, 2)
    place.mood = BAD
    retried = await place("retry-failed", "kept")
    assert "retrying 2 rows that failed" in retried.stderr
    assert retried.code == ALL_OK
    assert (place.one.received, place.two.received) == (6, 4)
