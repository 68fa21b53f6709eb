"""The server's trouble is not the row's: outages are ridden out, refusals for all stop a run, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, RunRejected
from batch_agent.backends.base import Probe
from batch_agent.cli.main import main
from batch_agent.errors import RunUnreachable, Unavailable
from batch_agent.events import Event, HealthChanged
from batch_agent.job import AgentResult
from batch_agent.observe.statistics import Statistics
from batch_agent.record.reader import look
from batch_agent.testing import CallTools, Cut, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock

Gone = Callable[[], object]


def refuse() -> object:
    raise Unavailable("connection refused", unreached=True)


MODES: dict[str, Gone] = {
    "refusing": refuse,
    "hanging": Hang,
    "500": lambda: Fail(500),
    "503": lambda: Fail(503),
    "429": lambda: Fail(429),
    "reset": Cut,
}


class Server:
    """Answers in ``latency`` seconds, but for a time it is ``gone``. Notes when each request came."""

    def __init__(self, gone: Gone, begins: float, lasts: float, latency: float = 0.1) -> None:
        self.gone, self.begins, self.ends, self.latency = gone, begins, begins + lasts, latency
        self.came: list[float] = []
        self.answers: list[float] = []
        self.backend = ScriptedBackend(self.script)

    def script(self, request: Request) -> Any:
        now = asyncio.get_running_loop().time()
        self.came.append(now)
        if self.begins <= now < self.ends:
            return self.gone()
        self.answers.append(now + self.latency)
        return Say("ok", latency=self.latency)

    @property
    def trials(self) -> list[float]:
        """Requests that came in the outage, after those that found out."""
        return [at for at in self.came if self.begins + 20 <= at < self.ends]


ROWS, SLOTS = 600, 20


async def finish(backend: object, **options: Any) -> tuple[list[AgentResult[str]], Statistics, list[Event]]:
    events: list[Event] = []
    known = {"task": "{input}", "inputs": [str(n) for n in range(ROWS)], "max_inflight": SLOTS} | options
    async with BatchAgent.open(backend=backend, sinks=[events.append], **known) as run:
        results = [result async for result in run.results()]
    return results, run.statistics(), events


@pytest.mark.parametrize(
    ("mode", "lasts"),
    [
        ("503", 5),
        ("hanging", 60),
        ("refusing", 600),
        ("429", 60),
        ("429", 600),
        *(pytest.param(mode, 60, marks=pytest.mark.soak) for mode in MODES if mode != "429"),
    ],
)
def test_a_server_that_goes_away_and_comes_back_costs_no_row(mode: str, lasts: float) -> None:
    @virtual_clock
    async def scenario() -> None:
        server = Server(MODES[mode], begins=2, lasts=lasts)
        results, statistics, _ = await finish(server.backend, inputs=[str(n) for n in range(900)])
        assert (len(results), statistics.ok, statistics.ended) == (900, 900, "complete")
        gaps = [later - earlier for earlier, later in zip(server.trials, server.trials[1:], strict=False)]
        assert all(gap >= 0.35 for gap in gaps)  # one trial a pause
        # Each slot of 0.1 s is ten rows a second: again within five seconds of its return, or within ten if the outage
        # looks like a limit per minute.
        by = server.ends + (10 if (mode, lasts) == ("429", 60) else 5)
        recovered = [at for at in server.answers if by <= at < by + 1]
        assert len(recovered) >= 0.9 * 10 * SLOTS or max(server.answers) < by + 1

    scenario()


@pytest.mark.parametrize("mode", ["500", "reset", "refusing"])
@pytest.mark.parametrize(
    ("max_inflight", "max_retries"), [(1, 0), (2, 3), (8, 0), pytest.param(64, 3, marks=pytest.mark.soak)]
)
def test_answers_to_what_was_asked_before_do_not_make_an_outage_the_rows(
    mode: str, max_inflight: int, max_retries: int
) -> None:
    @virtual_clock
    async def scenario() -> None:
        came = 0

        def script(request: Request) -> Any:
            nonlocal came
            came += 1
            if 3 <= asyncio.get_running_loop().time() < 30:
                return MODES[mode]()
            return Say("ok", latency=0.1 + request.number % 7 / 5)  # so that some are answered when others have failed

        rows = [str(n) for n in range(20 * max_inflight)]
        _, statistics, _ = await finish(
            ScriptedBackend(script), inputs=rows, max_inflight=max_inflight, max_retries=max_retries
        )
        assert (statistics.ok, statistics.ended) == (len(rows), "complete")
        assert came <= len(rows) + 8 * max_inflight + 100

    scenario()


@pytest.mark.parametrize(  # at the end; amid
    ("mode", "rows"), [*((mode, 100) for mode in MODES), pytest.param("reset", 1_000, marks=pytest.mark.soak)]
)
def test_agents_in_the_middle_of_their_turns_ride_an_outage_out(mode: str, rows: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        async def look(n: int) -> str:
            """Looks."""
            await asyncio.sleep(n / 10)
            return "seen"

        def script(request: Request) -> Any:
            if 2 <= asyncio.get_running_loop().time() < 30:
                return MODES[mode]()
            calls = CallTools(ToolUse("look", {"n": request.number % 5}), latency=0.1)
            return Say("ok", latency=0.2) if request.turn == 3 else calls

        _, statistics, events = await finish(
            ScriptedBackend(script), inputs=[str(n) for n in range(rows)], max_inflight=16, tools=[look]
        )
        assert (statistics.ok, statistics.ended) == (rows, "complete")
        assert any(isinstance(event, HealthChanged) for event in events)

    scenario()


@virtual_clock
async def test_a_server_that_asks_for_patience_fails_no_row_without_a_retry() -> None:
    def script(request: Request) -> Any:
        if 3 <= asyncio.get_running_loop().time() < 12:
            return Fail(503, headers={"Retry-After": "4"})
        return Say("ok", latency=0.1)

    for max_inflight in (1, 2, 8):
        rows = [str(n) for n in range(40 * max_inflight)]
        _, statistics, _ = await finish(ScriptedBackend(script), inputs=rows, max_inflight=max_inflight, max_retries=0)
        assert statistics.ok == len(rows)


@virtual_clock
async def test_outages_one_soon_after_the_other_fail_nobody() -> None:
    def script(request: Request) -> Any:
        now = asyncio.get_running_loop().time()
        works = now < 2 or 8 <= now < 9 or 15 <= now < 16 or now >= 600
        return Say("ok", latency=0.3) if works else Fail(500)

    _, statistics, _ = await finish(ScriptedBackend(script))
    assert (statistics.ok, statistics.ended) == (ROWS, "complete")


@pytest.mark.parametrize("mode", ["500", "hanging", "refusing"])
@pytest.mark.parametrize("seconds", [5, 60])
def test_a_server_that_comes_back_slow_is_found_to_be_back(mode: str, seconds: float) -> None:
    @virtual_clock
    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def script(request: Request) -> Any:
            if 1 <= loop.time() < 30:
                return MODES[mode]()
            return Say("ok", latency=0.1 if loop.time() < 1 else seconds)

        _, statistics, _ = await finish(ScriptedBackend(script), inputs=[str(n) for n in range(300)])
        assert (statistics.ok, statistics.ended) == (300, "complete")
        assert loop.time() < 60 + 15 * seconds

    scenario()


@virtual_clock
async def test_rows_that_fail_each_time_do_not_hide_that_the_server_answers_others() -> None:
    def script(request: Request) -> Any:
        return Fail(500, latency=1) if int(request.text) % 2 else Say("ok", latency=1)

    _, statistics, _ = await finish(ScriptedBackend(script), inputs=[str(n) for n in range(200)])
    assert statistics.ok == 100


@pytest.mark.parametrize("asked", [2_000, 7_200])
def test_a_server_that_asks_for_too_much_patience_is_unreachable_and_fails_nobody(asked: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        no = Fail(429, headers={"Retry-After": str(asked)})
        _, statistics, _ = await finish(ScriptedBackend(lambda _: Say("ok", latency=0.1) if loop.time() < 2 else no))
        assert (statistics.ended, statistics.failures.keys() - {"Interrupted"}) == ("unreachable", set())
        assert loop.time() < 1_000

    scenario()


@pytest.mark.parametrize("given", [{"max_outage": 60}, {"max_wall_time": 60}])
def test_a_run_that_is_over_does_not_wait_for_requests_that_hang(given: dict[str, Any]) -> None:
    @virtual_clock
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        backend = ScriptedBackend(lambda _: Say("ok", latency=0.1) if loop.time() < 2 else Hang())
        _, statistics, _ = await finish(backend, timeout_per_turn=None, **given)
        assert statistics.ended in ("unreachable", "out of budget")
        assert set(statistics.failures) <= {"Interrupted"}
        assert loop.time() < 90

    scenario()


@virtual_clock
async def test_rows_without_a_retry_left_are_not_failed_by_an_outage() -> None:
    server = Server(MODES["reset"], begins=1, lasts=30)
    _, statistics, _ = await finish(server.backend, max_retries=0)
    assert (statistics.ok, statistics.failed) == (ROWS, 0)


@virtual_clock
async def test_an_outage_is_told_as_it_begins_is_tried_and_ends() -> None:
    server = Server(refuse, begins=1, lasts=10)
    _, _, events = await finish(server.backend)
    health = [event for event in events if isinstance(event, HealthChanged)]
    assert [event.state for event in health[:3]] == ["down", "on trial", "down"]
    assert health[0].reason == "connection refused"
    assert health[0].since <= health[0].at < health[0].next_trial
    assert (health[-1].state, health[-1].since, health[-1].next_trial) == ("healthy", 0.0, 0.0)


@virtual_clock
async def test_pauses_between_trials_grow_and_stay_below_half_a_minute() -> None:
    server = Server(refuse, begins=1, lasts=10_000)
    _, statistics, _ = await finish(server.backend, max_outage=None)
    assert statistics.ok == ROWS
    gaps = [later - earlier for earlier, later in zip(server.trials, server.trials[1:], strict=False)]
    assert gaps[0] < 1
    assert 20 < max(gaps) <= 30.001


@virtual_clock
async def test_after_max_outage_the_run_is_unreachable_and_nothing_is_failed(tmp_path: Path) -> None:
    server = Server(refuse, begins=1, lasts=1_000)
    results, statistics, _ = await finish(server.backend, max_outage=50, run_dir=tmp_path)
    assert statistics.ended == "unreachable"
    assert "max_outage, 50 s" in statistics.reason and "connection refused" in statistics.reason
    assert all(result.ok for result in results)
    view = look(tmp_path)
    assert (view.state, view.latest.failed) == ("unreachable", 0)
    done = statistics.ok
    assert 0 < done < ROWS

    asked = len(server.came)
    server.ends = 0
    results, statistics, _ = await finish(server.backend, run_dir=tmp_path, resume=True)
    assert (statistics.ok, statistics.ended, statistics.resumed) == (ROWS, "complete", done)
    assert len(server.came) - asked == ROWS - done


@pytest.mark.parametrize("given", [{}, {"max_outage": 3}, {"model": None}])
def test_a_server_that_never_answered_is_given_up_soon_and_the_error_says_what_was_tried(given: dict[str, Any]) -> None:
    class Dead(ScriptedBackend):
        async def models(self) -> list[str]:
            refuse()
            return []

        async def probe(self, endpoint: str = "") -> Probe:
            return Probe("down", "connection refused")

    @virtual_clock
    async def scenario() -> float:
        with pytest.raises(RunUnreachable, match=r"never answered.*connection refused"):
            await finish(Dead(lambda _: refuse()), **{"model": "m", **given})  # type: ignore[arg-type]
        return asyncio.get_running_loop().time()

    assert scenario() < 40


@pytest.mark.parametrize("bad", ["0", str(ROWS - 1)])
def test_a_row_that_brings_the_server_down_each_time_fails_by_itself(bad: str) -> None:
    back_at = 0.0

    def script(request: Request) -> Any:
        nonlocal back_at
        now = asyncio.get_running_loop().time()
        if now < back_at:
            refuse()
        if request.text == bad:
            back_at = now + 5
        return Cut(latency=0.05) if request.text == bad else Say("ok", latency=0.1)

    class Crashing(ScriptedBackend):
        """Whatever is in flight when the server dies, dies with it."""

        async def infer(self, request: Any, on_tool_call: Any = None) -> Any:
            sent = asyncio.get_running_loop().time()
            reply = await super().infer(request, on_tool_call)
            if sent < back_at - 5 and asyncio.get_running_loop().time() >= back_at - 5:
                raise Unavailable("connection reset")
            return reply

    @virtual_clock
    async def scenario() -> None:
        results, statistics, _ = await finish(Crashing(script))
        assert statistics.ok == ROWS - 1
        [failed] = [result for result in results if not result.ok]
        assert (failed.input, failed.error and failed.error.type) == (bad, "Unavailable")

    scenario()


@virtual_clock
async def test_one_refusal_for_load_costs_little_and_the_limit_comes_back() -> None:
    async def wall(script: Any) -> float:
        began = asyncio.get_running_loop().time()
        await finish(ScriptedBackend(script), inputs=[str(n) for n in range(1_250)], max_inflight=32)
        return asyncio.get_running_loop().time() - began

    undisturbed = await wall(lambda _: Say("ok", latency=1))
    disturbed = await wall(lambda request: Fail(429) if request.number == 312 else Say("ok", latency=1))
    assert disturbed <= 1.1 * undisturbed


# Refusals


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_for_all_in_the_middle_of_a_run_stops_it_and_nothing_is_lost(status: int, tmp_path: Path) -> None:
    @virtual_clock
    async def scenario() -> None:
        revoked = True

        def script(request: Request) -> Any:
            return Fail(status, latency=0.1) if revoked and request.number >= 300 else Say("ok", latency=0.1)

        backend = ScriptedBackend(script)
        results, statistics, _ = await finish(backend, run_dir=tmp_path)
        assert (statistics.ok, statistics.ended) == (300, "failed")
        assert str(status) in statistics.reason
        assert len(backend.requests) <= 300 + 5 * SLOTS  # those in flight, trials and control requests
        assert all(result.ok for result in results)
        assert look(tmp_path).latest.failed == 0

        revoked = False
        _, statistics, _ = await finish(backend, run_dir=tmp_path, resume=True)
        assert (statistics.ok, statistics.ended, statistics.resumed) == (ROWS, "complete", 300)

    scenario()


@virtual_clock
async def test_the_same_refusal_of_many_rows_stops_the_run_and_different_ones_do_not() -> None:
    backend = ScriptedBackend(lambda _: Fail(400, latency=0.1))
    with pytest.raises(RunRejected, match="400"):
        await finish(backend)
    assert len(backend.requests) <= 2 * SLOTS

    def own(request: Request) -> Any:
        return Fail(400, f"row of {'x' * (int(request.text) % 7)}", latency=0.1)

    _, statistics, _ = await finish(ScriptedBackend(own), inputs=[str(n) for n in range(100)])
    assert (statistics.failures, statistics.ended) == ({"Rejected": 100}, "complete")


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("bad", [0, 1, 99])
def test_a_refusal_of_one_row_is_that_rows_failure_wherever_it_stands(status: int, bad: int, tmp_path: Path) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Any:
            return Fail(status) if request.text == str(bad) else Say("ok", latency=0.1)

        rows = [str(n) for n in range(100)]
        results, statistics, _ = await finish(ScriptedBackend(script), inputs=rows, run_dir=tmp_path)
        assert (statistics.ok, statistics.failures, statistics.ended) == (99, {"Rejected": 1}, "complete")

        # Only the bad row is asked again, and it is still its own fault.
        results, statistics, _ = await finish(ScriptedBackend(script), inputs=rows, run_dir=tmp_path, resume=True)
        assert (statistics.ok, statistics.failures, statistics.ended) == (99, {"Rejected": 1}, "complete")
        assert len(results) == 100

    scenario()


@pytest.mark.parametrize("max_inflight", [1, 8, 64])
def test_many_rows_that_are_forbidden_among_good_ones_are_their_own_failures(max_inflight: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        # A moderator answers at once, the model does not, and now and then it has to refuse three in a row.
        bad = {str(n) for n in range(ROWS) if n % 30 in (3, 4, 5)}

        def script(request: Request) -> Any:
            return Fail(403) if request.text in bad else Say("ok", latency=1)

        _, statistics, _ = await finish(ScriptedBackend(script), max_inflight=max_inflight)
        assert (statistics.failures, statistics.ended) == ({"Rejected": len(bad)}, "complete")

    scenario()


async def test_a_run_whose_server_is_down_says_so_to_those_who_look_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []
    back = False

    def script(request: Request) -> Any:
        if request.number >= 5 and not back:
            refuse()
        return Say("ok")

    async def watch() -> None:
        nonlocal back
        while not (facts := look(tmp_path).facts).get("trouble"):
            await asyncio.sleep(0.05)
        seen.append(facts["trouble"])
        assert await asyncio.to_thread(main, ["status", str(tmp_path)]) == 0
        back = True

    async with BatchAgent.open(
        task="{input}", inputs=list("abcdefghij"), backend=ScriptedBackend(script), run_dir=tmp_path, max_inflight=2
    ) as run:
        while not (tmp_path / "run.json").exists():
            await asyncio.sleep(0.01)
        watching = asyncio.create_task(watch())
        assert len([result async for result in run.results()]) == 10
        await watching
    assert seen == ["connection refused"]
    assert "blocked  for 0:0" in capsys.readouterr().out
    assert look(tmp_path).facts["trouble"] is None
