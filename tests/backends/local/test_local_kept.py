"""The engine stays loaded between runs: in other event loops and threads, for a time, and no longer than it may."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.backends.local.test_local_process import STAND_IN, StandIn, ask, is_alive

from batch_agent.backends.local.backend import EngineOptions, LocalBackend, parse_url
from batch_agent.backends.local.engine import EngineKeeper, LoadedEngine
from batch_agent.errors import Unavailable

LONG = 3600


class Runs(StandIn):
    """Runs, each in an event loop of its own, of one process that keeps its engine."""

    def __init__(self, path: Path, keeper: EngineKeeper, keep: int = LONG) -> None:
        self.path, self._keeper = path, keeper
        self.options = EngineOptions("m", path, threads=1, keep=keep)
        self.backend = LocalBackend(self.options, STAND_IN, keeper)

    def run(self, *texts: str) -> int:
        async def work() -> int:
            async with self.backend as backend:
                for text in texts:
                    assert (await backend.infer(ask(f"say {text}"))).text == text
                assert backend.pid is not None
                return backend.pid

        return asyncio.run(work())

    @property
    def lives(self) -> int:
        return sum(line.startswith("born") for line in self.heard())


@pytest.fixture
def runs(tmp_path: Path):
    keeper = EngineKeeper()
    yield Runs(tmp_path / "m.gguf", keeper)
    keeper.release()


def test_a_second_run_finds_the_engine_of_the_first(runs: Runs) -> None:
    assert runs.run("one", "two") == runs.run("three")
    other = Runs(runs.path, runs._keeper)
    other.run("four")
    assert runs.lives == 1


def test_a_run_in_a_thread_that_ended_leaves_its_engine_too(runs: Runs) -> None:
    thread = threading.Thread(target=runs.run, args=("one",))
    thread.start()
    thread.join()
    runs.run("two")
    assert runs.lives == 1


def test_a_request_that_was_in_flight_when_a_run_ended_does_not_reach_the_next(runs: Runs) -> None:
    async def leave() -> None:
        async with runs.backend as backend, asyncio.timeout(20):
            waiting = asyncio.create_task(backend.infer(ask("hang")))
            await runs.wait_heard(lambda lines: "asked 1 hang" in lines)
        with pytest.raises(Unavailable, match="closed"):
            await waiting

    asyncio.run(leave())
    runs.run("next")
    assert runs.heard()[1:] == ["asked 1 hang", "cancel 1", "asked 2 say next"]


def test_it_can_be_let_go_and_the_next_run_loads_it_again(runs: Runs) -> None:
    pid = runs.run("one")
    assert is_alive(pid)
    assert runs._keeper.release() and not is_alive(pid)
    assert not runs._keeper.release()
    runs.run("two")
    assert runs.lives == 2


def test_it_ends_when_its_time_is_over(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "m.gguf", EngineKeeper(), keep=1)
    pid = runs.run("one")
    gone = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(gone, select.POLLIN)
        assert poll.poll(20_000)
    finally:
        os.close(gone)
    assert not runs._keeper.release()


def test_another_model_takes_its_place(runs: Runs, tmp_path: Path) -> None:
    first = runs.run("one")
    second = Runs(tmp_path / "other.gguf", runs._keeper).run("two")
    assert not is_alive(first) and is_alive(second)


def test_one_that_died_meanwhile_is_started_again(runs: Runs) -> None:
    os.kill(runs.run("one"), 9)
    runs.run("two")
    assert runs.lives == 2


@pytest.mark.parametrize(("keep", "free"), [(0, 10**15), (LONG, 1)])
def test_without_time_or_memory_for_it_the_engine_ends_with_its_run(tmp_path: Path, keep: int, free: int) -> None:
    runs = Runs(tmp_path / "m.gguf", EngineKeeper(lambda: free), keep)
    assert not is_alive(runs.run("one"))


def test_a_file_that_changed_is_loaded_anew(runs: Runs) -> None:
    runs.path.write_text("one")
    runs.run("one")
    runs.path.write_text("two")
    os.utime(runs.path, (1, 1))
    runs.run("two")
    assert runs.lives == 2


def test_the_address_says_for_how_long() -> None:
    assert [parse_url(url).keep for url in ("local://", "local://?keep=0", "local://?keep=60")] == [300, 0, 60]


def test_a_run_cancelled_while_it_takes_the_engine_ends_it_and_closes_its_pipes(tmp_path: Path) -> None:
    class Cancelling(EngineKeeper):
        cancel: Callable[[], object] = staticmethod(lambda: None)

        def take(self, key: str) -> LoadedEngine | None:
            engine = super().take(key)
            self.cancel()
            return engine

    keeper = Cancelling()
    runs = Runs(tmp_path / "m.gguf", keeper)
    pid, before = runs.run("one"), sum(1 for _ in Path("/proc/self/fd").iterdir())

    async def enter_and_be_cancelled() -> None:
        loop, entering = asyncio.get_running_loop(), asyncio.create_task(runs.backend.__aenter__())
        keeper.cancel = lambda: loop.call_soon_threadsafe(entering.cancel)
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(enter_and_be_cancelled())
    assert not is_alive(pid) and not keeper.release()
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) < before
