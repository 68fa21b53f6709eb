"""``resume``, ``retry-failed`` and ``status`` against a server on a real socket."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.cli.commandline import batch_agent, started

from batch_agent import BatchAgent
from batch_agent.cli.main import main
from batch_agent.record.reader import look
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend, ScriptedServer
from batch_agent.testing.wire import Script


@asynccontextmanager
async def serving(directory: Path, script: Script, rows: int = 4) -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(script, models=["m"]) as server:
        write_spec(directory, server)
        write_rows(directory, rows)
        yield server


def write_spec(directory: Path, server: ScriptedServer, task: str = "Say {word}") -> None:
    text = f"task: '{task}'\nmodel: m\nbackend: {server.backend_url}\nmax_retries: 0\ninputs: rows.jsonl\n"
    (directory / "spec.yaml").write_text(text)


def write_rows(directory: Path, count: int) -> None:
    lines = [json.dumps({"id": n, "word": f"word {n}"}) + "\n" for n in range(count)]
    (directory / "rows.jsonl").write_text("".join(lines))


def echo(request: Request) -> Say:
    return Say(request.text)


async def test_a_run_is_recorded_without_being_asked_to_and_may_be_told_not_to(tmp_path: Path) -> None:
    async with serving(tmp_path, echo):
        await batch_agent(tmp_path, "run", "spec.yaml", "--no-run-dir")
        assert not (tmp_path / "runs").exists()
        code, _, _ = await batch_agent(tmp_path, "run", "spec.yaml")
    assert code == 0
    [directory] = (tmp_path / "runs").iterdir()
    assert directory.name.startswith("spec-")
    assert look(directory).state == "complete"


async def test_a_killed_run_is_resumed_from_another_directory_and_ends_complete(tmp_path: Path) -> None:
    hanging = True

    def script(request: Request) -> Say | Hang:
        return Hang() if hanging and "word 3" in request.text else Say(request.text)

    async with serving(tmp_path, script) as server:
        async with started(tmp_path, "run", "spec.yaml", "--run-dir", "here", "--output", "out.jsonl") as process:
            await server.wait_until(lambda: server.received == 4 and server.inflight == 1)
            while look(tmp_path / "here").latest.tokens == 0:
                await asyncio.sleep(0.01)
            code, text, _ = await batch_agent(tmp_path, "status", "here", "--json")
            status = json.loads(text)
            assert (code, status["state"], status["rows"]["total"]) == (0, "running", 4)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        hanging = False
        held = look(tmp_path / "here")
        assert held.state == "interrupted"
        (tmp_path / "else").mkdir()
        code, _, stderr = await batch_agent(tmp_path / "else", "resume", "../here")
        assert code == 0, stderr
        assert 5 <= server.received < 8
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(result["output"] for result in results) == [f"Say word {n}" for n in range(4)]
    assert look(tmp_path / "here").state == "complete"


async def test_a_complete_run_is_said_to_be_complete_and_left_alone_until_something_changes(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        written = (tmp_path / "here" / "run.json").read_bytes()
        code, stdout, stderr = await batch_agent(tmp_path, "resume", "here")
        assert (code, stdout) == (0, "")
        assert "here is complete: 4 rows" in stderr
        assert (tmp_path / "here" / "run.json").read_bytes() == written
        write_rows(tmp_path, 5)
        code, stdout, _ = await batch_agent(tmp_path, "resume", "here")
        assert (code, len(stdout.splitlines()), server.received) == (0, 5, 5)
        write_spec(tmp_path, server, task="Shout {word}")
        code, _, stderr = await batch_agent(tmp_path, "resume", "here")
        assert (code, server.received) == (1, 5)
        assert "task: 1 word" in stderr and "5 recorded answers would be dropped" in stderr
        assert "--keep-answers" in stderr and "--resend" in stderr
        code, _, stderr = await batch_agent(tmp_path, "resume", "here", "--resend")
        assert (code, server.received) == (0, 10)
        assert "have changed" in stderr


async def test_checkpoint_dir_is_run_dir_and_resume_in_one(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        for _ in range(2):
            code, stdout, _ = await batch_agent(tmp_path, "run", "spec.yaml", "--checkpoint-dir", "here")
            assert (code, len(stdout.splitlines()), server.received) == (0, 4, 4)


async def test_an_empty_run_dir_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        code, _, stderr = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "")
        assert (code, server.received) == (1, 0)
    assert "run_dir is empty" in stderr


async def test_the_directory_of_the_command_line_replaces_the_url_of_the_spec(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        with (tmp_path / "spec.yaml").open("a") as spec:
            spec.write("run_dir: redis://localhost:1/0/never\n")
        code, _, _ = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        assert (code, server.received) == (0, 4)
    assert (tmp_path / "here" / "results.jsonl").exists()


async def test_force_resume_keeps_old_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        write_spec(tmp_path, server, task="Shout {word}")
        code, stdout, stderr = await batch_agent(tmp_path, "resume", "here", "--force-resume")
        assert (code, server.received) == (0, 4)
    assert "Say word 0" in stdout
    assert "keep the answers" in stderr


async def test_failed_rows_are_retried_by_type(tmp_path: Path) -> None:
    broken = True

    def script(request: Request) -> Say | Fail:
        if broken and "word 1" in request.text:
            return Say("half", finish_reason="length")
        return Fail(400) if broken and "word 2" in request.text else Say(request.text)

    async with serving(tmp_path, script) as server:
        with (tmp_path / "spec.yaml").open("a") as spec:
            spec.write("truncated: fail\n")
        code, _, stderr = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        assert code == 2
        assert "batch-agent resume here" in stderr
        broken = False
        code, _, _ = await batch_agent(tmp_path, "resume", "here", "--no-retry-failed")
        assert (code, server.received) == (2, 4)
        code, _, _ = await batch_agent(tmp_path, "retry-failed", "here", "--type", "Truncated")
        assert (code, server.received) == (2, 5)
        code, _, _ = await batch_agent(tmp_path, "retry-failed", "here")
        assert (code, server.received) == (0, 6)


async def test_a_run_from_python_is_not_resumed_by_the_command_line(tmp_path: Path) -> None:
    await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(echo), run_dir=tmp_path)
    code, _, stderr = await batch_agent(tmp_path, "resume", ".")
    assert code == 1
    assert "resume=True" in stderr and "Traceback" not in stderr
    code, stdout, _ = await batch_agent(tmp_path, "status", ".")
    assert (code, "complete" in stdout) == (0, True)


async def test_rows_from_a_pipe_must_be_piped_in_again(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        run = ("run", "spec.yaml", "--inputs", "-", "--run-dir", "here")
        await batch_agent(tmp_path, *run, stdin=b'{"word": "a"}\n')
        code, _, stderr = await batch_agent(tmp_path, "resume", "here")
        assert code == 1
        assert "--inputs -" in stderr
        code, stdout, _ = await batch_agent(
            tmp_path, "resume", "here", "--inputs", "-", stdin=b'{"word": "a"}\n{"word": "b"}\n'
        )
        assert (code, len(stdout.splitlines()), server.received) == (0, 2, 2)


async def test_a_run_whose_run_file_or_journal_is_lost_goes_on_by_the_commands_that_the_messages_name(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, echo) as server:
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        (tmp_path / "here" / "run.json").write_text("{")
        for command in ("status", "resume"):
            code, _, stderr = await batch_agent(tmp_path, command, "here")
            assert code == 1
            assert "batch-agent run SPEC --run-dir here --resume" in stderr
        code, stdout, _ = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here", "--resume")
        assert (code, len(stdout.splitlines()), server.received) == (0, 4, 4)
        for path in (tmp_path / "here").glob("journal.db*"):
            path.unlink()
        code, _, stderr = await batch_agent(tmp_path, "resume", "here")
        assert (code, server.received) == (0, 8)
        assert "every row is processed again" in stderr
    code, _, stderr = await batch_agent(tmp_path, "run", "spec.yaml", "--resume")
    assert (code, "--resume needs --run-dir" in stderr) == (1, True)


async def test_a_complete_run_sees_a_changed_column_that_the_task_does_not_use(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        rows = (tmp_path / "rows.jsonl").read_text()
        (tmp_path / "rows.jsonl").write_text(rows.replace('"id": 1,', '"id": 1, "note": "new",'))
        code, stdout, _ = await batch_agent(tmp_path, "resume", "here")
        assert (code, server.received) == (0, 4)
    assert [json.loads(line)["input"].get("note") for line in stdout.splitlines()].count("new") == 1


async def test_status_has_no_cost_where_no_price_is_known(tmp_path: Path) -> None:
    async with serving(tmp_path, echo):
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        code, text, _ = await batch_agent(tmp_path, "status", "here", "--json")
    assert (code, json.loads(text)["cost"]) == (0, None)


async def test_an_error_type_that_does_not_exist_is_one_line_with_those_that_do(tmp_path: Path) -> None:
    async with serving(tmp_path, echo):
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        code, _, stderr = await batch_agent(tmp_path, "retry-failed", "here", "--type", "ratelimited")
    assert (code, stderr.count("\n")) == (1, 1)
    assert "RateLimited" in stderr


async def test_no_run_and_a_taken_directory_are_one_line_each(tmp_path: Path) -> None:
    async with serving(tmp_path, echo):
        code, _, stderr = await batch_agent(tmp_path, "status", "nowhere")
        assert (code, stderr.count("\n")) == (1, 1)
        assert "holds no run" in stderr
        await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        code, _, stderr = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here")
        assert code == 1
        assert "holds a run already" in stderr


async def test_a_password_in_the_backends_url_is_not_kept_and_must_be_given_again(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as elsewhere, ScriptedServer(echo, models=["m"]) as server:
        url = server.backend_url.replace("//", "//me:secret@")
        await batch_agent(tmp_path, "run", "spec.yaml", "--backend", url, "--run-dir", "here")
        for path in (tmp_path / "here").iterdir():
            assert b"secret" not in path.read_bytes()
        write_rows(tmp_path, 5)
        code, _, stderr = await batch_agent(tmp_path, "resume", "here")
        assert code == 1
        assert "give --backend again" in stderr and "secret" not in stderr
        code, _, stderr = await batch_agent(tmp_path, "resume", "here", "--backend", url)
        assert code == 0, stderr
        assert (server.received, elsewhere.received) == (5, 0)  # nothing went where the spec alone would send it
        code, stdout, _ = await batch_agent(tmp_path, "export", "here", "--format", "messages")
        assert (code, len(stdout.splitlines())) == (0, 5)


async def test_a_second_process_is_refused_and_leaves_the_results_of_the_first_alone(tmp_path: Path) -> None:
    hanging = asyncio.Event()

    async def script(request: Request) -> Say:
        if "word 0" in request.text:
            await hanging.wait()
        return Say(request.text)

    run = ("run", "spec.yaml", "--run-dir", "here", "--output", "out.csv")
    async with serving(tmp_path, script) as server, started(tmp_path, *run) as process:
        await server.wait_until(lambda: server.received == 4 and server.inflight == 1)
        partial = tmp_path / "out.csv.partial.jsonl"
        while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
            await asyncio.sleep(0.01)
        for again in (run, ("resume", "here")):
            code, _, stderr = await batch_agent(tmp_path, *again)
            assert code == 1 and "is in use by" in stderr
        hanging.set()
        assert await process.wait() == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["index"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
    assert not list(tmp_path.glob("out.csv.*"))


async def test_an_output_among_the_files_of_the_run_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path, echo) as server:
        for output in ("here/results.jsonl", "here/journal.db", "here/new.csv"):
            code, _, stderr = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "here", "--output", output)
            assert code == 1 and "is in the run directory here" in stderr
        assert server.received == 0
        assert not (tmp_path / "here").exists()


def test_status_of_a_run_from_python_says_how_to_go_on_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    BatchAgent.run_sync(task="{input}", inputs=["a"], backend=ScriptedBackend([Fail(400)]), run_dir=str(directory))
    assert main(["status", str(directory)]) == 0
    assert "run it again with resume=True" in capsys.readouterr().out
