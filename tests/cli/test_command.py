"""The whole command against a server on a real socket; as a process where its streams or signals are the subject."""

import asyncio
import json
import os
import re
import shlex
import signal
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import aiohttp
import pytest
from tests.cli.commandline import Outcome, batch_agent, read_results, rows, serving, started
from tests.warm import start

from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ToolUse

FULL = Path("/dev/full")  # a disk without space


async def test_results_go_to_standard_output_and_nothing_else_does(tmp_path: Path) -> None:
    rows(tmp_path, "a", {"input": "b", "more": 7})
    async with serving(tmp_path, lambda request: Say(request.text.upper())):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl")
    assert outcome.code == 0
    first, second = outcome.results
    assert (first["output"], first["ok"], first["input"], first["attempts"]) == ("SAY A", True, "a", 1)
    assert second["input"] == {"input": "b", "more": 7}
    assert "2 rows in" in outcome.stderr and "2 ok" in outcome.stderr


async def test_a_dashboard_without_a_terminal_is_plain_lines(tmp_path: Path) -> None:
    rows(tmp_path, "a")
    async with serving(tmp_path):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--dashboard")
    assert outcome.code == 0 and len(outcome.results) == 1
    assert "1 row in" in outcome.stderr and "\x1b" not in outcome.stderr


