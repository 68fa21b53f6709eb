"""Runs with worker processes on this machine: real processes, a real socket, and kill -9."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest
from tests.run.process_work import NOTES, ROOT, WarmCrew, note, note_at_once, notes
from tests.warm import WarmProcess, start

from batch_agent import BatchAgent, BatchSpec, Pipeline, SpecError, Tool
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.agent.prepare import prepare, with_model
from batch_agent.errors import RunRejected
from batch_agent.messages import Usage
from batch_agent.record.reader import look
from batch_agent.run.joined_worker import prepare_worker
from batch_agent.run.recording import facts_for_workers, versions
from batch_agent.run.trust import Trust
from batch_agent.run.worker_processes import STARTS, STEADY_SECONDS, ProcessCrew
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse, virtual_clock

USAGE = Usage(60, completion_tokens=30)
EACH = USAGE.prompt_tokens + USAGE.completion_tokens


@pytest.fixture(autouse=True)
def notes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))


def row_of(request: Request) -> str:
    """The name of the row is the last word of its task."""
    text = next(message["content"] for message in request.messages if message["role"] == "user")
    return str(text).split()[-1]


def echo(request: Request) -> Say:
    return Say(f"said {row_of(request)}", usage=USAGE, latency=0.02)


def options(server: ScriptedServer, rows: int, **others: Any) -> dict[str, Any]:
    plain = {"task": "Do {input}", "inputs": [f"row-{n}" for n in range(rows)], "backend": server.backend_url}
    return {**plain, "model": "m", "progress": False, **others}


def expected(rows: int) -> list[str]:
    return [f"said row-{n}" for n in range(rows)]


def workers_of(parent: int) -> list[int]:
    """The worker processes that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                started_by = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if started_by == parent and b"unix:" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
    return found


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def process(*words: str) -> AsyncIterator[WarmProcess]:
    started = await start(*words, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


def feeder(directory: Path, server: ScriptedServer, rows: int, **others: object) -> tuple[str, ...]:
    """The words of a process that feeds a run; ``others`` are options of the run."""
    return ("-m", "tests.run.test_processes", str(directory), server.backend_url, str(rows), json.dumps(others))


@pytest.mark.parametrize("recorded", [False, True])
async def test_two_processes_do_every_row_once(tmp_path: Path, recorded: bool) -> None:
    run_dir = tmp_path / "run" if recorded else None
    crew = {"processes": 2} if recorded else {"cluster": WarmCrew()}
    async with ScriptedServer(echo, models=["m"]) as server:
        results = await BatchAgent.run(**options(server, 40, run_dir=run_dir, **crew))
    assert [result.output for result in results] == expected(40)
    assert Counter(map(row_of, server.requests)) == Counter(f"row-{n}" for n in range(40))
    assert results.summary.statistics.usage.completion_tokens == 40 * USAGE.completion_tokens
    if run_dir is not None:
        assert (look(run_dir).state, look(run_dir).latest.ok) == ("complete", 40)
        assert len((run_dir / "results.jsonl").read_text().splitlines()) == 40


async def test_two_processes_do_every_stage_of_a_pipeline(tmp_path: Path) -> None:
    async with ScriptedServer(echo, models=["m"]) as server:
        rows = Pipeline([f"row-{n}" for n in range(10)])
        stages = rows.map(name="first", task="Do {input}").map(name="second", task="Check {input}")
        outcome = await stages.run(backend=server.backend_url, model="m", cluster=WarmCrew(), run_dir=tmp_path / "run")
    assert outcome.outputs == expected(10)
    assert server.received == 20


async def test_a_worker_process_that_is_killed_loses_no_row_and_no_write(tmp_path: Path) -> None:
    """One process is killed while its rows wait for their second answer, after their writes."""
    go_on = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("note", {"row": row_of(request)}))
        await go_on.wait()
        return Say(f"said {row_of(request)}")

    crew = WarmCrew()
    async with ScriptedServer(script, models=["m"]) as server:
        given = options(server, 8, cluster=crew, tools=[note], max_turns=3, run_dir=tmp_path / "run", lease=2.0)
        running = asyncio.ensure_future(BatchAgent.run(**given))
        waiting = asyncio.ensure_future(
            server.wait_until(lambda: sum(request.turn > 0 for request in server.requests) >= 8)
        )
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert len(crew.pids) == 2
        os.kill(crew.pids[0], signal.SIGKILL)
        go_on.set()
        results = await running
    assert [result.output for result in results] == expected(8)
    assert Counter(notes()) == Counter(f"row-{n}" for n in range(8))


