"""The run directory when things go wrong around it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, Pipeline
from batch_agent.errors import SpecError, StoreError
from batch_agent.messages import Usage
from batch_agent.record.commits import OVERDUE
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.lock import Lock, is_locked
from batch_agent.record.reader import look
from batch_agent.record.rundir import JOURNAL, LOCK, RunDir, _overwrite, read_run
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.record.store import Resuming, Store
from batch_agent.run.recording import open_to_feed
from batch_agent.spec import BatchSpec
from batch_agent.testing import Fail, Request, Say, ScriptedBackend


async def run(directory: Path, count: int = 5, script: Any = None) -> tuple[int, ScriptedBackend]:
    backend = ScriptedBackend(script or (lambda request: Say(request.text)))
    inputs = [f"row {n}" for n in range(count)]
    done = 0
    async for result in BatchAgent.stream(
        task="{input}", inputs=inputs, backend=backend, run_dir=directory, resume=True, max_inflight=4
    ):
        assert result.ok
        done += 1
    return done, backend


def test_a_lock_is_held_by_one_and_free_when_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    lock = Lock(path)
    assert is_locked(path)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        Lock(path)
    lock.release()
    assert not is_locked(path)
    Lock(path).release()


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path) -> None:
    code = "import sys; from batch_agent.record.lock import *; Lock(Path(sys.argv[1])); print(0, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"0\n"
        assert is_locked(tmp_path / LOCK)
        with pytest.raises(StoreError, match=f"process {process.pid} on "):
            RunDir.open(tmp_path, resume=True)
        process.send_signal(signal.SIGKILL)
    assert not is_locked(tmp_path / LOCK)


async def test_a_run_that_was_killed_is_seen_as_interrupted(tmp_path: Path) -> None:
    await run(tmp_path)
    facts = read_run(tmp_path)
    directory = RunDir.open(tmp_path, resume=True)
    directory.write_run({**facts, "state": "running"})
    assert look(tmp_path).state == "running"
    directory.close()  # as a kill does: nothing is said
    assert look(tmp_path).state == "interrupted"


def test_looking_for_a_lock_hinders_nobody_who_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    Lock(path).release()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_locked(path)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(200):
            Lock(path).release()
    finally:
        over.set()
        for thread in looking:
            thread.join()
    assert is_locked(path) is False


def test_two_who_look_see_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    Lock(path).release()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert is_locked(path) is False


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_lock_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(0o000)
    assert is_locked(path) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
async def test_a_finished_run_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    await run(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert look(tmp_path).latest.ok == 5
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("resume", [True, False])
async def test_a_run_killed_before_anything_was_recorded_begins(tmp_path: Path, resume: bool) -> None:
    SqliteJournal.open(tmp_path / "journal.db").close()
    Lock(tmp_path / "lock").release()
    [result] = await BatchAgent.run(
        task="{input}", inputs=["a"], backend=ScriptedBackend(), run_dir=tmp_path, resume=resume
    )
    assert result.ok


async def test_a_run_killed_before_its_journal_was_made_begins(tmp_path: Path) -> None:
    (tmp_path / "journal.db").touch()
    assert (await run(tmp_path))[0] == 5


async def test_a_run_without_its_run_file_is_found_by_its_journal(tmp_path: Path) -> None:
    await run(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(SpecError, match=r"journal\.db is there: batch-agent run SPEC --run-dir .* --resume"):
        look(tmp_path)
    with pytest.raises(SpecError, match="holds a run already"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(), run_dir=tmp_path)
    assert len((await run(tmp_path))[1].requests) == 0


async def test_a_run_without_its_journal_is_begun_again_with_a_warning_and_its_lines_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await run(tmp_path)
    (tmp_path / "journal.db").unlink()
    assert look(tmp_path).sessions == 0
    with pytest.raises(SpecError):
        await run(tmp_path, 5, lambda _: Fail(401))
    assert "journal of" in caplog.text and "is missing" in caplog.text
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5


async def test_a_journal_that_lost_its_content_is_refused_until_it_is_moved_away(tmp_path: Path) -> None:
    await run(tmp_path)
    (tmp_path / "journal.db").write_bytes(b"")
    with pytest.raises(StoreError, match=r"damaged: it is empty.*move journal\.db"):
        await run(tmp_path)
    (tmp_path / "journal.db").unlink()
    assert (await run(tmp_path))[0] == 5


async def test_a_corrupt_journal_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    await run(tmp_path, 200)
    path = tmp_path / "journal.db"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xaa" * (len(content) - 4096)
    path.write_bytes(content)
    results = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(StoreError, match="damaged"):
        await run(tmp_path, 200)
    assert path.read_bytes() == content
    assert (tmp_path / "results.jsonl").read_bytes() == results


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """As a full disk: writing beyond it fails. Python ignores SIGXFSZ, so the error is one of writing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_stops_the_run_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    delivered = 0

    def count(_: object) -> None:
        nonlocal delivered
        delivered += 1

    backend = ScriptedBackend(lambda request: Say("x" * 2000))
    with files_limited_to(200_000), pytest.raises(StoreError, match=r"cannot be recorded|cannot write"):
        await BatchAgent.run(
            task="{input}",
            inputs=map(str, range(10_000)),
            backend=backend,
            run_dir=tmp_path,
            max_inflight=8,
            on_result=count,
        )
    assert 0 < delivered < 200
    view = look(tmp_path)
    assert view.state == "failed"
    assert "cannot" in str(view.facts["why"])
    assert delivered <= view.facts["rows"]["ok"] <= len((tmp_path / "results.jsonl").read_text().splitlines())
    assert not list(tmp_path.glob("*.new"))
    backend = ScriptedBackend(lambda request: Say("x" * 2000))
    results = await BatchAgent.run(
        task="{input}", inputs=map(str, range(300)), backend=backend, run_dir=tmp_path, resume=True
    )
    assert all(result.ok for result in results)
    assert len(backend.requests) <= 300 - delivered


