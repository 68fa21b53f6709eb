"""``batch-agent review``, ``import-review`` and what ``export`` delivers of people's answers."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from tests.cli.commandline import batch_agent, rows, serving, started
from tests.record.redis_servers import needs_redis
from tests.record.reviewed import CANARY, reviewed_run, tickets, truth
from tests.warm import WarmProcess, start
from yarl import URL

from batch_agent.record.people import PeopleReview
from batch_agent.record.review import REVIEW, DirectoryLog
from batch_agent.testing import Say

RUN = "run"


pytestmark = pytest.mark.usefixtures("state")


def judge_all(place: Any, who: str = "ada", rows: int = 0) -> None:
    """A person judges every row, rightly; T-4 has no right answer."""
    with PeopleReview.open(str(place), overlap=0.0) as review:
        if rows:
            review.audit(rows, who)
        while (shown := review.next(who)) is not None:
            name = shown.row.id
            given = {"label": truth(int(name.removeprefix("T-"))), "why": "people say so"}
            review.judge(who, shown.row.row, shown.row.queue, "none" if name == "T-4" else "answer", given)


async def test_export_delivers_peoples_answers_beside_those_of_the_models(place: str, tmp_path: Path) -> None:
    await reviewed_run(place, 12)
    before = await batch_agent(tmp_path, "export", place)
    assert "answered_by" not in before.stdout
    judge_all(place, rows=6)

    lines = [json.loads(line) for line in (await batch_agent(tmp_path, "export", place)).stdout.splitlines()]
    by_people = {each["job_id"] for each in lines if each["answered_by"] == "people"}
    assert {"T-3", "T-10"} <= by_people, "failed rows were repaired"
    for each in lines:
        row = int(each["job_id"].removeprefix("T-"))
        if each["job_id"] in by_people and row != 4:
            assert (each["ok"], each["output"]["label"], each["error"]) == (True, truth(row), None)
        if row not in (3, 10):
            assert CANARY in each["model"]["why"]

    table = await batch_agent(tmp_path, "export", place, "--format", "csv")
    cells = [*csv.DictReader(io.StringIO(table.stdout))]
    assert {"answered_by", "model.label", "model.why", "output.label"} <= cells[0].keys()
    assert sum(each["answered_by"] == "people" for each in cells) == len(by_people)
    assert json.loads(before.stdout.partition("\n")[0])["output"] == lines[0]["model"]


async def test_a_copy_of_a_run_has_what_people_answered(place: str, tmp_path: Path) -> None:
    await reviewed_run(place, 9)
    judge_all(place, rows=3)
    assert (await batch_agent(tmp_path, "copy", place, "copied")).code == 0
    assert (await batch_agent(tmp_path, "export", "copied")).stdout == (
        await batch_agent(tmp_path, "export", place)
    ).stdout
    with PeopleReview.open(tmp_path / "copied") as review:
        assert review.waiting == 0


@needs_redis
async def test_a_copy_in_redis_has_what_people_answered(url: str, tmp_path: Path) -> None:
    rows(tmp_path, *({"id": f"T-{row}", "input": f"ticket {row}"} for row in range(4)))
    async with serving(tmp_path, lambda _: Say('{"label": "a"}'), 'output_schema: {label: "a|b"}\n'):
        done = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--run-dir", RUN)
        assert done.code == 0, done.stderr
        with PeopleReview.open(tmp_path / RUN) as review:
            review.audit(2, "ada")
            while (shown := review.next("ada")) is not None:
                review.judge("ada", shown.row.row, "audit", "answer", {"label": "b"})
        copied = await batch_agent(tmp_path, "copy", RUN, url)
        assert copied.code == 0, copied.stderr
    found = await batch_agent(tmp_path, "export", url)
    assert found.stdout.count('"answered_by":"people"') == 2


async def test_status_says_what_people_have_judged_and_what_waits(place: str, tmp_path: Path) -> None:
    await reviewed_run(place, 12)
    assert "people" not in json.loads((await batch_agent(tmp_path, "status", place, "--json")).stdout)
    with PeopleReview.open(place, overlap=0.0) as review:
        review.audit(4, "ada")
        shown = review.next("ada")
        assert shown is not None
        review.judge("ada", shown.row.row, "audit", "none")
    row = await batch_agent(tmp_path, "show", place, "--row", shown.row.id)
    assert row.stdout.endswith("ada, blind\n    no right answer\n")
    status = await batch_agent(tmp_path, "status", place)
    assert "people   1 row judged by ada; 4 wait (3 audit, 1 repair)" in status.stdout
    people = json.loads((await batch_agent(tmp_path, "status", place, "--json")).stdout)["people"]
    assert (people["waiting"], people["judgements"], people["people"]) == (4, 1, ["ada"])


async def test_tables_go_out_and_come_back_on_the_command_line(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / RUN, 9)
    out = await batch_agent(tmp_path, "export", RUN, "--review", "todo.csv", "--who", "ada", "--queue", "repair")
    assert out.code == 0
    assert "batch-agent import-review run todo.csv" in out.stderr
    cells = [*csv.DictReader(io.StringIO((tmp_path / "todo.csv").read_text()))]
    assert [each["id"] for each in cells] == ["T-3"]
    text = (tmp_path / "todo.csv").read_text()
    (tmp_path / "todo.csv").write_text(text.replace("T-3,repair,,", "T-3,repair,biling,so"))
    back = await batch_agent(tmp_path, "import-review", RUN, "todo.csv", "--who", "ada")
    assert back.code == 2
    assert "todo.csv, line 2, T-3: refused: label is 'biling': it is not one of billing, shipping" in back.stdout
    (tmp_path / "todo.csv").write_text(text.replace("T-3,repair,,", "T-3,repair,billing,so"))
    back = await batch_agent(tmp_path, "import-review", RUN, "todo.csv", "--who", "ada")
    assert (back.code, back.stdout) == (0, "")
    assert "one person's answers, not checked" in back.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("import-review", RUN), "give the FILE to import, or --release"),
        (("export", RUN, "--who", "ada"), "give --review FILE.csv too"),
        (("export", RUN, "--review", "run/x.csv"), "is in the run directory"),
        (("export", RUN, "--review", "x.csv", "--format", "csv"), "--format is not for --review"),
        (("export", RUN, "--review", "nowhere/x.csv"), "create nowhere first"),
        (("review", RUN), "review needs a terminal; --page serves a page instead"),
        (("review", "nothing"), "holds no run"),
        (("review", RUN, "--audit", "0"), "must be a whole number above 0"),
    ],
)
async def test_what_cannot_be_done_is_said(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    await reviewed_run(tmp_path / RUN, 3)
    outcome = await batch_agent(tmp_path, *arguments)
    assert outcome.code
    assert why in outcome.stderr.replace("\n", " ").replace("  ", " ")


async def test_a_finished_audit_is_the_gold_of_the_next_prompt(tmp_path: Path) -> None:
    bare = [{"id": row["id"], "input": row["text"]} for row in tickets(12)]
    rows(tmp_path, *bare)
    spec = 'output_schema: {label: "billing|shipping|account", why: text}\n'
    async with serving(tmp_path, lambda _: Say('{"label": "billing", "why": "x"}'), spec):
        first = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--run-dir", RUN)
        assert first.code == 0, first.stderr
        with PeopleReview.open(tmp_path / RUN, overlap=0.0) as review:
            review.audit(6, "ada")
        early = await batch_agent(tmp_path, "score", RUN, "--gold", RUN)
        assert "/run is not finished, 6 of 6 rows wait: batch-agent review /" in early.stderr
        judge_all(tmp_path / RUN)
        score = await batch_agent(tmp_path, "score", RUN, "--gold", RUN, "--json")
        found = json.loads(score.stdout)
        assert found["fields"]["label"]["rows"] + ("T-4" in review_ids(tmp_path / RUN)) == 6
        again = await batch_agent(
            tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--run-dir", "next", "--gold", RUN
        )
        assert again.code == 0, again.stderr
        assert "score" in again.stderr


def review_ids(run: Path) -> set[str]:
    return {each.id for each in DirectoryLog(run).read()[0] if each.kind in ("answer", "none")}


async def test_the_page_of_a_review_prints_the_link_for_reviewers(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / RUN, 9)
    async with started(tmp_path, "review", RUN, "--page", "--audit", "3", "--who", "lead") as process:
        assert process.stdout is not None
        link = URL((await process.stdout.readline()).decode().strip())
        assert (link.path, link.query["run"]) == ("/review", RUN)
        async with aiohttp.ClientSession() as session:
            asked = link.with_path("/api/review/next").with_query(link.query)
            async with session.post(asked, json={"who": "ada"}, headers={"Origin": str(link.origin())}) as answer:
                assert (await answer.json())["row"]["queue"] == "audit"
            async with session.get(link.with_path("/api/row").with_query({**link.query, "row": "0"})) as answer:
                assert answer.status == 403
        process.send_signal(signal.SIGINT)
        assert await process.wait() in (0, 130)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
async def test_a_person_reviews_at_the_terminal(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / RUN, 9)
    async with Terminal.started(tmp_path, "review", RUN, "--who", "ada", "--audit", "2") as terminal:
        first = await terminal.until("left for you: 2 in the audit")
        assert CANARY not in first
        terminal.type("2")
        assert CANARY not in await terminal.until("left for you: 1 in the audit")
        terminal.type("u")
        await terminal.until("your latest judgement is undone")
        terminal.type("2")
        await terminal.until("left for you: 1 in the audit")
        terminal.type("x")
        await terminal.until("the model")
        assert CANARY in await terminal.until("your answer")
        terminal.type("\r")
        await terminal.until("label, why have no value: choose one, or e edits")
        terminal.type("1")
        terminal.type("e")
        await terminal.until("label [billing]:")
        terminal.type("\n")
        await terminal.until("why:")
        terminal.type("typed by hand\n")
        await terminal.until("typed by hand")
        terminal.type("\r")
        await terminal.until("no row is left for you")
        await terminal.until("one person's answers, not checked")
        assert await terminal.process.wait() == 0
    said = [each for each in DirectoryLog(tmp_path / RUN).read()[0] if each.kind not in ("lease", "audit", "free")]
    assert [each.kind for each in said] == ["answer", "undo", "answer", "none", "answer"]
    assert said[-1].output == {"label": "billing", "why": "typed by hand"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
async def test_a_review_that_is_killed_loses_no_answer(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / RUN, 9)
    async with Terminal.started(tmp_path, "review", RUN, "--who", "ada", "--audit", "4") as terminal:
        await terminal.until("4 in the audit")
        terminal.type("1")
        await terminal.until("3 in the audit")
        terminal.process.kill()
        await terminal.process.wait()
    with (tmp_path / RUN / REVIEW).open("ab") as file:
        file.write(b'{"n":99,"kind":"answer","who":"ada","row":')  # what a kill in the middle of a write leaves
    judge_all(tmp_path / RUN)
    with PeopleReview.open(tmp_path / RUN) as review:
        assert review.waiting == 0
    lines = (tmp_path / RUN / REVIEW).read_bytes().splitlines()
    assert all(json.loads(line) for line in lines)
    assert sum(json.loads(line)["kind"] in ("answer", "none") for line in lines) == 4 + 1


class Terminal:
    """A command at a pseudo terminal."""

    def __init__(self, process: WarmProcess, controller: int) -> None:
        self.process, self._controller, self._seen = process, controller, ""

    @classmethod
    @asynccontextmanager
    async def started(cls, directory: Path, *arguments: str) -> AsyncIterator[Self]:
        import fcntl
        import pty
        import struct
        import termios

        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        process = await start(
            *("-m", "batch_agent", *arguments),
            cwd=directory,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(terminal)
        try:
            yield cls(process, controller)
        finally:
            process.kill()
            await process.wait()
            os.close(controller)

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    async def until(self, words: str) -> str:
        """What was shown until these words."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while words not in self._seen:
                try:
                    data = await loop.run_in_executor(None, os.read, self._controller, 65536)
                    self._seen = (self._seen + data.decode()).replace("\r\n", " ")
                except OSError:
                    raise AssertionError(f"the command ended: {self._seen}") from None
        shown, _, self._seen = self._seen.partition(words)
        return shown


