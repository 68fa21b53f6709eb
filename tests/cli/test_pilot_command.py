"""``--pilot``: a random sample of the rows runs first, then the run stops or asks, and no row is paid twice."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.commandline import Outcome, batch_agent
from tests.warm import start

from batch_agent.backends.registry import BACKEND_VARIABLE
from batch_agent.cli.exit_status import ALL_OK, PILOT, ROWS_FAILED, RUN_FAILED
from batch_agent.errors import SpecError, StoreError
from batch_agent.record.reader import look
from batch_agent.testing import Hang, Request, Say, ScriptedServer
from batch_agent.trust.order import KeyedOrder

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import needs_redis

ROWS, FEW, MORE = 60, 8, 20
TASK = ("run", "--task", "Say {word}", "rows.jsonl", "--model", "m", "--output", "out.jsonl")
PRICES = ("--set", 'prices={"input": 1, "output": 2}')


def ids(count: int, key: str | None = None) -> set[str]:
    names = [f"r{number}" for number in range(ROWS)]
    order = KeyedOrder() if key is None else KeyedOrder(key)
    return {names[place] for place in order.first(names, count)}


class Bench:
    def __init__(self, directory: Path, server: ScriptedServer, run: str) -> None:
        self.directory, self.server, self.run = directory, server, run
        lines = [json.dumps({"id": f"r{number}", "word": f"word {number}"}) + "\n" for number in range(ROWS)]
        (directory / "rows.jsonl").write_text("".join(lines))
        stages = "stages:\n  - map: {name: say, task: 'Say {word}'}\n  - map: {name: sum, task: 'Sum {input}'}\n"
        (directory / "stages.yaml").write_text(f"{stages}inputs: rows.jsonl\nmodel: m\n")

    async def __call__(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        return await batch_agent(self.directory, *arguments, stdin=stdin)

    async def begin(self, *arguments: str) -> Outcome:
        return await self(*TASK, "--run-dir", self.run, *arguments)

    @property
    def asked(self) -> int:
        return len(self.server.requests)

    @property
    def written(self) -> set[str]:
        lines = (self.directory / "out.jsonl").read_text().splitlines()
        found = [json.loads(line)["job_id"] for line in lines]
        assert len(set(found)) == len(found)
        return set(found)


@pytest.fixture(params=["alone", pytest.param("redis", marks=needs_redis)])
async def bench(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    run = request.getfixturevalue("url") if request.param == "redis" else "run"
    monkeypatch.chdir(tmp_path)
    async with ScriptedServer(lambda asked: Say(asked.text), models=["m"]) as server:
        monkeypatch.setenv(BACKEND_VARIABLE, server.backend_url)
        yield Bench(tmp_path, server, run)


def continuing(outcome: Outcome) -> list[str]:
    """The command that the outcome names, as a shell splits it."""
    line = next(line for line in outcome.stderr.splitlines() if "batch-agent resume" in line)
    return shlex.split(line[line.index("batch-agent") :])[1:]


async def test_without_a_terminal_the_run_stops_after_the_pilot_and_names_the_command_that_goes_on(
    bench: Bench,
) -> None:
    stopped = await bench.begin("--pilot", str(FEW), *PRICES)
    assert stopped.code == PILOT
    assert bench.written == ids(FEW)
    assert bench.asked == FEW
    assert "A row that is dearer or slower than those seen here is not in these numbers" in stopped.stderr
    assert "cannot show" in stopped.stderr
    went_on = await bench(*continuing(stopped))
    assert went_on.code == ALL_OK, went_on.stderr
    assert len(bench.written) == ROWS
    assert bench.asked == ROWS


async def test_the_same_pilot_never_stops_twice_and_a_larger_one_does(bench: Bench) -> None:
    assert (await bench.begin("--pilot", str(FEW))).code == PILOT
    larger = await bench("resume", bench.run, "--pilot", str(MORE))
    assert larger.code == PILOT
    assert bench.written == ids(MORE) > ids(FEW)
    assert bench.asked == MORE
    assert (await bench("resume", bench.run, "--pilot", str(FEW))).code == ALL_OK
    assert bench.asked == ROWS


async def test_yes_goes_on_and_another_key_is_another_sample(bench: Bench) -> None:
    assert (await bench.begin("--pilot", str(FEW), "--set", "pilot_key=other")).code == PILOT
    assert bench.written == ids(FEW, "other") != ids(FEW)
    went_on = await bench("resume", bench.run, "--yes")
    assert went_on.code == ALL_OK
    assert bench.asked == ROWS


async def test_yes_shows_what_the_pilot_says_and_does_not_stop(bench: Bench) -> None:
    outcome = await bench.begin("--pilot", str(FEW), "--yes")
    assert outcome.code == ALL_OK
    assert "a random sample" in outcome.stderr
    assert bench.asked == len(bench.written) == ROWS


async def test_a_pilot_of_all_rows_does_not_stop(bench: Bench) -> None:
    assert (await bench.begin("--pilot", str(ROWS))).code == ALL_OK
    assert bench.asked == ROWS


@pytest.mark.parametrize("bench", ["alone"], indirect=True)
async def test_the_summary_as_json_has_cost_and_time_with_intervals_and_the_command(bench: Bench) -> None:
    limits = ("--max-tokens", "20", "--json")
    code, text, _ = await bench.begin("--pilot", str(MORE), *PRICES, *limits)
    pilot = json.loads(text)["pilot"]
    assert (code, pilot["rows"], pilot["of"], pilot["done"], pilot["stopped"]) == (PILOT, MORE, ROWS, MORE, True)
    low, high = pilot["cost"]["interval"]
    assert low <= pilot["cost"]["estimate"] <= high <= pilot["most_cost"]
    assert 0 < pilot["unseen"] < 1
    code, text, _ = await bench(*shlex.split(pilot["continue"])[1:], "--json")
    assert code == ALL_OK
    paid = json.loads(text)["cost"]
    assert low * (ROWS - MORE) / ROWS <= paid <= high


@pytest.mark.parametrize("bench", ["alone"], indirect=True)
async def test_a_run_that_could_not_go_on_is_refused_before_anything_is_sent(bench: Bench) -> None:
    outcome = await bench(*TASK, "--no-run-dir", "--pilot", str(FEW))
    assert (outcome.code, bench.asked) == (RUN_FAILED, 0)
    assert "--no-run-dir" in outcome.stderr and "--yes" in outcome.stderr
    assert (await bench(*TASK, "--no-run-dir", "--pilot", str(FEW), "--yes")).code == ALL_OK


@pytest.mark.parametrize("bench", ["alone"], indirect=True)
async def test_rows_that_cannot_be_counted_are_refused(bench: Bench) -> None:
    lines = (bench.directory / "rows.jsonl").read_bytes()
    outcome = await bench("run", "--task", "Say {word}", "--inputs", "-", "--pilot", "5", stdin=lines)
    assert (outcome.code, bench.asked) == (RUN_FAILED, 0)
    assert "pilot needs inputs that can be counted" in outcome.stderr and "standard input" in outcome.stderr
    for value in ("0", "-1", "1.5", "many"):
        assert (await bench.begin("--pilot", value)).code == RUN_FAILED


async def test_in_a_pipeline_the_rows_of_the_pilot_go_through_all_stages(bench: Bench) -> None:
    arguments = ("--output", "out.jsonl", "--run-dir", bench.run)
    stopped = await bench("run", "stages.yaml", "--pilot", str(FEW), *arguments)
    assert (stopped.code, bench.written, bench.asked) == (PILOT, ids(FEW), 2 * FEW)
    assert (await bench(*continuing(stopped))).code == ALL_OK
    assert (len(bench.written), bench.asked) == (ROWS, 2 * ROWS)


@pytest.mark.parametrize("bench", ["alone"], indirect=True)
@pytest.mark.parametrize(("answer", "code", "asked"), [(b"y\n", ALL_OK, ROWS), (b"\n", PILOT, FEW)])
async def test_on_a_terminal_it_asks(bench: Bench, answer: bytes, code: int, asked: int) -> None:
    controller, terminal = pty.openpty()
    command = ("-m", "batch_agent", *TASK, "--run-dir", "run", "--pilot", str(FEW))
    process = await start(*command, cwd=bench.directory, stdin=terminal, stderr=terminal, env=dict(os.environ))
    os.close(terminal)
    seen = asyncio.get_running_loop().run_in_executor(None, read_until_closed, controller, answer)
    assert await process.wait() == code
    assert b"Continue with the other 52 rows?" in await seen
    assert bench.asked == asked


def read_until_closed(controller: int, answer: bytes) -> bytes:
    """Return what the terminal got. The answer is typed after the question."""
    seen = b""
    try:
        while part := os.read(controller, 65536):
            if b"(y/N)" not in seen and b"(y/N)" in seen + part:
                os.write(controller, answer)
            seen += part
    except OSError:  # the other end is closed
        pass
    os.close(controller)
    return seen


async def test_the_score_at_the_stop_is_one_of_the_pilot_and_a_random_sample_of_the_table(bench: Bench) -> None:
    rows = [{"id": f"r{number}", "word": f"word {number}", "label": f"Say word {number}"} for number in range(ROWS)]
    (bench.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gold = ("--gold", "label", "--json", "--require", "accuracy >= 0.99")
    code, text, stderr = await bench.begin("--pilot", str(FEW), *gold)
    score = json.loads(text)["score"]
    assert code == PILOT, stderr
    assert (score["basis"], score["population"], score["pending"]) == ("random", ROWS, 0)
    assert (score["all"]["rows"], score["all"]["right"]) == (FEW, FEW)
    code, text, _ = await bench("score", bench.run, "--json")
    later = json.loads(text)
    assert (later["basis"], later["population"], later["pending"]) == ("random", ROWS, 0)


@pytest.mark.parametrize("stages", [False, True], ids=["one stage", "pipeline"])
async def test_no_answer_of_the_pilot_is_paid_twice_after_kill_9(bench: Bench, *, stages: bool) -> None:
    answered: list[str] = []
    hangs = True

    def script(request: Request) -> Say | Hang:
        if hangs and len(answered) >= 5:
            return Hang()
        answered.append(request.text)
        return Say(request.text)

    def recorded() -> int:
        with suppress(SpecError, StoreError):
            view = look(bench.run)
            parts = view.stages.values() if stages else [view]
            return sum(part.latest.ok for part in parts)
        return 0

    async with ScriptedServer(script, models=["m"]) as server:
        more = ("--backend", server.backend_url, "--max-inflight", "1", "--pilot", str(FEW), "--lease", "1")
        what = ("run", "stages.yaml", "--output", "out.jsonl") if stages else TASK
        more = more if "redis" in bench.run else more[:-2]
        process = await start("-m", "batch_agent", *what, "--run-dir", bench.run, *more, cwd=bench.directory)
        while server.received < 6 or recorded() < 5:  # the sixth hangs
            await asyncio.sleep(0.02)
        process.kill()
        await process.wait()
        hangs = False
        stopped = await bench("resume", bench.run)
        assert stopped.code == PILOT, stopped.stderr
        each = 2 if stages else 1
        assert (len(answered), len(set(answered))) == (each * FEW, each * FEW)
        assert (await bench(*continuing(stopped))).code == ALL_OK
    assert len(answered) == len(set(answered)) == each * ROWS


@pytest.mark.parametrize("bench", ["alone"], indirect=True)
async def test_another_prompt_in_the_same_directory_is_another_pilot(bench: Bench) -> None:
    assert (await bench.begin("--pilot", str(FEW))).code == PILOT
    again = await bench("resume", "run", "--task", "Tell {word}", "--resend")
    assert (again.code, bench.asked) == (PILOT, 2 * FEW)
    kept = await bench("resume", "run", "--task", "Say {word}", "--keep-answers")
    assert (kept.code, bench.asked) == (ALL_OK, FEW + ROWS), kept.stderr


@pytest.mark.parametrize("bench", ["alone"], indirect=True)
async def test_ctrl_c_at_the_question_ends_the_run_which_can_be_resumed(bench: Bench) -> None:
    controller, terminal = pty.openpty()
    command = ("-m", "batch_agent", *TASK, "--run-dir", "run", "--pilot", str(FEW))
    process = await start(*command, cwd=bench.directory, stdin=terminal, stderr=terminal, env=dict(os.environ))
    os.close(terminal)
    loop, seen = asyncio.get_running_loop(), b""
    while b"(y/N)" not in seen:
        seen += await loop.run_in_executor(None, os.read, controller, 65536)
    process.send_signal(signal.SIGINT)
    reading = loop.run_in_executor(None, read_until_closed, controller, b"")
    assert await asyncio.wait_for(process.wait(), 20) == ROWS_FAILED
    await reading
    assert bench.asked == FEW
    assert (await bench("resume", "run")).code == PILOT
    assert bench.asked == FEW