async def test_a_rolling_restart_makes_every_write_once_and_leaves_no_outcome_unknown(tmp_path: Path) -> None:
    crew = WarmCrew()

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("note_at_once", {"row": row_of(request)}))
        return Say(str(request.messages[-1]["content"]))

    async with ScriptedServer(script, models=["m"]) as server:
        given = options(server, 200, cluster=crew, tools=[note_at_once], run_dir=tmp_path / "run", lease=10)
        running = asyncio.ensure_future(BatchAgent.run(**given))
        for answered in (20, 120, 220):
            await server.wait_requests(answered)
            for pid in crew.pids:
                os.kill(pid, signal.SIGTERM)
            while not running.done() and len(crew.pids) < 2:
                await asyncio.sleep(0.01)
        results = await running
    assert [result.output for result in results] == ["written"] * 200
    assert Counter(notes()) == Counter(f"row-{n}" for n in range(200))


async def test_a_function_that_workers_cannot_import_is_refused_by_name_before_anything_starts(tmp_path: Path) -> None:
    def closure(row: str) -> str:
        """Return the row and the directory."""
        return f"{row} {tmp_path}"

    def main(row: str) -> str:
        """Return the row."""
        return row

    main.__module__, main.__qualname__ = "__main__", "main"
    async with ScriptedServer(echo, models=["m"]) as server:
        refused = ((closure, "closure"), (main, "main is defined in the main script"), (Tool.define(main), "'main'"))
        for tool, why in refused:
            with pytest.raises(SpecError, match=why):
                await BatchAgent.run(**options(server, 1, processes=2, tools=[tool]))
        with pytest.raises(SpecError, match="lambda"):
            await BatchAgent.run(**options(server, 1, processes=2, worker=lambda row, ctx: row))
    assert server.received == 0


async def test_the_budget_is_one_for_all_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedServer(echo, models=["m"]) as server:
        limited = options(server, 60, max_total_tokens=20 * EACH, max_tokens=40, run_dir=tmp_path / "run")
        results = await BatchAgent.run(**limited, cluster=WarmCrew())
        assert results.summary.statistics.ended == "out of budget"
        assert 0 < server.received * EACH <= 20 * EACH
        assert "is started again" not in caplog.text  # a worker may see first that the budget is spent, and leave
        before = server.received
        assert look(tmp_path / "run").latest.tokens <= 20 * EACH
        again = await BatchAgent.run(**{**limited, "max_total_tokens": None, "resume": True}, cluster=WarmCrew())
    assert [result.output for result in again] == expected(60)
    assert server.received == 60 and before < 60


async def test_a_resume_whose_gpu_time_is_spent_delivers_the_record_without_starting_workers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"run_dir": tmp_path, "prices": {"gpu_hour": 3600.0}, "max_inflight": 1, "resume": True}
    async with ScriptedServer(echo, models=["m"]) as server:
        await BatchAgent.run(**options(server, 2, max_cost=1000.0, **given))
        received, spent = server.received, look(tmp_path).latest.cost
        assert spent is not None
        resuming = asyncio.ensure_future(BatchAgent.run(**options(server, 4, max_cost=spent / 2, processes=2, **given)))
        started: set[int] = set()
        while not resuming.done():
            started.update(workers_of(os.getpid()))
            await asyncio.sleep(0.01)
    assert [result.output for result in await resuming] == [*expected(2), None, None]
    assert not started and server.received == received and look(tmp_path).state == "out of budget"


async def test_a_pipeline_whose_gpu_time_is_spent_starts_no_workers_and_sends_nothing(tmp_path: Path) -> None:
    given: dict[str, Any] = {"run_dir": tmp_path, "prices": {"gpu_hour": 3600.0}, "model": "m", "resume": True}

    async def run(server: ScriptedServer, rows: int, **options: Any) -> list[object]:
        stages = Pipeline([f"row-{n}" for n in range(rows)]).map(name="one", task="{input}")
        done = await stages.map(name="two", task="{input}").run(backend=server.url, **given, **options)
        return [result.output for result in done.results["one"]]

    async with ScriptedServer(echo, models=["m"]) as server:
        first = await run(server, 2, max_cost=1000.0)
        received = server.received
        resuming = asyncio.ensure_future(run(server, 4, max_cost=0.001, processes=2))
        started: set[int] = set()
        while not resuming.done():
            started.update(workers_of(os.getpid()))
            await asyncio.sleep(0.01)
    assert await resuming == [*first, None, None]
    assert not started and server.received == received and look(tmp_path).state == "out of budget"