async def test_failed_rows_are_lines_and_the_exit_status_is_2(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('"a"\n{"wrong": 1}\n{broken\n"b"\n')

    def script(request: Request) -> Say | Fail:
        return Fail(400) if "b" in request.text else Say("fine")

    async with serving(tmp_path, script):
        outcome = await batch_agent(
            tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--output", "out.jsonl", "--json"
        )
    assert outcome.code == 2
    fine, lacking, broken, refused = read_results((tmp_path / "out.jsonl").read_text())
    assert fine["ok"] is True
    assert [result["error"]["type"] for result in (lacking, broken, refused)] == [  # type: ignore[index]
        "InputError",
        "InputError",
        "Rejected",
    ]
    assert "rows.jsonl line 3 is not JSON" in str(broken["error"])
    assert broken["input"] is None
    summary = json.loads(outcome.stdout)
    assert summary["rows"]["failures"] == {"InputError": 2, "Rejected": 1}
    assert summary["output"] == "out.jsonl"
    assert outcome.stderr == ""


async def test_a_refusal_of_everything_is_one_line_exit_status_1_and_keeps_the_old_results(tmp_path: Path) -> None:
    rows(tmp_path, "a", "b")
    (tmp_path / "out.jsonl").write_text("old\n")
    async with serving(tmp_path, lambda _: Fail(401)):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--output", "out.jsonl")
    assert outcome.code == 1
    assert outcome.stdout == "" and "Traceback" not in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("batch-agent: ") and "401" in outcome.stderr
    assert (tmp_path / "out.jsonl").read_text() == "old\n"


async def test_tools_and_a_schema_from_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(
        "from pydantic import BaseModel\n"
        "class Answer(BaseModel):\n    value: str\n"
        "def look(key: str) -> str:\n    print('looking')\n    return key * 2\n"
    )

    def script(request: Request) -> Say | CallTools:
        last = request.messages[-1]
        return (
            Say(json.dumps({"value": last["content"]})) if request.turn else CallTools(ToolUse("look", {"key": "ab"}))
        )

    spec = "tools: ['things:look']\noutput_schema: 'things:Answer'\ninputs: [x, y]\n"
    async with serving(tmp_path, script, spec):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml")
    assert outcome.code == 0, outcome.stderr
    assert [result["output"] for result in outcome.results] == [{"value": "abab"}] * 2
    assert "2 calls" in outcome.stderr and "looking" in outcome.stderr
    assert "look ran once with arguments that it had run with before" in outcome.stderr  # it is not declared


async def test_rows_come_from_standard_input_as_they_are_written(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, started(tmp_path, "run", "spec.yaml", "--inputs", "-") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'"a"\n"b')
        await server.wait_requests(1)
        assert json.loads(await process.stdout.readline())["input"] == "a"  # while the second row is not there yet
        process.stdin.write(b'"\n')
        process.stdin.write_eof()
        assert json.loads(await process.stdout.readline())["input"] == "b"
        assert await process.wait() == 0


async def test_the_limit_holds_for_csv_and_inline_inputs(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("input\na\nb\nc\n")
    async with serving(tmp_path, spec="inputs: [x, y, z]\n") as server:
        inline = await batch_agent(tmp_path, "run", "spec.yaml", "--limit", "2")
        table = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.csv", "--limit", "1")
    assert [result["input"] for result in inline.results] == ["x", "y"]
    assert [result["input"] for result in table.results] == [{"input": "a"}]
    assert server.received == 3


async def test_a_reader_that_has_seen_enough_ends_the_run_quietly(tmp_path: Path) -> None:
    rows(tmp_path, *map(str, range(200)))
    async with serving(tmp_path, spec="max_inflight: 2\n") as server:
        reads, writes = os.pipe()
        with os.fdopen(reads, "rb", 0) as reader:
            words = ("-m", "batch_agent", "run", "spec.yaml", "--inputs", "rows.jsonl")
            process = await start(*words, cwd=tmp_path, stdout=writes, stderr=PIPE)
            os.close(writes)
            await asyncio.to_thread(reader.readline)
        _, stderr = await process.communicate()
        await server.wait_idle()
    assert b"Traceback" not in stderr and b"Broken" not in stderr
    assert server.received < 200


async def test_a_full_disk_stops_the_run_with_a_clear_message(tmp_path: Path) -> None:
    async with serving(tmp_path, spec="inputs: [a]\n"):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--output", "/dev/full")
    assert outcome.code == 1
    assert "cannot write the results to /dev/full: No space left on device" in outcome.stderr
    assert "1 result in" not in outcome.stderr
    assert "Traceback" not in outcome.stderr


async def test_the_first_interrupt_lets_running_agents_finish(tmp_path: Path) -> None:
    rows(tmp_path, *map(str, range(10)))
    finish = asyncio.Event()

    async def script(_: Request) -> Say:
        await finish.wait()
        return Say("done")

    arguments = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--output", "out.jsonl")
    async with (
        serving(tmp_path, script, "max_inflight: 2\nmax_agents: 2\n") as server,
        started(tmp_path, *arguments) as process,
    ):
        await server.wait_inflight(2)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert b"running agents finish" in await process.stderr.readline()
        finish.set()
        assert await process.wait() == 2
        assert b"stopped early, 8 rows not done" in await process.stderr.read()
    assert [result["ok"] for result in read_results((tmp_path / "out.jsonl").read_text())] == [True, True]
    assert server.received == 2


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGHUP], 129)],
    ids=["ctrl-c twice", "term", "hangup"],
)
async def test_a_stop_closes_what_is_in_flight_and_keeps_what_was_done(
    tmp_path: Path, signals: list[signal.Signals], code: int
) -> None:
    rows(tmp_path, "quick", "slow")
    arguments = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--output", "out.jsonl")

    def script(request: Request) -> Say | Hang:
        return Say("done") if "quick" in request.text else Hang()

    async with serving(tmp_path, script) as server, started(tmp_path, *arguments) as process:
        await server.wait_until(lambda: server.received == 2 and server.inflight == 1)
        while b"done" not in (tmp_path / "out.jsonl").read_bytes():
            await asyncio.sleep(0.01)
        assert process.stderr is not None
        for number in signals:
            process.send_signal(number)
            assert b"batch-agent: stopping" in await process.stderr.readline()
        assert await process.wait() == code
        await server.wait_disconnects(1)
    first, second = read_results((tmp_path / "out.jsonl").read_text())
    assert first["output"] == "done"
    assert "Interrupted" in str(second["error"])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGHUP])