def test_a_full_disk_still_has_room_for_what_the_run_file_says(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"{}" + b" " * 100)
    assert _overwrite(path, b'{"state": "failed"}\n')
    assert path.read_bytes() == b'{"state": "failed"}\n'
    assert not _overwrite(path, b"x" * 1_000_000)
    assert path.read_bytes() == b'{"state": "failed"}\n'


async def test_a_directory_that_cannot_be_written_is_an_error_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = ScriptedBackend()
    with pytest.raises(StoreError, match="cannot be used"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, run_dir=tmp_path / "file" / "run")
    assert backend.requests == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
async def test_a_read_only_directory_is_an_error_before_anything_is_sent(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    backend = ScriptedBackend()
    try:
        with pytest.raises(StoreError, match="cannot be used: Permission denied"):
            await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, run_dir=tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert backend.requests == []


async def test_the_directory_is_free_as_soon_as_a_run_was_left(tmp_path: Path) -> None:
    for _ in range(3):
        async with BatchAgent.open(
            task="{input}", inputs=["a"], backend=ScriptedBackend(), run_dir=tmp_path, resume=True
        ) as left:
            left.cancel()
        assert not is_locked(tmp_path / LOCK)


async def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path) -> None:
    await run(tmp_path)
    facts = read_run(tmp_path)
    directory = RunDir.open(tmp_path, resume=True)
    directory.write_run({**facts, "started": "2999-01-01T00:00:00+00:00", "ended": "2999-01-02T00:00:00+00:00"})
    directory.close()
    done, backend = await run(tmp_path, 6)
    assert (done, len(backend.requests)) == (6, 1)


def test_no_run_and_a_damaged_run_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        read_run(tmp_path)


async def test_an_output_that_cannot_be_written_as_json_does_not_stop_the_run(tmp_path: Path) -> None:
    from pydantic import BaseModel, field_serializer

    class Stubborn(BaseModel):
        word: str

        @field_serializer("word")
        def refuse(self, word: str) -> str:
            raise RuntimeError("not today")

    for _ in range(2):
        [result] = await BatchAgent.run(
            task="{input}",
            inputs=["a"],
            output_schema=Stubborn,
            backend=ScriptedBackend(lambda _: Say('{"word": "w"}')),
            run_dir=tmp_path,
            resume=True,
        )
        assert result.ok and result.output is not None and result.output.word == "w"
    [failure] = map(json.loads, (tmp_path / "failures.jsonl").read_text().splitlines())
    assert (failure["type"], failure["raw_text"]) == ("Invalid", '{"word": "w"}')
    assert "not today" in failure["message"]
    assert (tmp_path / "results.jsonl").read_text() == ""


