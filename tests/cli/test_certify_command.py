"""``batch-agent certify``: the certificate of a promise, what it is compared with, and what each change of it says."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.run.promised import MOODS, answer, judge, table

from batch_agent import BatchAgent
from batch_agent.testing import Fail, Request, Say, ScriptedServer

pytestmark = pytest.mark.usefixtures("state")


async def kept(place: Path, rows: int = 150, **options: Any) -> list[dict[str, Any]]:
    """Make a run whose promise is kept."""
    made = table(rows, wrong=0.05, failed=0.02)
    async with ScriptedServer(answer, models=["scripted"]) as server:
        await BatchAgent.run(
            task="{text}",
            inputs=[{"id": row["id"], "text": row["text"]} for row in made],
            output_schema=MOODS,
            backend=server.backend_url,
            model="scripted",
            run_dir=place / "run",
            max_retries=0,
            promise="mood.accuracy >= 0.85",
            **options,
        )
    judge(place / "run", made)
    return made


async def test_a_certificate_has_both_answers_of_the_audited_rows_and_agrees_with_the_record(tmp_path: Path) -> None:
    made = await kept(tmp_path)
    outcome = await batch_agent(tmp_path, "certify", "run", "-o", "certificate.json")
    assert outcome.code == 0, outcome.stderr
    text = (tmp_path / "certificate.json").read_text()
    certificate = json.loads(text)
    assert certificate["standing"]["state"] == "kept"
    assert certificate["method"]["prior"] == [1.0, pytest.approx(2 / 0.15)]
    truth = {row["id"]: row["truth"] for row in made}
    assert all(each["right"] == {"mood": truth[each["id"]]} for each in certificate["audit"])
    assert len(certificate["audit"]) == certificate["standing"]["audited"]
    assert "ann" not in text
    assert made[0]["text"] not in text
    checked = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "run")
    assert (checked.code, "agrees with the record of run" in checked.stderr) == (0, True), checked.stderr


async def test_names_are_there_only_if_they_are_asked_for(tmp_path: Path) -> None:
    await kept(tmp_path)
    await batch_agent(tmp_path, "certify", "run", "-o", "certificate.json", "--names")
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert {name for each in certificate["audit"] for name in each["who"]} == {"ann"}
    assert (await batch_agent(tmp_path, "certify", "--check", "certificate.json", "run")).code == 0


async def test_integers_beyond_64_bits_in_the_rows_are_certified_as_they_are(tmp_path: Path) -> None:
    made = table(100, wrong=0.02)
    rows = [{"id": row["id"], "text": row["text"], "account": 2**80 + place} for place, row in enumerate(made)]
    async with ScriptedServer(answer, models=["scripted"]) as server:
        known: dict[str, Any] = {"task": "{text}", "output_schema": MOODS, "backend": server.backend_url}
        known |= {"model": "scripted", "run_dir": tmp_path / "run", "promise": "mood.accuracy >= 0.85"}
        await BatchAgent.run(inputs=rows, **known)
    judge(tmp_path / "run", made)
    assert (await batch_agent(tmp_path, "certify", "run", "-o", "certificate.json")).code == 0
    assert (await batch_agent(tmp_path, "certify", "--check", "certificate.json", "run")).code == 0
    of_lines("results.jsonl", lambda lines: lines[3]["input"].update(account=lines[3]["input"]["account"] + 1))(
        tmp_path
    )
    changed = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "run")
    assert "the rows are not those that the run began with" in changed.stderr


async def test_a_promise_that_is_not_kept_has_no_certificate(tmp_path: Path) -> None:
    made = table(100)
    async with ScriptedServer(answer, models=["scripted"]) as server:
        known: dict[str, Any] = {"task": "{text}", "output_schema": MOODS, "backend": server.backend_url}
        known |= {"model": "scripted", "run_dir": tmp_path / "run", "promise": "mood.accuracy >= 0.9"}
        await BatchAgent.run(inputs=[{"id": row["id"], "text": row["text"]} for row in made], **known)
    outcome = await batch_agent(tmp_path, "certify", "run", "-o", "certificate.json")
    assert outcome.code == 6
    assert "not yet kept" in outcome.stderr
    assert not (tmp_path / "certificate.json").exists()


def of_lines(name: str, change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        path = place / "run" / name
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def of_certificate(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        path = place / "certificate.json"
        certificate = json.loads(path.read_text())
        change(certificate)
        path.write_text(json.dumps(certificate))

    return edit


def flip(line: dict[str, Any]) -> None:
    mood = line["output"]["mood"]
    line["output"]["mood"] = "calm" if mood == "angry" else "angry"


def flip_everywhere(place: Path) -> None:
    """Change an answer in the results and in the journal."""
    path = place / "run" / "results.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    before, after = first["output"]["mood"], "calm" if first["output"]["mood"] == "angry" else "angry"
    of_lines("results.jsonl", lambda lines: flip(lines[0]))(place)
    with sqlite3.connect(place / "run" / "journal.db") as db:
        for number, body in db.execute("SELECT id, body FROM record").fetchall():
            if json.dumps(first["input"]["text"])[1:-1].encode() in body or body.count(before.encode()):
                db.execute(
                    "UPDATE record SET body = ? WHERE id = ?", (body.replace(before.encode(), after.encode()), number)
                )
                break


def swap_audit(lines: list[dict[str, Any]]) -> None:
    """Let the audit have a row that the key did not draw, in place of its first one."""
    frozen = [line for line in lines if line["kind"] == "frozen"]
    others = {line["row"] for line in frozen}
    spare = next(row for row in range(150) if row not in others)
    old = frozen[0]["row"]
    for line in lines:
        if line.get("row") == old:
            line["row"], line["id"] = spare, f"r{spare}"


def freeze_late(lines: list[dict[str, Any]]) -> None:
    """Move what was recorded before people judged behind that, with new numbers."""
    lines.sort(key=lambda line: line["kind"] == "frozen")
    for number, line in enumerate(lines, 1):
        line["n"] = number


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "an edited answer": (of_lines("results.jsonl", lambda lines: flip(lines[3])), "the answer of row r"),
    "a row left out": (of_lines("results.jsonl", lambda lines: lines.pop(5)), "1 rows were left out"),
    "an edited row": (
        of_lines("results.jsonl", lambda lines: lines[2]["input"].update(text="0: calm 0.9")),
        "the rows are not those that the run began with",
    ),
    "a row twice": (of_lines("results.jsonl", lambda lines: lines.append(lines[0])), "1 rows were added"),
    "an audited row that the key did not draw": (of_lines("review.jsonl", swap_audit), "the key did not draw"),
    "an answer of a person": (
        of_lines(
            "review.jsonl", lambda lines: next(line for line in lines if line["kind"] == "answer").update(kind="none")
        ),
        "(none of row r",
    ),
    "the name of a person": (
        of_lines(
            "review.jsonl", lambda lines: next(line for line in lines if line["kind"] == "answer").update(who="eve")
        ),
        "(answer of row r",
    ),
    "a judgement left out": (
        of_lines("review.jsonl", lambda lines: lines.remove(next(line for line in lines if line["kind"] == "answer"))),
        "the log of the review is not in its order",
    ),
    "a log in another order": (
        of_lines("review.jsonl", lambda lines: lines.insert(3, lines.pop())),
        "the log of the review is not in its order: its line 4 has the number",
    ),
    "answers that were frozen after people judged them": (
        of_lines("review.jsonl", freeze_late),
        "was judged (line",
    ),
    "a doubt": (
        of_lines("results.jsonl", lambda lines: lines[3].update(doubt=lines[3]["doubt"] / 2)),
        "doubts of the record are not those of the certificate",
    ),
    "words more in the certificate": (
        of_certificate(lambda found: found.update(advice="trust it")),
        "the certificate has advice, which the record does not give",
    ),
    "the bound of the certificate": (
        of_certificate(lambda found: found["standing"].update(bound=0.001)),
        "standing of the certificate is not what the record gives: bound is 0.001",
    ),
    "an audited row of the certificate": (
        of_certificate(lambda found: found["audit"][4].update(wrong=not found["audit"][4]["wrong"])),
        "differs in wrong",
    ),
    "an audited row left out of the certificate": (
        of_certificate(lambda found: found["audit"].pop(0)),
        "the certificate lists",
    ),
    "a threshold of the certificate": (
        of_certificate(lambda found: found["method"]["thresholds"].pop()),
        "method of the certificate",
    ),
    "another promise": (
        of_certificate(lambda found: found["promise"].update(share="99/100")),
        "the promise in the certificate is not that of the run",
    ),
    "no certificate": (of_certificate(lambda found: found.pop("format")), "this is no certificate"),
    "an answer changed in the results and the journal": (flip_everywhere, "answer"),
}


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certified")

    async def make() -> None:
        await kept(place)
        outcome = await batch_agent(place, "certify", "run", "-o", "certificate.json")
        assert outcome.code == 0, outcome.stderr

    asyncio.run(make())
    return place


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_after_the_certificate_is_found_and_named(name: str, certified: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(certified, place)
    change, said = CHANGES[name]
    change(place)
    outcome = await batch_agent(place, "certify", "--check", "certificate.json", "run")
    assert outcome.code == 1, outcome.stderr
    assert said in outcome.stderr


async def test_an_exported_table_is_compared_with_what_the_run_delivers(tmp_path: Path) -> None:
    await kept(tmp_path)
    await batch_agent(tmp_path, "export", "run", "--output", "table.csv")
    await batch_agent(tmp_path, "certify", "run", "-o", "certificate.json")
    same = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "--table", "table.csv", "run")
    assert same.code == 0, same.stderr
    text = (tmp_path / "table.csv").read_text()
    lines = text.splitlines(keepends=True)
    lines[4] = lines[4].replace(",angry", ",XX").replace(",calm", ",angry").replace(",XX", ",calm")
    (tmp_path / "table.csv").write_text("".join(lines))
    other = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "--table", "table.csv", "run")
    assert other.code == 1
    assert "of table.csv has another answer" in other.stderr
    (tmp_path / "table.csv").write_text("\n".join([*lines, lines[-1]]))
    twice = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "--table", "table.csv", "run")
    assert "is in table.csv twice" in twice.stderr


def other(request: Request) -> Say | Fail:
    """The larger model says the opposite of the small one, so that each answer is in the journal of its entry only."""
    said = answer(request)
    if isinstance(said, Fail):
        return said
    return Say('{"mood": "calm"}' if "angry" in said.text else '{"mood": "angry"}')


async def edited(place: Path, escalated: Callable[[dict[str, Any]], bool]) -> str:
    """Edit the answer of a row in the results, and return what the check says."""

    def change(lines: list[dict[str, Any]]) -> None:
        flip(next(line for line in lines if escalated(line)))

    of_lines("results.jsonl", change)(place)
    return (await batch_agent(place, "certify", "--check", "certificate.json", "run")).stderr


async def test_answers_of_samples_and_of_later_entries_of_a_cascade_are_found_in_the_journal(tmp_path: Path) -> None:
    made = table(120, wrong=0.05)
    rows = [{"id": row["id"], "text": row["text"]} for row in made]
    known: dict[str, Any] = {"task": "{text}", "inputs": rows, "output_schema": MOODS, "max_retries": 0}
    known["promise"] = "mood.accuracy >= 0.85"
    async with (
        ScriptedServer(answer, models=["small"]) as small,
        ScriptedServer(other, models=["large"]) as large,
    ):
        entries = [{"backend": small.backend_url, "model": "small"}, {"backend": large.backend_url, "model": "large"}]
        results = await BatchAgent.run(
            **known, cascade=[*entries, "people"], escalate="doubt > 0.2", run_dir=tmp_path / "cascade" / "run"
        )
        assert {result.answered_by for result in results} >= {"small", "large"}
        draws = iter(range(10**6))
        voting = ScriptedServer(lambda request: other(request) if next(draws) % 3 == 0 else answer(request))
        async with voting as server:
            await BatchAgent.run(
                **known, backend=server.backend_url, model="m", samples=3, run_dir=tmp_path / "votes" / "run"
            )
    for name in ("cascade", "votes"):
        judge(tmp_path / name / "run", made)
        written = await batch_agent(tmp_path / name, "certify", "run", "-o", "certificate.json")
        assert written.code == 0, written.stderr
        checked = await batch_agent(tmp_path / name, "certify", "--check", "certificate.json", "run")
        assert checked.code == 0, checked.stderr
    said = await edited(tmp_path / "cascade", lambda line: line["ok"] and line.get("answered_by") == "small")
    assert "does not agree" in said


async def test_the_page_says_how_a_promise_stands_and_the_report_has_its_certificate(
    certified: Path, tmp_path: Path
) -> None:
    outcome = await batch_agent(certified, "report", "run", "--output", str(tmp_path / "report.html"))
    assert outcome.code == 0, outcome.stderr
    page = (tmp_path / "report.html").read_text()
    data = json.loads(page.partition('id="report">')[2].partition("</script>")[0])
    promise = data["runs"][0]["overview"]["promise"]
    assert promise["state"] == "kept"
    assert promise["lines"][0].startswith("mood.accuracy >= 0.85 is kept")
    certificate = json.loads((certified / "certificate.json").read_text())
    assert promise["certificate"] == certificate