async def test_a_stop_returns_the_reservations_and_removes_the_control_socket(
    tmp_path: Path, number: signal.Signals
) -> None:
    rows(tmp_path, "quick", "slow")
    limit = ("--max-total-tokens", "100000", "--set", "max_tokens=1000")
    arguments = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--run-dir", "r", *limit)

    def script(request: Request) -> Say | Hang:
        return Say("done") if "quick" in request.text else Hang()

    async with serving(tmp_path, script) as server, started(tmp_path, *arguments) as process:
        await server.wait_until(lambda: server.received == 2 and server.inflight == 1)
        place = tmp_path / "r" / "control.json"
        socket = Path(json.loads(place.read_text())["socket"])
        assert socket.exists()
        process.send_signal(number)
        assert await process.wait() == 128 + number
        assert not place.exists() and not socket.parent.exists()
    with sqlite3.connect(tmp_path / "r" / "journal.db") as journal:
        [(tokens, advance)] = journal.execute("SELECT tokens, leased_tokens FROM session")
    journal.close()
    # The cancelled call may have been computed, so it counts as reserved; nothing is advanced beyond it.
    assert advance is None and tokens < 3_000


@pytest.mark.parametrize(("name", "ordered"), [("out.jsonl", ()), ("out.csv", ("--ordered",))])
async def test_a_run_without_an_answer_leaves_an_older_output_unchanged(
    tmp_path: Path, name: str, ordered: tuple[str, ...]
) -> None:
    rows(tmp_path, "a", "b")
    output = tmp_path / name
    output.write_text("older results\n")
    arguments = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--output", name, *ordered)
    async with serving(tmp_path, lambda _: Hang()) as server, started(tmp_path, *arguments) as process:
        await server.wait_until(lambda: server.inflight == 2)
        process.send_signal(signal.SIGTERM)
        _, stderr = await process.communicate()
    assert process.returncode == 143
    assert output.read_text() == "older results\n"
    assert f"{name} is unchanged" in stderr.decode()
    assert {path.name for path in tmp_path.iterdir()} == {name, "spec.yaml", "rows.jsonl", "runs"}


async def test_the_simulated_engine_serves_a_run(tmp_path: Path) -> None:
    rows(tmp_path, "a", "b")
    async with started(tmp_path, "simulate", "--port", "0", "--step-seconds", "0", "--name", "toy") as server:
        assert server.stderr is not None
        line = (await server.stderr.readline()).decode()
        assert "simulated" in line
        url = next(word for word in line.split() if word.startswith("http")).rstrip(";")
        (tmp_path / "spec.yaml").write_text("task: 'Say {input}'\nmax_tokens: 8\n")
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--backend", url, "--json")
        server.send_signal(signal.SIGINT)
        assert await server.wait() == 0
    assert outcome.code in (0, 2)  # an answer of 8 tokens may count as cut off
    assert json.loads(outcome.stderr)["model"] == "toy"


async def test_an_output_that_cannot_be_written_fails_its_row_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(
        "from pydantic import BaseModel, field_serializer\n"
        "class Answer(BaseModel):\n"
        "    word: str\n"
        "    @field_serializer('word')\n"
        "    def refuse(self, word):\n"
        "        if word == 'a': raise ValueError('not this one')\n"
        "        return word\n"
    )
    spec = "output_schema: 'stubborn:Answer'\ninputs: [a, b]\n"
    async with serving(tmp_path, lambda request: Say(json.dumps({"word": request.text[-1]})), spec):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml")
        ordered = await batch_agent(tmp_path, "run", "spec.yaml", "--ordered")
    for seen in (outcome, ordered):
        first, second = seen.results
        assert seen.code == 2
        assert (first["ok"], first["raw_text"]) == (False, '{"word": "a"}')
        assert first["error"]["type"] == "Invalid" and "not this one" in first["error"]["message"]  # type: ignore[index]
        assert (second["ok"], second["output"]) == (True, {"word": "b"})
        assert "1 failed" in seen.stderr


