"""A run as an OpenTelemetry collector sees it, over real sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest
from tests.observe.collector import attributes, collecting
from tests.tools.mcp_tools.conftest import PLAIN_SERVER

from batch_agent import AgentContext, BatchAgent, Pipeline, SpecError, Tool, ToolContext
from batch_agent.events import Event, Held, JobFinished, JobStarted, RowTakenOver, RunStarted, Sinks
from batch_agent.job import Timings
from batch_agent.messages import Usage
from batch_agent.observe.spans import FIRST_ROWS, RowSampler, RowSpans, SpanRecord, trace_of
from batch_agent.run.observers import wants_telemetry
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ScriptedServer, ToolUse

needs_sdk = pytest.mark.skipif(
    find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None, reason="needs the extra otel"
)
called: list[str] = []


@Tool.define(effect="read", cacheable=False)
async def look_up(key: str, context: ToolContext) -> str:
    called.append(context.traceparent)
    return f"secret {key}"


def script(request: Request) -> Say:
    if request.text.startswith("bad"):
        return Say("")
    return CallTools(ToolUse("look_up", {"key": "k"})) if request.turn == 0 else Say("done")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    called.clear()
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    yield
    for thread in threading.enumerate():  # threads that were abandoned still retry, and take numbers from `random`
        if thread.name in ("batch-agent telemetry", "batch-agent metrics"):
            thread.join(30)


@needs_sdk
async def test_an_mcp_server_is_told_the_span_of_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    tools = Tool.mcp(PLAIN_SERVER, env={"NOTES": str(tmp_path / "notes")})

    def ask(request: Request) -> Say:
        return CallTools(ToolUse("which_trace", {})) if request.turn == 0 else Say("done")

    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        results = await BatchAgent.run(task="{input}", inputs=["a"], tools=tools, backend=ScriptedBackend(ask))
    [span] = collector.named("execute_tool which_trace")
    [answer] = [message.content for message in results[0].messages if message.role == "tool"]
    assert answer == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"


@needs_sdk
@pytest.mark.covers("traces", "local")
async def test_run_row_turn_and_call_are_spans_with_the_conventions_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector, ScriptedServer(script, models=["m"]) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        spec = {"task": "{input}", "inputs": ["a"], "tools": [look_up], "model": "m"}
        results = await BatchAgent.run(**spec, backend=f"http://{server.address}/v1")
    assert results[0].ok
    [run], [row], chats, [tool] = (
        collector.named(name) for name in ("invoke_workflow", "invoke_agent", "chat m", "execute_tool look_up")
    )
    assert len(collector.spans) == 5 and collector.services == {"batch-agent"}
    assert {span.trace_id for span in (row, *chats, tool)} == {row.trace_id} != {run.trace_id}
    assert {span.parent_span_id for span in (*chats, tool)} == {row.span_id}
    assert (row.links[0].trace_id, row.links[0].span_id) == (run.trace_id, run.span_id)
    chat = attributes(chats[0])
    assert chat["gen_ai.operation.name"] == "chat" and chat["gen_ai.provider.name"] == "http"
    assert chat["gen_ai.request.model"] == "m" and chat["gen_ai.response.model"] == "m"
    assert chat["gen_ai.usage.input_tokens"] > 0 and chat["gen_ai.usage.output_tokens"] > 0
    assert chat["server.address"] == "127.0.0.1" and chat["gen_ai.conversation.id"] == "0"
    assert attributes(tool)["gen_ai.tool.name"] == "look_up"
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in collector.spans)
    assert "secret" not in str(collector.spans)
    # What is sent with a request and to a tool names the span that stands for it.
    sent = [request.headers["traceparent"] for request in server.requests]
    assert sent == [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in chats]
    assert called == [f"00-{tool.trace_id.hex()}-{tool.span_id.hex()}-01"]
    assert sum(point.count for point in collector.points("gen_ai.client.operation.duration")) == 2
    tokens = collector.points("gen_ai.client.token.usage")
    assert sorted(attributes(point)["gen_ai.token.type"] for point in tokens) == ["input", "output"]


@needs_sdk
@pytest.mark.covers("traces", "worker=", "runtime")
async def test_a_users_workers_tools_and_requests_through_the_gateway_name_their_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(row: object, ctx: AgentContext) -> str:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": "hello"}]}
        head = {"Authorization": f"Bearer {ctx.api_key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{ctx.base_url}/chat/completions", json=body, headers=head) as answer,
        ):
            assert answer.ok
        return str(await ctx.call("look_up", key="k"))

    async with collecting() as collector, ScriptedServer(lambda _: Say("x"), models=["m"]) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        backend = f"http://{server.address}/v1"
        results = await BatchAgent.run(worker=work, inputs=["a"], tools=[look_up], backend=backend, model="m")
    assert results[0].ok
    [chat], [tool] = collector.named("chat m"), collector.named("execute_tool look_up")
    sent = [request.headers["traceparent"] for request in server.requests]
    assert sent == [f"00-{chat.trace_id.hex()}-{chat.span_id.hex()}-01"]
    assert called == [f"00-{tool.trace_id.hex()}-{tool.span_id.hex()}-01"]


@needs_sdk
async def test_of_rows_that_are_not_sampled_the_failed_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        rows = ["good"] * 5 + ["bad"]
        backend = ScriptedBackend(script)
        await BatchAgent.run(task="{input}", inputs=rows, tools=[look_up], backend=backend, max_retries=0)
        assert {attributes(span)["batch_agent.row.index"] for span in collector.named("invoke_agent")} == {5}
        [row] = collector.named("invoke_agent")
        assert row.status.code == 2 and attributes(row)["error.type"] == "BadResponse"
        assert [attributes(span)["error.type"] for span in collector.named("chat")] == ["BadResponse"]
        assert attributes(collector.named("invoke_workflow")[0])["batch_agent.rows.ok"] == 5


@needs_sdk
async def test_attempts_are_events_of_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = iter([Fail(500)])
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        backend = ScriptedBackend(lambda _: next(failing, Say("ok")))
        await BatchAgent.run(task="{input}", inputs=["a"], backend=backend)
    [chat] = collector.named("chat")
    assert [event.name for event in chat.events] == ["retry"] and chat.status.code == 0


@needs_sdk
async def test_what_is_said_is_exported_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
        await BatchAgent.run(task="Say {input}", inputs=["x"], tools=[look_up], backend=ScriptedBackend(script))
    row = attributes(collector.named("invoke_agent")[0])
    asked, answered = json.loads(row["gen_ai.input.messages"]), json.loads(row["gen_ai.output.messages"])
    assert asked[0] == {"role": "user", "parts": [{"type": "text", "content": "Say x"}]}
    assert asked[1]["parts"][0]["type"] == "tool_call" and asked[2]["parts"][0]["response"] == "secret k"
    assert answered == [{"role": "assistant", "parts": [{"type": "text", "content": "done"}]}]


@needs_sdk
@pytest.mark.covers("traces", "pipeline")
async def test_stages_of_a_pipeline_are_workflows_inside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        pipeline = Pipeline(["a"]).map(name="one", task="{input}").map(name="two", task="{input}")
        await pipeline.run(backend=ScriptedBackend(lambda _: Say("x")))
    workflows = collector.named("invoke_workflow")
    [whole] = [span for span in workflows if not span.parent_span_id]
    assert len(workflows) == 3 and {span.trace_id for span in workflows} == {whole.trace_id}
    assert len(collector.named("invoke_agent")) == 2


@needs_sdk
async def test_a_collector_that_is_away_fails_nothing_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = away.sockets[0].getsockname()[1]
    away.close()
    await away.wait_closed()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    with caplog.at_level("WARNING", "batch_agent"):
        results = await BatchAgent.run(task="{input}", inputs=["a"] * 20, backend=ScriptedBackend(lambda _: Say("x")))
    assert all(result.ok for result in results)
    assert "the collector refuses: the last spans and metrics are not sent" in caplog.text


@needs_sdk
async def test_a_collector_that_accepts_and_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await end.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        with caplog.at_level("WARNING", "batch_agent"):
            results = await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(lambda _: Say("x")))
        end.set()
    assert results[0].ok
    assert "the collector does not answer: the last spans and metrics are not sent" in caplog.text


def test_without_the_variable_nothing_of_opentelemetry_is_imported() -> None:
    program = """