async def test_a_run_whose_rows_wait_for_people_ends_with_6_until_they_are_judged(place: str, tmp_path: Path) -> None:
    rows(tmp_path, *({"id": f"T-{row}", "input": f"ticket {row}"} for row in range(6)))
    async with serving(tmp_path, lambda _: Say('{"label": "b"}')) as server:
        cascade = json.dumps([{"backend": server.backend_url, "model": "m"}, "people"])
        command = ["run", "--task", "Say {input}", "--inputs", "rows.jsonl", "--schema", '{"label": "a|b"}']
        command += ["--cascade", cascade, "--escalate", "output.label == 'b'", "--run-dir", place]
        done = await batch_agent(tmp_path, *command)
        assert done.code == 6, done.stderr
        assert f"6 rows wait for people: batch-agent review {place}" in done.stderr
        with PeopleReview.open(place) as review:
            for label in "aaaab":
                shown = review.next("ada")
                assert shown is not None
                assert shown.model is not None
                review.judge("ada", shown.row.row, "repair", "answer", {"label": label})
        again = await batch_agent(tmp_path, *command, "--resume")
        assert again.code == 6
        assert f"1 row waits for people: batch-agent review {place}" in again.stderr
        with PeopleReview.open(place) as review:
            shown = review.next("ada")
            assert shown is not None
            review.judge("ada", shown.row.row, "repair", "none")
        last = await batch_agent(tmp_path, *command, "--resume")
        assert "for people" not in last.stderr.splitlines()[-1]
        assert last.code == 0, last.stderr
    found = await batch_agent(tmp_path, "export", place)
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [each["output"] for each in lines] == [*[{"label": "a"}] * 4, {"label": "b"}, None]
    assert all(each["answered_by"] == "people" and "waits_for" not in each for each in lines)