async def test_a_tool_that_exits_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\ndef leave() -> str:\n    sys.exit(0)\n")

    def script(request: Request) -> Say | CallTools:
        return Say(str(request.messages[-1]["content"])) if request.turn else CallTools(ToolUse("leave", {}))

    async with serving(tmp_path, script, "tools: ['leaving:leave']\ninputs: [x]\n"):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml")
    assert outcome.code == 0, outcome.stderr
    assert outcome.results[0]["output"] == "Error: leave failed: SystemExit: 0"


async def shell(directory: Path, line: str) -> Outcome:
    """The command with what a shell can do to its streams; ``line`` stands behind ``batch-agent``."""
    process = await asyncio.create_subprocess_shell(
        f"{shlex.quote(sys.executable)} -m batch_agent {line}", cwd=directory, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    stdout, stderr = await process.communicate()
    return Outcome(process.returncode, stdout.decode(), stderr.decode())


async def test_a_run_that_nobody_hears_of_has_its_results_and_its_status(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: Say(request.text.upper()), "inputs: [a, b]\n"):
        with FULL.open("wb") as full:
            words = ("-m", "batch_agent", "run", "spec.yaml")
            process = await start(*words, cwd=tmp_path, stdout=PIPE, stderr=full.fileno())
        stdout, _ = await process.communicate()
        outcome = Outcome(process.returncode, stdout.decode(), "")
        in_file = await shell(tmp_path, "run spec.yaml --output out.jsonl 2>&- <&-")
    assert (outcome.code, [result["output"] for result in outcome.results]) == (0, ["SAY A", "SAY B"])
    assert (in_file.code, len(read_results((tmp_path / "out.jsonl").read_text()))) == (0, 2)


async def test_a_closed_standard_output_is_nowhere(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda _: Say("fine"), "inputs: [a]\n"):
        run = await shell(tmp_path, "run spec.yaml >&-")
        plan = await shell(tmp_path, "run spec.yaml --dry-run >&-")
    assert (run.code, plan.code, plan.stderr) == (0, 0, "")
    assert "1 ok" in run.stderr


@pytest.mark.parametrize("what", ["run spec.yaml --dry-run", "run spec.yaml"])
async def test_a_full_standard_output_is_one_line_and_exit_status_1(tmp_path: Path, what: str) -> None:
    async with serving(tmp_path, lambda _: Say("fine"), "inputs: [a]\n"):
        with FULL.open("wb") as full:
            words = ("-m", "batch_agent", *what.split())
            process = await start(*words, cwd=tmp_path, stdout=full.fileno(), stderr=PIPE)
        stderr = (await process.communicate())[1].decode()
    assert process.returncode == 1
    assert stderr.splitlines()[-1].startswith("batch-agent: cannot write")
    assert "Traceback" not in stderr and "No space left" in stderr


async def test_the_numbers_and_the_events_of_a_run_leave_the_process(tmp_path: Path) -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def script(request: Request) -> Say:
        asked.set()
        await go_on.wait()
        return Say("ok")

    rows(tmp_path, {"input": "a"}, {"input": "b"})
    command = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--metrics-port", "0", "--events", "events.jsonl")
    async with serving(tmp_path, script), started(tmp_path, *command) as process:
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        assert line.startswith("metrics: http://127.0.0.1:")
        await asked.wait()
        async with aiohttp.ClientSession() as session, session.get(line.split()[1]) as answer:
            page = await answer.text()
        assert re.search(r'^batch_agent_rows\{state="running"\} [12]$', page, re.MULTILINE), page
        go_on.set()
        assert await process.wait() == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "RunStarted" and kinds[-1] == "RunFinished" and kinds.count("JobFinished") == 2
