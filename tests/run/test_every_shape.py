"""Each feature in each shape of a run. The marker ``covers`` names the feature and the shapes in which a test runs; the
table in docs/cluster.md is made of it (``docs/tables.py``)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # the stand-ins of command-line agents
sys.path.insert(0, str(Path(__file__).parents[1] / "observe"))
from tests.observe.collector import collecting
from tests.record.redis_servers import SERVER
from tests.runtimes.agents import runtime

from batch_agent import BatchAgent, Pipeline, Tool
from batch_agent.cli.main import main
from batch_agent.errors import BatchAgentError
from batch_agent.job import AgentResult
from batch_agent.messages import Usage
from batch_agent.observe.numbers import of_record
from batch_agent.record.reader import look, open_run
from batch_agent.record.store_server import open_served
from batch_agent.run.joined_worker import JoinedWorker, NoRunCame, work
from batch_agent.run.run import Run
from batch_agent.run.trust import Trust
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedServer, ToolUse
from batch_agent.view.runs import ShownRun

HERE = Path(__file__).parent
EACH = 90  # tokens of a request
STAGED = ("pipeline", "reduction")


class CrewHere:
    """A worker that is in this process, and reaches the record through its socket as another process does."""

    @asynccontextmanager
    async def at_work(self, run: Run[object]) -> AsyncIterator[None]:
        store = open_served(run.serve())
        worker = JoinedWorker(store, Trust(everything=True), import_from=HERE)
        working = asyncio.create_task(worker.work())
        try:
            yield
        except BaseException:
            worker.cancel()  # as SIGTERM does in a process of its own
            raise
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await asyncio.wait([working])
            working.cancel()
            await asyncio.wait([working])
            store.close()


@Tool.define(cacheable=True)
def look_up(key: str) -> str:
    """Look a key up."""
    return f"value of {key}"


async def ask(row: str, ctx: Any) -> str:
    """A worker of the user's."""
    return str((await ctx.ask(f"Do {row}")).text)


async def loop(row: str, ctx: Any) -> str:
    """A worker of the user's whose model may call tools."""
    return str(await ctx.loop(f"Do {row}"))


@dataclass
class Scene:
    """A run of one shape, and its server. Rows are named ``row-0`` and so on; ``held`` is asked before each answer."""

    shape: str
    place: str
    folder: Path
    server: ScriptedServer = field(init=False)
    answer: Callable[[str, Request], Say | Fail] = lambda row, request: Say(
        f"said {row}", usage=Usage(60, completion_tokens=30)
    )
    held: set[str] = field(default_factory=set)  # rows whose answers wait for ``go``
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def script(self, request: Request) -> Say | Fail:
        row = row_of(request)
        if row in self.held:
            await self.go.wait()
        return self.answer(row, request)

    @property
    def asked(self) -> Counter[str]:
        """How often each row was asked for, in its first stage."""
        return Counter(row_of(request) for request in self.server.requests if "Do " in str(request.messages))

    def name(self, row: int) -> str:
        """What the row is called from outside."""
        return f"work/{row}" if self.shape in STAGED else str(row)

    async def run(
        self, rows: int, task: str = "Do {input}", tools: Sequence[Any] = (), **others: Any
    ) -> list[AgentResult[Any]]:
        inputs = [f"row-{row}" for row in range(rows)]
        options: dict[str, Any] = {"backend": self.server.backend_url, "model": "m", "run_dir": self.place, **others}
        if self.shape in STAGED:
            longest = {"max_tokens": options.pop("max_tokens", None)}
            pipeline = Pipeline(inputs).map(name="work", task=task, tools=tools, **longest)
            if self.shape == "pipeline":
                pipeline = pipeline.map(name="check", task="Check {input}", **longest)
            else:
                pipeline = pipeline.reduce("Sum up {n} answers", tree=4, **longest)
            return list((await pipeline.run(**options)).results["work"])
        options |= {"task": task, "inputs": inputs, "tools": tools, "progress": False}
        if self.shape == "Redis":
            running = asyncio.ensure_future(BatchAgent.run(**options, feed_only=True))
            try:
                await self._join(running)
            except BaseException:  # the run would wait for a worker for ever
                running.cancel()
                await asyncio.wait([running])  # else the next worker may join it
                raise
            return list(await running)
        if self.shape == "processes":
            options["cluster"] = CrewHere()
        elif self.shape == "Ray":
            from batch_agent.ray import Ray

            options["cluster"] = Ray("auto", workers=1, worker_cpus=0.5)
        elif self.shape == "worker=":
            options.setdefault("worker", ask)
        elif self.shape == "runtime":
            options["runtime"] = runtime("opencode", self.folder)
        return list(await BatchAgent.run(**options))

    async def _join(self, running: asyncio.Future[Any]) -> None:
        while not running.done():  # a worker leaves the run before this one at once
            with suppress(NoRunCame):
                await work(self.place, import_from=HERE, wait=0.2, allow=["*", "vllm://*"])
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def running(self, rows: int, **others: Any) -> AsyncIterator[asyncio.Task[list[AgentResult[Any]]]]:
        """The run at work, when each of its rows has been asked for."""
        task = asyncio.create_task(self.run(rows, **others))
        waiting = asyncio.create_task(self.server.wait_until(lambda: len(self.asked) >= rows))
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        try:
            yield task
        finally:
            self.go.set()
            task.cancel()
            await asyncio.wait([task, waiting])

    async def steer(self, **request: Any) -> dict[str, Any]:
        with open_run(self.place) as reader:
            return dict(await reader.steer(request))