async def test_two_runs_in_one_process_share_nothing(tmp_path: Path) -> None:
    (one, _), (two, _) = await asyncio.gather(run(tmp_path / "one"), run(tmp_path / "two", 7))
    assert (one, two) == (5, 7)


async def test_a_run_cancelled_while_its_directory_is_opened_lets_go_of_it(tmp_path: Path) -> None:
    for turns in range(6):
        spec = BatchSpec(task="{input}", inputs=[], run_dir=tmp_path, resume=True)
        opening = asyncio.ensure_future(
            open_to_feed(spec, Resuming(resume=True), lambda _: DirectoryStore(tmp_path), None, "")
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        [outcome] = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(outcome, Store):
            await outcome.close()
        assert not is_locked(tmp_path / LOCK)


async def test_another_process_that_keeps_the_journal_to_itself_costs_nothing_but_time(tmp_path: Path) -> None:
    """While a commit waits, no request is sent."""
    backend = ScriptedBackend(lambda request: Say(request.text, latency=0.1))
    options: dict[str, Any] = {"task": "{input}", "inputs": map(str, range(120)), "backend": backend, "model": "m"}
    async with BatchAgent.open(**options, run_dir=tmp_path, max_inflight=4) as run:
        results = run.results()
        first = [await anext(results) for _ in range(10)]
        other = sqlite3.connect(tmp_path / JOURNAL, isolation_level=None, timeout=30)
        other.execute("BEGIN EXCLUSIVE")
        await asyncio.sleep(OVERDUE + 0.5)
        sent = len(backend.requests)
        assert sent < 120
        await asyncio.sleep(4)  # longer than SQLite waits by itself
        assert len(backend.requests) == sent
        other.execute("ROLLBACK")
        other.close()
        rest = [result async for result in results]
    assert sorted(int(result.output) for result in first + rest) == list(range(120))
    assert (len(backend.requests), run.statistics().ended) == (120, "complete")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_was_forked_off_does_not_keep_the_lock_of_one_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from batch_agent.record.lock import *\n"
        "lock = Lock(Path(sys.argv[1])); child = os.fork()\n"
        "os.write(1, b'%d\\n' % child)\n"  # both do, each in one write: the child has let go of the lock then
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / LOCK)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = max(int(process.stdout.readline()) for _ in range(2))
        try:
            assert is_locked(tmp_path / LOCK)
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives
            assert is_locked(tmp_path / LOCK) is False
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_run_directory_that_was_deleted_is_not_said_to_be_kept(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def script(request: Request) -> Say:
        while request.text == "5" and directory.exists():  # the journal may create a file meanwhile
            shutil.rmtree(directory, ignore_errors=True)
        return Say("ok")

    with pytest.raises(StoreError, match="is gone") as raised:
        await BatchAgent.run(
            task="{input}",
            inputs=map(str, range(50)),
            backend=ScriptedBackend(script),
            run_dir=directory,
            max_inflight=1,
        )
    assert "is kept" not in str(raised.value)


async def test_a_reader_that_opens_the_top_of_a_pipeline_sees_its_stages(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda request: Say("ok", usage=Usage(10, completion_tokens=5)))
    stages = (
        Pipeline(["a", "b"]).map(name="lock", task="1 {input}").map(name="rates", task="2 {input}").reduce("Sum up")
    )
    await stages.run(backend=backend, model="m", run_dir=tmp_path, rpm=1000)
    view = look(tmp_path)
    seen = {name: (stage.state, stage.latest.ok, stage.latest.tokens) for name, stage in view.stages.items()}
    assert seen == {"lock": ("complete", 2, 30), "rates": ("complete", 2, 30), "reduce": ("complete", 1, 15)}
    assert (view.state, view.latest.tokens) == ("complete", 75)
