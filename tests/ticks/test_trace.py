"""What is written of ticks, and how it is played again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.ticks.worlds import agent_in, call, registered, says

from batch_agent.errors import SpecError
from batch_agent.testing import Request, Say, ScriptedBackend, virtual_clock
from batch_agent.ticks import AgentRuntime, TickRuntime


@virtual_clock
async def play(runtime: AgentRuntime) -> list[dict[str, object]]:
    async with registered(runtime, "slow", "quick"):
        return [
            dict(await runtime.process_tick(tick, {"slow": {"t": tick}, "quick": {"t": tick}}))
            for tick in (1, 2, 3, 1, 2)
        ]


def script(request: Request) -> Say:
    return says(call(agent_in(request)), latency=1.5 if agent_in(request) == "slow" else 0.1)


def test_a_recorded_run_is_replayed_tick_for_tick_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded = play(AgentRuntime(backend=ScriptedBackend(script), deadline=1.0, trace=path))
    assert play(AgentRuntime(replay=path)) == recorded
    assert {action.source for tick in recorded for action in tick.values()} == {"answer", "late", "last", "fallback"}  # type: ignore[attr-defined]


def test_a_trace_has_a_line_for_each_agent_and_tick(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    play(AgentRuntime(backend=ScriptedBackend(script), deadline=1.0, trace=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 10
    late = lines[2]
    assert (late["agent"], late["tick"], late["source"], late["seen_tick"]) == ("slow", 2, "late", 1)
    assert late["action"] == {"tool": "move", "params": {"direction": "slow"}, "reasoning": "because"}
    assert "{'t': 1}" in late["prompt"] and late["answer"] == call("slow")
    assert late["latency"] == 1.5 and late["prompt_tokens"] > 0 and late["completion_tokens"] > 0
    assert late["tokens"] == late["prompt_tokens"] + late["completion_tokens"]
    assert late["observation"] == {"t": 2}


def test_what_was_not_recorded_is_the_fallback_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    play(AgentRuntime(backend=ScriptedBackend(script), trace=path))

    @virtual_clock
    async def go_on() -> None:
        async with registered(AgentRuntime(replay=path), "quick") as runtime:
            action = (await runtime.process_tick(77, {"quick": {}}))["quick"]
        assert action.source == "fallback" and "tick 77" in str(action.reasoning)

    go_on()


def test_a_trace_that_a_kill_has_cut_is_replayed_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded = play(AgentRuntime(backend=ScriptedBackend(script), trace=path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert play(AgentRuntime(replay=path))[:-1] == recorded[:-1]
    again = play(AgentRuntime(backend=ScriptedBackend(script), trace=path))
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(lines) == 19
    assert play(AgentRuntime(replay=path))[:-1] == recorded[:-1] == again[:-1]


@pytest.mark.parametrize(
    ("before", "kept"),
    [(b"", b""), (b'{"ag', b""), (b'my notes\n{"agent":"quick","tick":1', b"my notes\n"), (b"my notes", b"my notes\n")],
)
def test_only_the_beginning_of_a_line_is_removed_from_a_file(tmp_path: Path, before: bytes, kept: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(before)
    AgentRuntime(backend=ScriptedBackend(script), trace=path)
    assert path.read_bytes() == kept


def test_a_last_line_that_lacks_its_line_feed_alone_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    play(AgentRuntime(backend=ScriptedBackend(script), trace=path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    AgentRuntime(backend=ScriptedBackend(script), trace=path)
    assert path.read_bytes() == whole


def test_lines_that_are_none_of_a_trace_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    recorded = play(AgentRuntime(backend=ScriptedBackend(script), trace=path))
    whole = path.read_bytes()
    path.write_bytes(b'nonsense\n{"agent": "quick", "tick": 1, "source": "answer"}\n\xff\n' + whole)
    assert play(AgentRuntime(replay=path)) == recorded
    assert "skipped 3 of 13 lines" in caplog.text and "line 1" in caplog.text
    path.write_bytes(b"nonsense\n")
    with pytest.raises(SpecError, match="not a trace of ticks"):
        AgentRuntime(replay=path)


class Move(BaseModel):
    to: str


@virtual_clock
async def test_typed_actions_are_replayed_as_their_type(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    backend = ScriptedBackend(lambda request: Say('{"to": "south"}'))
    async with TickRuntime[Move](["a"], backend=backend, schema=Move, trace=path) as runtime:
        await runtime.tick(1, {"a": {}})
    async with TickRuntime[Move](["a"], schema=Move, replay=path) as again:
        assert (await again.tick(1, {"a": {}}))["a"].action == Move(to="south")


@virtual_clock
async def test_a_recorded_action_that_no_longer_fits_is_its_own_agents_fallback(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    backend = ScriptedBackend(lambda request: Say('{"to": "south"}'))
    async with TickRuntime[Move](["a"], backend=backend, schema=Move, trace=path) as runtime:
        await runtime.tick(1, {"a": {}})
    async with TickRuntime[int](["a"], schema=int, replay=path) as again:
        decision = (await again.tick(1, {"a": {}}))["a"]
    assert decision.source == "fallback" and "recorded" in decision.reason


def test_a_trace_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot write the trace"):
        AgentRuntime(backend=ScriptedBackend(script), trace=tmp_path / "no" / "trace")


@virtual_clock
async def test_numbers_that_no_one_expects_do_not_stop_a_tick(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    backend = ScriptedBackend(lambda request: says(call(steps=10**40)))
    async with registered(AgentRuntime(backend=backend, trace=path), "a") as runtime:
        await runtime.process_tick(1, {"a": {"x": float("nan")}})
    line = json.loads(path.read_text())
    assert line["action"]["params"]["steps"] == 10**40 and line["observation"] == {"x": None}
