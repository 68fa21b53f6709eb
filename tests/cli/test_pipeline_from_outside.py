"""A pipeline's run directory, as the commands that read one see it: the rows of its stages, not its own row."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.commandline import batch_agent

from batch_agent import Pipeline, Tool
from batch_agent.cli.main import main
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ScriptedServer, ToolUse

ROWS = [{"id": "a", "text": "one"}, {"id": "b", "text": "broken"}, {"id": "c", "text": "three"}]
SPEC = """
backend: simulated://instant
inputs: [{id: a, text: one}, {id: b, text: two}]
stages:
  - map: {name: read, task: "Read {text}"}
  - reduce: {prompt: "Sum up {n}"}
"""


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def answer(request: Request) -> Say | Fail:
    if request.text in ("Read broken", "Judge said Read three"):
        return Fail(400)
    return Say(f"said {request.text}")


@pytest.fixture
async def recorded() -> Path:
    """Three rows are read and one fails; two are judged and one fails; one reduction."""
    pipeline = Pipeline(ROWS).map(name="read", task="Read {text}").map(name="judge", task="Judge {input}")
    backend = ScriptedBackend(answer)
    await pipeline.reduce("Sum up {n}").run(backend=backend, model="m", run_dir="runs/p", max_retries=0)
    return Path("runs/p")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_status_sums_the_stages_and_has_a_line_for_each(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "status", str(recorded))
    assert "rows     6 of 6 done: 4 ok, 2 failed" in text
    assert "stages   read    3 of 3 done: 2 ok, 1 failed" in text and "judge   2 of 2 done: 1 ok, 1 failed" in text
    status = json.loads(shown(capsys, "status", str(recorded), "--json"))
    assert (status["rows"]["done"], status["rows"]["total"], status["summary"]["rows"]["done"]) == (6, 6, 6)
    assert [(each["name"], each["rows"]["failed"]) for each in status["stages"]] == [
        ("read", 1),
        ("judge", 1),
        ("reduce", 0),
    ]
    assert sum(each["tokens"] for each in status["stages"]) == status["tokens"]


def test_a_stage_that_has_not_begun_is_named_and_the_total_is_unknown(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "reduce" / "run.json").unlink()
    text = shown(capsys, "status", str(recorded))
    assert "rows     5 done: 3 ok, 2 failed" in text and "reduce  not begun" in text


def test_runs_lists_a_pipeline_with_the_rows_of_its_stages(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "runs/p  complete  6/6   2" in shown(capsys, "runs")


def test_show_has_the_rows_of_all_stages_each_with_its_stage(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def headings(*arguments: str) -> list[str]:
        lines = shown(capsys, "show", str(recorded), *arguments).splitlines()
        return [line.partition(":")[0] for line, under in pairwise(lines) if under == "=" * len(line) and line]

    assert headings() == ["read, row 0 (a)", "judge, row 0 (a)", "reduce, row 0 (0.0)"]
    assert headings("--failed") == ["read, row 1 (b)", "judge, row 2 (c)"]
    assert len(headings("--slow", "4")) == 4
    assert headings("--row", "judge/2") == headings("--row", "judge/c") == ["judge, row 2 (c)"]
    assert headings("--row", "c") == ["read, row 2 (c)", "judge, row 2 (c)"]  # a row on its way through the stages
    for row, says in {"0": "--row read/0 or --row judge/0", "judge/1": "there is no row 'judge/1'"}.items():
        assert main(["show", str(recorded), "--row", row]) == 1
        assert says in capsys.readouterr().err


def test_show_has_the_prompts_of_the_stages_of_a_spec_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.yaml").write_text(SPEC)
    assert main(["run", "p.yaml", "--run-dir", "run", "--output", "o.jsonl"]) == 0
    assert main(["show", "run", "--row", "read/a"]) == 0
    out, err = capsys.readouterr()
    assert "user\n    Read one" in out and "instead of prompts" not in err
    messages = shown(capsys, "export", "run", "--stage", "read", "--format", "messages").splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in messages] == ["Read one", "Read two"]


def test_export_has_the_last_stage_unless_another_is_named(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = shown(capsys, "export", str(recorded)).splitlines()
    assert json.loads(line)["output"].startswith("said Sum up 3")
    lines = shown(capsys, "export", str(recorded), "--stage", "read").splitlines()
    assert [json.loads(line)["job_id"] for line in lines] == ["a", "b", "c"]
    assert main(["export", str(recorded), "--stage", "raed"]) == 1
    assert "has no stage 'raed'; its stages: read, judge, reduce" in capsys.readouterr().err
    (recorded / "reduce" / "run.json").unlink()
    assert main(["export", str(recorded)]) == 1
    assert "'reduce' of runs/p has not started" in capsys.readouterr().err


async def test_retry_failed_tries_the_failed_rows_of_the_stages(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(SPEC.replace("backend: simulated://instant", "model: m\nmax_retries: 0"))
    broken = {"Read two"}

    def answer(request: Request) -> Say | Fail:
        return Fail(400) if request.text in broken else Say(f"said {request.text}")

    async with ScriptedServer(answer, models=["m"]) as server:
        await batch_agent(tmp_path, "run", "p.yaml", "--backend", server.backend_url, "--run-dir", "run")
        broken.clear()
        asked = len(server.requests)
        _, _, err = await batch_agent(tmp_path, "retry-failed", "run", "--type", "Truncated")
        assert "retrying" not in err and len(server.requests) == asked
        status, out, err = await batch_agent(tmp_path, "retry-failed", "run")
    assert status == 0 and "retrying 1 row that failed: 1 of read, in a new conversation" in err, err
    assert "Later stages get the new answers" in err
    assert "said Read two" in json.loads(out)["output"]
    assert [request.text[:8] for request in server.requests[asked:]] == ["Read two", "Sum up 2"]


async def test_an_unfinished_row_is_shown_with_its_id_and_the_fields_that_it_carries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Pipeline([{"id": "a", "text": "one"}]).map(name="read", task="Read {text}", carry=["text"])
    pipeline, called = rows.map(name="judge", task="Judge {input} of {text}", tools=[Tool.read_file]), asyncio.Event()

    async def script(request: Request) -> Say:
        if request.text.startswith("Read"):
            return Say("said one")
        if request.turn == 0:
            return CallTools(ToolUse("read_file", {"path": "none"}))
        called.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    flow = pipeline.open(backend=ScriptedBackend(script), model="m", run_dir=tmp_path / "run")
    async with flow:
        finishing = asyncio.create_task(flow.finish())
        await called.wait()
        flow.cancel()
        await finishing
    text = shown(capsys, "show", str(tmp_path / "run"), "--unfinished")
    assert "judge, row 0 (a)" in text and "one" in text