import asyncio, sys
from batch_agent import BatchAgent
from batch_agent.testing import Say, ScriptedBackend
asyncio.run(BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(lambda _: Say("x"))))
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_telemetry_that_is_asked_for_without_the_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    assert not wants_telemetry(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"})
    with pytest.raises(SpecError, match=r"pip install opentelemetry-sdk"):
        wants_telemetry(True, {})


def test_it_is_off_where_the_user_or_the_environment_says_so() -> None:
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    assert not wants_telemetry(False, there)
    assert not wants_telemetry(None, {})
    assert not wants_telemetry(True, {"OTEL_SDK_DISABLED": "true"})


def kept(sampler: RowSampler, rows: int) -> int:
    return sum(sampler.keeps(trace_of("run", index), index) for index in range(rows))


async def test_the_spans_of_a_row_that_was_taken_over_come_from_its_last_worker() -> None:
    """The row was begun by a worker in another process, which died. Sinks of users have its start already."""
    told, spans = list[Event](), list[SpanRecord]()
    held = Held()
    held.add(RowSpans(spans.extend, RowSampler(1.0)))
    sinks = Sinks([told.append, Sinks([held])])
    done = JobFinished(4.0, "r", 0, "a", None, 1, 0, Usage(), None, Timings(), False)
    sinks(RunStarted(1.0, "r", 1, "b", "m"))
    sinks.elsewhere(JobStarted(2.0, "r", 0, "a", elsewhere=True))
    sinks(RowTakenOver(3.0, "r", 0, "a"))
    sinks(done)
    held.flush()
    assert [type(event) for event in told] == [RunStarted, JobStarted, JobFinished]
    assert [span.name for span in spans] == ["invoke_agent"]


def test_the_standard_variables_say_which_rows_are_kept() -> None:
    assert kept(RowSampler.from_environment({"OTEL_TRACES_SAMPLER": "always_on"}), 5000) == 5000
    assert not RowSampler.from_environment({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}).records
    ratio = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    assert 1000 < kept(RowSampler.from_environment(ratio), 5000) < 1500


def test_a_million_rows_are_no_million_traces_unless_wanted() -> None:
    assert FIRST_ROWS + 50 < kept(RowSampler.from_environment({}), 10_000 + FIRST_ROWS) < FIRST_ROWS + 200
