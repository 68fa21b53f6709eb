"""Looking at recorded runs: runs, show, status --watch, export; what a resume says before it spends."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batch_agent import AgentContext, BatchAgent, Tool
from batch_agent.agent.prepare import prepare
from batch_agent.cli.main import main
from batch_agent.messages import Usage
from batch_agent.observe.numbers import of_record
from batch_agent.record.reader import look
from batch_agent.run.changes import differences
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@Tool.define(cacheable=True)
def look_up(sku: str) -> str:
    """Looks it up."""
    return f"{sku} is a kettle"


def script(request: Request) -> Say | Fail:
    if "broken" in str(request.messages):
        return Fail(400)
    if not request.turn:
        return CallTools(ToolUse("look_up", {"sku": "K-1"}))
    return Say('{"mood": "fine"}')


@pytest.fixture
def recorded() -> Path:
    """A run of Python's: two rows done, one failed."""
    BatchAgent.run_sync(
        task="Judge {text}",
        inputs=[{"id": "m0", "text": "lovely"}, {"id": "m1", "text": "broken"}, {"id": "m2", "text": "also"}],
        tools=[look_up],
        output_schema={"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]},
        backend=ScriptedBackend(script),
        run_dir="runs/one",
    )
    return Path("runs/one")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_row_is_shown_with_its_calls_results_times_and_tokens(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "show", str(recorded), "--row", "m0")
    assert text.startswith("row 0 (m0): ok, ")
    assert "2 turns" in text and "tokens in" in text
    for part in (
        'look_up(sku="K-1")',
        "look_up answers\n    K-1 is a kettle",
        '"text":"lovely"',
        'output\n    {"mood"',
    ):
        assert part in text
    assert "lovely" not in shown(capsys, "show", str(recorded), "--row", "2")


def test_the_traceback_of_a_worker_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(row: dict[str, str], ctx: AgentContext) -> object:
        return row["missing"]

    BatchAgent.run_sync(worker=work, inputs=[{"text": "a"}], backend=ScriptedBackend(), run_dir="runs/worker")
    text = shown(capsys, "show", "runs/worker", "--failed", "--full")
    assert "KeyError: 'missing'" in text and "traceback\n    Traceback (most recent call last):" in text
    assert 'return row["missing"]' in text


def test_what_a_worker_returns_and_keeps_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(row: str, ctx: AgentContext) -> str:  # as a command-line agent with a login of its own does
        ctx.save("events.jsonl", '{"type": "edit"}')
        return f"did {row}"

    BatchAgent.run_sync(worker=work, inputs=["a"], backend=ScriptedBackend(), run_dir="runs/worker")
    text = shown(capsys, "show", "runs/worker")
    assert "output\n    did a" in text and "events.jsonl" in text and '    {"type": "edit"}' in text


def test_failed_rows_and_slow_ones_are_found(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = shown(capsys, "show", str(recorded), "--failed")
    assert failed.startswith("row 1 (m1): failed") and "failed\n    Rejected: " in failed
    assert shown(capsys, "show", str(recorded), "--slow", "2").count("====\n") == 2
    assert main(["show", str(recorded), "--row", "nothing"]) == 1
    assert "there is no row 'nothing' in " in capsys.readouterr().err


@pytest.mark.covers("show with inputs of unfinished rows", "local")
async def test_a_row_under_way_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    def first_then_never(request: Request) -> Say:
        if request.turn:
            run.cancel()
        return CallTools(ToolUse("look_up", {"sku": "K"}))

    spec = BatchSpec(
        task="T {text}",
        inputs=[{"id": "a", "text": "x"}],
        tools=[look_up],
        backend=ScriptedBackend(first_then_never),
        run_dir="runs/two",
    )
    run: Run[object] = Run(prepare(spec))
    async with run:
        async for _ in run.results():
            pass
    text = shown(capsys, "show", "runs/two", "--unfinished")
    assert "not done" in text and 'look_up(sku="K")' in text and "K is a kettle" in text


def test_the_prompts_of_a_run_of_the_command_line_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text("text\none\n")
    arguments = ["--task", "Say {text}", "rows.csv", "--system", "Be brief.", "--backend", "simulated://instant"]
    assert main(["run", *arguments, "--run-dir", "run", "--output", "o.jsonl"]) == 0
    capsys.readouterr()
    text = shown(capsys, "show", "run")
    assert "system\n    Be brief." in text and "user\n    Say one" in text and "assistant, turn 1" in text


def test_a_repair_is_shown_with_the_message_that_asked_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    def mends(request: Request) -> Say:
        return Say('{"mood": "fine"}' if request.turn else '{"mud": 1}')

    schema = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
    options: dict[str, Any] = {"task": "{input}", "inputs": ["x"], "output_schema": schema, "run_dir": "mended"}
    BatchAgent.run_sync(backend=ScriptedBackend(mends), **options)
    text = shown(capsys, "show", "mended", "--full")
    assert text.index("mud") < text.index("user, repair") < text.index("turn 2")
    assert "mood" in text[text.index("user, repair") : text.index("turn 2")]


def test_the_end_of_a_resumed_run_names_the_totals_that_status_has(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text("text\none\ntwo\n")
    arguments = ["--task", "Say {text}", "rows.csv", "--backend", "simulated://instant", "--output", "o.jsonl"]
    assert main(["run", *arguments, "--run-dir", "run"]) == 0
    first = capsys.readouterr().err
    Path("rows.csv").write_text("text\none\ntwo\nthree\n")
    assert main(["resume", "run"]) == 0
    second = capsys.readouterr().err
    totals = of_record(look("run")).total_words
    assert "overall" not in first
    assert f"overall  3 rows done: 3 ok, 0 failed; {totals}, in 2 sessions" in second
    assert totals in shown(capsys, "status", "run")


async def test_the_status_of_a_running_run_does_not_advise_to_resume_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked, free = asyncio.Event(), asyncio.Event()

    async def script(request: Request) -> Say | Fail:
        if "bad" in str(request.messages):
            return Fail(400)
        asked.set()
        await free.wait()
        return Say("fine")

    options: dict[str, Any] = {"task": "{input}", "inputs": ["bad", "x"], "run_dir": "runs/live", "max_inflight": 1}
    working = asyncio.create_task(BatchAgent.run(backend=ScriptedBackend(script), **options))
    await asked.wait()
    text = await asyncio.to_thread(shown, capsys, "status", "runs/live")
    free.set()
    await working
    ended = await asyncio.to_thread(shown, capsys, "status", "runs/live")
    assert "state    running" in text and "resume" not in text
    assert "1 failed" in ended and "resume" in ended


def test_runs_are_listed_the_latest_first_and_a_damaged_one_hides_none(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/bad").mkdir()
    Path("runs/bad/run.json").write_text("{")
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["RUN", "STATE", "ROWS", "FAILED", "STARTED", "TOKENS", "MODEL"]
    assert "runs/one  complete  3/3   1" in out and "runs/bad/run.json is damaged" in err
    [run] = json.loads(shown(capsys, "runs", "runs", "--json"))
    assert (run["run_dir"], run["rows"]["done"]) == ("runs/one", 3)
    assert main(["runs", "nowhere"]) == 1


def test_an_export_takes_its_format_from_the_name_and_keeps_ids_and_failures(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("out.jsonl", "out.csv"):
        assert main(["export", str(recorded), "--output", name]) == 0
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(line["job_id"], line["ok"]) for line in lines] == [("m0", True), ("m1", False), ("m2", True)]
    assert lines[1]["error"]["type"] == "Rejected" and lines[0].keys() >= lines[1].keys() - {"raw_text", "cost"}
    assert Path("out.csv").read_text().splitlines()[2].startswith("m1,broken,,false,Rejected")
    assert len(shown(capsys, "export", str(recorded)).splitlines()) == 3
    assert main(["export", str(recorded), "--output", "out.txt"]) == 1
    assert "the format of out.txt is unknown" in capsys.readouterr().err


def test_a_run_that_has_ended_is_watched_once(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((recorded / "run.json").read_text())
    (recorded / "run.json").write_text(json.dumps({**facts, "trouble": "the server is down"}))
    text = shown(capsys, "status", str(recorded), "--watch")
    assert text.count("state ") == 1 and "the server is down" not in text  # it is over
    status = json.loads(shown(capsys, "status", str(recorded), "--json"))
    assert status["rows_per_second"] >= 0 and status["seconds_left"] is None


def test_a_resume_after_an_edit_says_what_changed_and_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    spec = "task: 'Say {text}'\nsystem_prompt: Be very brief.\nbackend: simulated://instant\ninputs: rows.csv\n"
    spec += "prices: {input: 1, output: 2}\n"
    Path("rows.csv").write_text("text\none\ntwo\n")
    Path("spec.yaml").write_text(spec)
    assert main(["run", "spec.yaml", "--run-dir", "run", "--output", "o.jsonl"]) == 0
    Path("spec.yaml").write_text(spec.replace("very", "most"))
    capsys.readouterr()
    assert main(["resume", "run"]) == 1
    err = capsys.readouterr().err
    assert "system_prompt: 1 word: 'very' → 'most'\n2 recorded answers would be dropped" in err
    assert "The run has cost $" in err
    assert main(["resume", "run", "--resend"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("batch-agent: changed since run was recorded:\n  system_prompt: 1 word: 'very' → 'most'\n")
    assert "kept 0, to send 2 (2 changed), about $" in err
    Path("spec.yaml").write_text(spec.replace("very", "so"))
    assert main(["resume", "run", "--force-resume"]) == 0
    assert "kept 2, to send 0\n" in capsys.readouterr().err


def test_differences_are_told_in_few_words() -> None:
    before = {
        "task": "a b c",
        "model": "one",
        "seed": None,
        "output_schema": "1",
        "tools": {"x": "1", "y": "1"},
        "system_prompt": "p  q",
    }
    now = {
        "task": "a d e c f",
        "model": "two",
        "seed": 3,
        "output_schema": "2",
        "tools": {"x": "2", "z": "1"},
        "system_prompt": "p q",
    }
    assert list(differences({"options": before}, now)) == [  # type: ignore[dict-item]
        "task: 3 words: 'b' → 'd e', …",
        "model: one → two",
        "seed: not given → 3",
        "output_schema: changed",
        "tools: + z, - y, x changed",
        "system_prompt: only spaces and line ends",
    ]


def test_a_row_that_was_cut_off_is_shown_with_what_the_model_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    def cut(request: Request) -> Say:
        if not request.turn:
            return CallTools(ToolUse("look_up", {"sku": "K-1"}), usage=Usage(10, 0, 3))
        return Say('{"mood": "rather', finish_reason="length", usage=Usage(20, 0, 5))

    BatchAgent.run_sync(
        task="Judge {input}",
        inputs=["lovely"],
        tools=[look_up],
        output_schema=dict[str, str],
        backend=ScriptedBackend(cut),
        run_dir="runs/cut",
    )
    text = shown(capsys, "show", "runs/cut", "--failed")
    assert "1 turn and one that was cut off, 30 tokens in, 8 out" in text
    assert 'assistant, cut off\n    {"mood": "rather\n' in text
    assert text.index("look_up answers") < text.index("assistant, cut off") < text.index("Truncated:")


def test_a_row_with_samples_shows_its_votes_and_doubts(capsys: pytest.CaptureFixture[str]) -> None:
    moods = iter(["bad", "good", "good"])
    BatchAgent.run_sync(
        task="Judge {text}",
        inputs=[{"id": "m0", "text": "lovely"}],
        output_schema={"mood": "good|bad", "why": "text"},
        samples=3,
        doubt=True,
        backend=ScriptedBackend(lambda request: Say(json.dumps({"mood": next(moods), "why": "so"}))),
        run_dir="runs/votes",
    )
    text = shown(capsys, "show", "runs/votes", "--row", "m0")
    assert "3 turns" in text
    assert "votes of 3 samples; the conversation above is that of the first\n    mood: bad 1, good 2; 1 against" in text
    assert "doubt, from 0 to 1\n    mood: 0.33\n    why: not known" in text