def row_of(request: Request) -> str:
    text = str(request.messages)
    return next((word.strip("'\"}],.") for word in text.split() if word.startswith("row-")), "")


@pytest.fixture(scope="module")
def ray_node() -> Iterator[None]:
    if not os.environ.get("BATCH_AGENT_TEST_CLUSTER"):
        pytest.skip("make test-cluster runs it on a real Ray")
    import ray

    ray.init(num_cpus=2, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}})
    yield
    ray.shutdown()


@pytest.fixture
async def scene(shape: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    if shape == "Redis" and SERVER is None:
        pytest.skip("needs redis-server and the package redis")
    if shape == "Ray":
        request.getfixturevalue("ray_node")
    place = request.getfixturevalue("url") if shape == "Redis" else str(tmp_path / "run")
    found = Scene(shape, place, tmp_path)
    async with ScriptedServer(found.script, models=["m", "other"]) as found.server:
        yield found
        found.go.set()


@pytest.mark.covers("resume", "local", "processes", "Redis", "pipeline", "reduction", "worker=", "runtime")
async def test_a_resumed_run_asks_only_what_is_not_done(scene: Scene) -> None:
    await scene.run(2)
    again = await scene.run(3, resume=True)
    assert [result.resumed for result in again] == [True, True, False] and all(again)
    assert scene.asked == Counter({"row-0": 1, "row-1": 1, "row-2": 1})


@pytest.mark.covers("retry-failed", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_failed_rows_are_tried_again_or_kept(scene: Scene) -> None:
    scene.answer = lambda row, request: Fail(400) if row == "row-1" else Say(f"said {row}")
    first = await scene.run(2)
    kept = await scene.run(2, resume=True, retry_failed=False)
    asked = scene.asked["row-1"]
    scene.answer = lambda row, request: Say(f"said {row}")
    again = await scene.run(2, resume=True)
    assert [[result.ok for result in results] for results in (first, kept, again)] == [
        [True, False],
        [True, False],
        [True, True],
    ]
    assert scene.asked["row-1"] == asked + 1 and scene.asked["row-0"] == 1


@pytest.mark.covers("force_resume", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_forced_rows_keep_their_answers_under_another_task(scene: Scene) -> None:
    first = await scene.run(2)
    again = await scene.run(2, "Do it well: {input}", force_resume=True)
    assert [result.output for result in again] == [result.output for result in first]
    assert scene.asked == Counter({"row-0": 1, "row-1": 1})


@pytest.mark.covers("votes", "local", "processes", "Redis", "Ray", "pipeline", "reduction")
async def test_the_samples_of_a_row_vote_and_a_resume_asks_none_again(scene: Scene) -> None:
    def answer(row: str, request: Request) -> Say:
        """The first sample of a row differs from the others."""
        same = [each.number for each in scene.server.requests if row and row_of(each) == row]
        return Say("no" if same[:1] == [request.number] else "yes")

    scene.answer = answer
    first = await scene.run(2, samples=3, doubt=True)
    again = await scene.run(2, samples=3, doubt=True, resume=True)
    for results in (first, again):
        assert [result.output for result in results] == ["yes", "yes"]
        votes = [(result.votes or {})["output"] for result in results]
        assert votes == [{"counts": {"no": 1, "yes": 2}, "against": 1}] * 2
        assert [result.doubts for result in results] == [{"output": 1 / 3}] * 2
    assert scene.asked == Counter({"row-0": 3, "row-1": 3})


@pytest.mark.covers("a change that is undone", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=")
@pytest.mark.parametrize("samples", [1, 2])
async def test_a_model_that_is_changed_and_changed_back_is_paid_once(scene: Scene, samples: int) -> None:
    if scene.shape == "worker=" and samples > 1:
        return  # samples are those of the tool loop
    scene.answer = lambda row, request: Say(f"{request.body['model']} says {row}")
    given = {"samples": samples} if samples > 1 else {}
    first = await scene.run(3, **given)
    other = await scene.run(3, model="other", resume=True, on_change="resend", **given)
    assert {result.output for result in other} != {result.output for result in first}
    asked = scene.server.received
    again = await scene.run(3, resume=True, on_change="resend", **given)
    assert [result.output for result in again] == [result.output for result in first]
    assert scene.server.received == asked and all(result.resumed for result in again)


@pytest.mark.covers("a change that is undone", "local", "processes", "Redis", "Ray", "pipeline", "reduction")
@pytest.mark.parametrize("finished", [False, True])
async def test_a_row_with_turns_of_two_models_starts_anew_when_it_is_sent_again(scene: Scene, finished: bool) -> None:
    last = {"m": 2, "other": 4}  # the first turn of each model that is not answered

    def answer(row: str, request: Request) -> Any:
        usage, model = Usage(60, completion_tokens=30), str(request.body["model"])
        if "Do " not in str(request.messages) or request.turn == 5:
            return Say(f"{model} says {row}", usage=usage)
        if request.turn == last.get(model):
            return Hang()
        return CallTools(ToolUse("look_up", {"key": f"{model} {request.turn}"}), usage=usage)

    scene.answer = answer
    options: dict[str, Any] = {"tools": [look_up], "resume": True}
    async with scene.running(1, **options):
        await scene.server.wait_requests(3)
    kept = {"model": "other", "on_change": "keep"}
    if finished:
        last.clear()
        assert (await scene.run(1, **options, **kept))[0].output == "other says row-0"
    else:
        async with scene.running(1, **options, **kept):
            await scene.server.wait_requests(6)
        last.clear()
    before = [str(request.body["model"]) for request in scene.server.requests if "Do " in str(request.messages)]
    assert before == ["m"] * 3 + ["other"] * (4 if finished else 3)
    for on_change in ("resend", None):
        [result] = await scene.run(1, **options, model="other", on_change=on_change)
        assert (result.output, result.error) == ("other says row-0", None)
        assert scene.asked == Counter({"row-0": len(before) + 6}), "the second resume asks nothing"
        assert result.usage.completion_tokens == (12 if finished else 10) * 30, "what was paid before counts"


@pytest.mark.covers("standby", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_a_standby_answers_while_the_server_is_down_and_a_resume_asks_nothing_again(scene: Scene) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = f"vllm://127.0.0.1:{taken.getsockname()[1]}"
    backend = [away, {"url": scene.server.backend_url, "model": "m", "when": "unreachable"}]
    for again in (False, True):
        results = await scene.run(2, backend=backend, model="own", resume=again)
        assert all(results) and [result.answered_by for result in results] == ["m", "m"]
        assert of_record(look(scene.place)).answered_by["m"] >= 2  # in a pipeline those of its later stages too
    assert {str(request.body["model"]) for request in scene.server.requests} == {"m"}
    if scene.shape != "runtime":  # an agent of its own asks for a title
        assert scene.asked == Counter({"row-0": 1, "row-1": 1})


@pytest.mark.covers("budgets", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_a_budget_is_not_exceeded_and_a_resume_goes_on(scene: Scene) -> None:
    limit = 800 if scene.shape == "runtime" else 4 * EACH  # an agent of its own asks for longer answers
    rows = 6 if scene.shape == "runtime" else 12  # each row is a process
    with suppress(BatchAgentError):  # a reduction without its rows fails
        await scene.run(rows, max_total_tokens=limit, max_tokens=30, max_inflight=2)
    assert 0 < scene.server.received * EACH <= limit and len(scene.asked) < rows
    again = await scene.run(rows, resume=True, max_tokens=30, max_inflight=2)
    assert len(again) == rows and all(again)
    assert max(scene.asked.values()) == 1


@pytest.mark.covers("rate limits", "local", "processes", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_no_more_requests_are_sent_than_the_rate_limit_allows(scene: Scene) -> None:
    running = asyncio.create_task(scene.run(6, rpm=3))
    await scene.server.wait_requests(1)
    await asyncio.sleep(1.0)
    assert scene.server.received <= 3
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.covers("response cache", "local", "processes", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_a_repeated_request_is_answered_from_the_cache(scene: Scene) -> None:
    cached = {"cache": str(scene.folder / "cache"), "temperature": 0}
    first = await scene.run(2, **cached)
    asked = scene.server.received
    scene.place += "-again"
    again = await scene.run(2, **cached)
    assert [result.output for result in again] == [result.output for result in first]
    assert scene.server.received == asked


@pytest.mark.covers("retry-row", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_a_running_row_is_started_again(scene: Scene) -> None:
    scene.held.add("row-1")
    async with scene.running(2) as task:
        await scene.steer(do="retry-row", row=scene.name(1))
        await scene.server.wait_until(lambda: scene.asked["row-1"] == 2)
        scene.go.set()
        assert all(await task)


@pytest.mark.covers("control", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_a_run_is_paused_and_goes_on_and_a_row_is_cancelled(scene: Scene) -> None:
    scene.held |= {"row-0", "row-1"}
    async with scene.running(2, max_inflight=2) as task:
        await scene.steer(do="pause")
        while (await scene.steer(do="status"))["status"]["state"] != "paused":
            await asyncio.sleep(0.05)
        await scene.steer(do="resume")
        await scene.steer(do="cancel-row", row=scene.name(1))
        while not (await scene.steer(do="status"))["status"]["rows"]["failed"]:
            await asyncio.sleep(0.05)  # a worker hears of it with its next report
        scene.go.set()
        results = await task
    assert [result.ok for result in results] == [True, False]
    assert results[1].error is not None and results[1].error.type == "Cancelled"


@pytest.mark.covers("events", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_the_file_of_events_has_each_request_of_each_row_once(scene: Scene) -> None:
    path = scene.folder / "events.jsonl"
    scene.answer = lambda row, request: Fail(500) if row == "row-1" and scene.asked[row] == 1 else Say(f"said {row}")
    await scene.run(3, events=path)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    rows: dict[tuple[str, int], list[str]] = {}
    for event in events:
        if "index" in event:
            rows.setdefault((event["run"], event["index"]), []).append(event["event"])
    answered, retried = ["TurnStarted", "TurnFinished"], ["TurnStarted", "TurnFailed", "TurnStarted", "TurnFinished"]
    told = sorted(["JobStarted", *turns, "JobFinished"] for turns in (retried, *[answered] * (len(rows) - 1)))
    assert len(rows) == scene.server.received - 1 >= 3 and sorted(rows.values()) == told


@pytest.mark.covers("metrics", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_the_numbers_for_prometheus_count_every_row(scene: Scene) -> None:
    scene.held.add("row-1")
    port = free_port()
    address, text = f"http://127.0.0.1:{port}/metrics", ""
    shown = ("row_duration_seconds_count", "turn_duration_seconds_count", 'tokens_total{kind="output"}')
    async with scene.running(2, metrics_port=port) as task:
        while not all(re.search(rf"^batch_agent_{re.escape(name)} [1-9]", text, re.MULTILINE) for name in shown):
            await asyncio.sleep(0.05)
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(address).read().decode())
            assert not task.done()
        scene.go.set()
        await task


@pytest.mark.covers(
    "streamed text in the page", "local", "processes", "Ray", "pipeline", "reduction", "worker=", "runtime"
)
async def test_the_page_shows_the_text_of_a_row_while_it_is_streamed(scene: Scene) -> None:
    words = " ".join(f"word{number}" for number in range(600))
    calls = scene.shape != "runtime"  # its program has tools of its own
    others = {"worker": loop} if scene.shape == "worker=" else {}

    def answer(row: str, request: Request) -> Say:
        first = calls and not request.turn
        return CallTools(ToolUse("look_up", {"key": "a"})) if first else Say(words, chunk_delay=0.02)

    scene.answer = answer
    async with scene.running(1, tools=[look_up] if calls else [], **others) as task:
        await scene.server.wait_requests(1 + calls)
        reader = open_run(scene.place)
        run = ShownRun("run", reader.stage("work") if scene.shape in STAGED else reader)
        said = ""
        try:
            async for talking in run.conversations("0"):
                said = str(talking)
                if "word3" in said:
                    break
        finally:
            await run.close()
        assert "word3" in said and "word599" not in said
        task.cancel()


@pytest.mark.covers("view live", "local", "processes", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_the_page_counts_the_rows_of_a_run_at_work(scene: Scene) -> None:
    scene.held.add("row-1")
    async with scene.running(2) as task:
        run = ShownRun("run", open_run(scene.place))
        try:
            async for now in run.news():
                if now["alive"] and now["status"]["rows"]["ok"] >= 1:  # type: ignore[index, call-overload, operator]
                    break
        finally:
            await run.close()
        scene.go.set()
        assert all(await task)


@pytest.mark.covers("report", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
@pytest.mark.covers("compare", "local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
async def test_a_report_has_the_rows_of_one_run_or_of_two(scene: Scene) -> None:
    await scene.run(2)
    first = scene.place
    scene.place += "-again"
    scene.answer = lambda row, request: Say(f"answered {row}")
    await scene.run(2)
    for places in ((first,), (first, scene.place)):
        page = scene.folder / "report.html"
        command = ["report", *places, "--rows", "all", "-o", str(page)]
        assert await asyncio.to_thread(main, command) == 0
        text = page.read_text()
        assert ("said row-0" in text, "answered row-0" in text) == (True, len(places) == 2)


@pytest.mark.skipif(find_spec("opentelemetry.sdk") is None, reason="needs the extra otel")
@pytest.mark.covers("traces", "processes", "Redis", "Ray", "reduction")
async def test_the_rows_and_requests_of_workers_are_spans(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        assert all(await scene.run(2))
    rows, requests = collector.named("invoke_agent"), collector.named("chat m")
    assert len(rows) == len(requests) == scene.server.received
    assert {span.parent_span_id for span in requests} == {span.span_id for span in rows}
    runs = {span.span_id for span in collector.named("invoke_workflow")}
    assert {span.links[0].span_id for span in rows} <= runs
    durations = [each.histogram for each in collector.metrics if each.name == "gen_ai.client.operation.duration"]
    assert sum(point.count for histogram in durations for point in histogram.data_points) == scene.server.received


def free_port() -> int:
    from tests.record.redis_servers import free_port

    return free_port()