async def test_after_a_kill_of_the_feeder_its_workers_leave_and_only_what_is_not_recorded_is_asked(
    tmp_path: Path,
) -> None:
    """The workers leave at once, not when an answer comes or a lease is renewed: they are told of the feeder's end."""
    run_dir = tmp_path / "run"
    go_on = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.number >= 10:
            await go_on.wait()
        return echo(request)

    async with ScriptedServer(script, models=["m"]) as server:
        async with process(*feeder(run_dir, server, 20, processes=2, max_inflight=4, lease=3600)) as fed:
            await server.wait_requests(14)
            results = run_dir / "results.jsonl"
            while not results.exists() or results.read_text().count("\n") < 10:
                await asyncio.sleep(0.01)
            workers = workers_of(fed.pid)
            fed.kill()
            await fed.wait()
        async with asyncio.timeout(60):
            while any(is_alive(worker) for worker in workers):
                await asyncio.sleep(0.01)
        sent = server.received
        go_on.set()
        again = await BatchAgent.run(**options(server, 20, cluster=WarmCrew(), run_dir=run_dir, resume=True))
    assert [result.output for result in again] == expected(20)
    assert sum(result.resumed for result in again) == 10
    assert server.received == sent + 10


async def test_a_module_of_the_user_may_have_the_name_of_one_of_this_package(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def find(key: str) -> str:\n    return 'found ' + key\n")
    (tmp_path / "rows.txt").write_text("row-0\n")

    def script(request: Request) -> Say:
        return CallTools(ToolUse("find", {"key": "a"})) if request.turn == 0 else Say(request.messages[-1]["content"])

    async with ScriptedServer(script, models=["m"]) as server:
        run = {"task": "Do {input}", "model": "m", "backend": server.backend_url, "tools": ["tools:find"]}
        (tmp_path / "spec.json").write_text(json.dumps({**run, "inputs": "rows.txt", "processes": 1}))
        words = ("-m", "batch_agent", "run", "spec.json", "--no-run-dir", "--output", "out.jsonl")
        out = asyncio.subprocess.PIPE
        started = await start(*words, cwd=tmp_path, stdout=out, stderr=asyncio.subprocess.STDOUT)
        said, _ = await started.communicate()
    assert started.returncode == 0, said.decode()
    assert json.loads((tmp_path / "out.jsonl").read_text())["output"] == "found a"


@pytest.mark.parametrize("limit", [1000, 15])
async def test_a_worker_joins_a_run_that_was_started_alone(tmp_path: Path, limit: int) -> None:
    """The limit is that of both processes, in requests."""
    run_dir = tmp_path / "run"
    joined = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.number >= 4:
            await joined.wait()
        return Say(f"said {row_of(request)}", usage=USAGE, latency=0.05)

    async with ScriptedServer(script, models=["m"]) as server:
        given = options(server, 150, run_dir=run_dir, max_inflight=4, max_tokens=40)
        running = asyncio.ensure_future(BatchAgent.run(**given, max_total_tokens=limit * EACH))
        await server.wait_requests(5)
        async with process("-m", "batch_agent", "work", str(run_dir), "--import-from", str(ROOT)) as worker:
            while not looks_joined(run_dir, worker):
                await asyncio.sleep(0.05)
            assert S_IMODE((run_dir / "workers.sock").stat().st_mode) == 0o600
            joined.set()
            results = await running
            said, _ = await worker.communicate()
    assert worker.returncode == 0, said.decode()
    assert not (run_dir / "workers.sock").exists()
    assert max(Counter(map(row_of, server.requests)).values()) == 1
    if limit < 150:
        assert results.summary.statistics.ended == "out of budget"
        assert 4 < server.received <= limit
        assert server.received * EACH <= look(run_dir).latest.tokens <= limit * EACH
    else:
        assert [result.output for result in results] == expected(150)
        assert (server.received, look(run_dir).latest.tokens) == (150, 150 * EACH)


async def test_a_run_that_only_feeds_says_how_to_start_a_worker_which_does_its_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    async with ScriptedServer(echo, models=["m"]) as server:
        running = asyncio.ensure_future(BatchAgent.run(**options(server, 5, run_dir=run_dir, feed_only=True, lease=1)))
        while "batch-agent work" not in caplog.text:
            await asyncio.sleep(0.05)
        assert f"the run has no worker yet, so its rows wait. Start one: batch-agent work {run_dir}" in caplog.text
        async with process("-m", "batch_agent", "work", str(run_dir), "--import-from", str(ROOT)) as worker:
            results = await running
            said, _ = await worker.communicate()
    assert [result.output for result in results] == expected(5)
    assert b"done; 5 rows done by this worker" in said


def looks_joined(run_dir: Path, worker: asyncio.subprocess.Process) -> bool:
    """Whether the table of shares in the journal has two members."""
    from batch_agent.record.sqlite import TABLE, connect_to_read

    assert worker.returncode is None
    db = connect_to_read(run_dir / "journal.db")
    try:
        found = db.execute("SELECT value FROM fact WHERE name = ?", (TABLE,)).fetchone()
        return found is not None and len(json.loads(found[0])["members"]) > 1
    finally:
        db.close()


async def test_a_worker_cannot_join_a_run_with_a_function_that_only_the_main_script_has(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(request: Request) -> Say:
        await go_on.wait()
        return echo(request)

    async with (
        ScriptedServer(script, models=["m"]) as server,
        process(*feeder(tmp_path / "run", server, 2, own_tool=True)) as fed,
    ):
        await server.wait_requests(1)
        async with process("-m", "batch_agent", "work", str(tmp_path / "run")) as worker:
            said, _ = await worker.communicate()
        go_on.set()
        assert await fed.wait() == 0
    assert worker.returncode == 2
    assert "only_here is defined in the main script" in said.decode() or "'only_here'" in said.decode()
    assert server.received == 2


async def test_the_reason_is_shown_when_every_worker_process_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_once.py").write_text(
        "import os\n"
        'assert os.environ.get("ONLY_ONCE") == "1", "this module is for the first process"\n'
        "def tool(row: str) -> str:\n"
        '    """Return the row."""\n'
        "    return row\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONLY_ONCE", "1")
    import only_once  # type: ignore[import-not-found]

    monkeypatch.delenv("ONLY_ONCE")
    async with ScriptedServer(echo, models=["m"]) as server:
        with pytest.raises(RunRejected, match=r"only_once:tool cannot be imported.*for the first process"):
            await BatchAgent.run(**options(server, 2, cluster=WarmCrew(tmp_path), tools=[only_once.tool]))
    assert server.received == 0


def only_here(row: str) -> str:
    """Return the row."""
    return row


async def feed(directory: str, url: str, rows: str, others: str) -> None:
    given = json.loads(others)
    tools = {"tools": [only_here]} if given.pop("own_tool", False) else {}
    await BatchAgent.run(
        task="Do {input}",
        inputs=[f"row-{n}" for n in range(int(rows))],
        backend=url,
        model="m",
        run_dir=directory,
        **tools,
        **given,
    )


if __name__ == "__main__":
    asyncio.run(feed(*sys.argv[1:]))


@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="the embedded engine is not installed")
def test_a_worker_has_the_embedded_model_that_the_feeder_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_AGENT_BACKEND", raising=False)
    feeders = with_model(prepare(BatchSpec(task="Sum up {input}", inputs=["a"])), "smollm2")
    facts = {"versions": versions(), "fingerprint": fingerprint_of(feeders).hex(), "model": feeders.model}
    assert prepare_worker({**facts, **facts_for_workers(feeders, "a")}, None, Trust()).model == "smollm2"


class MortalCrew(ProcessCrew):
    """A crew whose processes are killed, each after some seconds."""

    def __init__(self, *lives: float) -> None:
        super().__init__(1)
        self.lives = list(lives)

    async def _run_one(self, number: int) -> tuple[int, str]:
        await asyncio.sleep(self.lives.pop(0))
        return -9, ""


class Wanting:
    wants_workers = True

    def serve(self) -> Path:
        return Path("socket")


@virtual_clock
async def test_only_processes_that_end_soon_after_one_another_are_given_up() -> None:
    crew = MortalCrew(*[1.0] * STARTS, *[STEADY_SECONDS] * 20, *[1.0] * STARTS, 3600.0)
    with pytest.raises(RunRejected, match="signal 9"):
        await crew._watch(Wanting())
    assert crew.lives == [3600.0]


def test_processes_are_refused_for_a_record_in_redis() -> None:
    with pytest.raises(SpecError, match="batch-agent work URL"):
        BatchAgent.plan(
            task="{input}", inputs=["a"], backend="simulated://", processes=2, run_dir="redis://host:6379/0/x"
        )
