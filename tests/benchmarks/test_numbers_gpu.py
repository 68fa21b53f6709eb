"""``benchmarks.numbers_gpu`` against a server that speaks the scripts of its prompts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from batch_agent.testing import Request, Say, ScriptedServer
from batch_agent.testing.replies import ToolUse
from batch_agent.testing.server import VllmMetrics
from benchmarks import gpu, numbers_gpu, report


def speak(request: Request) -> Say:
    """The turn of the script whose number is that of the tool results so far."""
    messages = request.body["messages"]
    assert isinstance(messages, list)
    asked = next(message["content"] for message in messages if message["role"] == "user")
    turns = json.loads(asked.partition(gpu.OPEN)[2].partition(gpu.CLOSE)[0])
    said = turns[sum(message["role"] == "tool" for message in messages)]
    if call := re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", said):
        told = json.loads(call[1])
        return Say("", (ToolUse(told["name"], told["arguments"]),))
    return Say(said)


def engine(answer: Callable[[Request], Say] = speak, kv_tokens: int = 400_000) -> ScriptedServer:
    def metrics() -> str:
        told = VllmMetrics("m", "scripted").put("num_requests_running", "Requests in flight", 0)
        labels = {"num_gpu_blocks": str(kv_tokens // 16), "block_size": "16"}
        return str(told.put("cache_config_info", "The cache", 1, **labels))

    return ScriptedServer(answer, models=["m"], metrics=metrics)


Capture = pytest.CaptureFixture[str]


async def call(capsys: Capture, state: Path, *options: str) -> tuple[int, list[dict[str, object]], str]:
    """Run the command; return its status, its lines, and what it complains of."""
    status = await asyncio.to_thread(numbers_gpu.main, ["--state", str(state), *options])
    out, complaint = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], complaint


async def test_a_finished_step_is_kept_and_not_measured_again_and_what_does_not_fit_is_said(
    tmp_path: Path, capsys: Capture
) -> None:
    state = tmp_path / "state.jsonl"
    state.write_text('{"piece": "gpu-20", "engi')  # the end of a call that was killed
    async with engine() as server:
        asked = ("--url", f"vllm://{server.address}", "--repetitions", "1", "--pieces")
        status, lines, complaint = await call(capsys, state, *asked, "gpu-20,kv-many-turns")
        assert status == 0, complaint
        assert lines[1] == {
            "piece": "kv-many-turns",
            "left out": "needs a KV cache of 65,536 tokens; that of the server has 400,000",
        }
        assert (lines[2]["piece"], lines[2]["repetition"]) == ("gpu-20", 1)
        assert f"{state}:1 is not a finished step" in complaint
        assert json.loads(state.read_text().splitlines()[1]) == lines[2]
        requests = len(server.requests)
        status, lines, _ = await call(capsys, state, *asked, "gpu-20")
        assert (status, len(lines), len(server.requests)) == (0, 1, requests)


async def test_no_step_begins_that_would_not_end_in_time_or_that_the_server_can_not_do(
    tmp_path: Path, capsys: Capture
) -> None:
    async with engine(kv_tokens=98_304) as server:
        asked = ("--url", f"vllm://{server.address}", "--pieces", "kv-growing,gpu-1000", "--repetitions", "1")
        status, lines, _ = await call(capsys, tmp_path / "state.jsonl", *asked, "--minutes", "0.5")
    assert status == numbers_gpu.MORE
    assert lines[1]["left out"] == "needs a KV cache for all: 150,000 tokens; the server has 98,304"
    assert [line["piece"] for line in lines[2:]] == ["kv-growing"] * 2
    assert all("left for another call" in line for line in lines[2:])
    assert server.requests == []


async def test_a_wrong_answer_is_a_failed_step_and_nothing_is_kept_of_it(tmp_path: Path, capsys: Capture) -> None:
    state = tmp_path / "state.jsonl"
    asked = 0

    def liar(request: Request) -> Say:
        nonlocal asked
        asked += 1
        truth = speak(request)
        return Say(truth.text.replace("topic", "subject"), truth.calls) if asked > 300 else truth

    async with engine(liar) as server:
        url = f"vllm://{server.address}"
        status, lines, _ = await call(capsys, state, "--url", url, "--repetitions", "9", "--pieces", "gpu-20")
    assert status == 1
    assert "failed" in lines[-1]
    kept = numbers_gpu.lines_of(state)
    assert kept == lines[1:-1]


def test_a_server_that_is_not_there_and_a_piece_that_is_none_are_errors_that_say_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nobody = ["--state", "state.jsonl", "--url", "vllm://127.0.0.1:9"]
    with pytest.raises(SystemExit, match="no server to measure at vllm://127"):
        numbers_gpu.main(nobody)
    with pytest.raises(SystemExit, match="no piece 'kv-shrinking'"):
        numbers_gpu.main([*nobody, "--pieces", "kv-shrinking"])
    with pytest.raises(SystemExit, match="vllm-70b=…: there are vllm-32b, "):
        numbers_gpu.main([*nobody[:2], "--serve", "vllm-70b=true"])
    assert numbers_gpu.main([*nobody[:2], "--serve", "vllm-7b=echo no GPU", "--pieces", "gpu-20"]) == 1
    assert "did not become healthy: echo no GPU\\nno GPU" in capsys.readouterr().out


def test_results_are_those_of_the_code_that_was_measured_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    common = {"piece": "kv-growing", "engine": "vllm", "file": "kv", "server": {"version": "0.26.0"}}
    seconds = [("old", 1, "ours", 99.0), ("new", 2, "loop 24", 70.0), ("new", 3, "ours", 50.0)]
    lines = [
        {**common, "measures": of, "date": f"2026-01-0{day}", "variant": variant, "repetition": 1}
        | {"found": {"work": "growing", "seconds": took}}
        for of, day, variant, took in seconds
    ]
    assert numbers_gpu.write_results(lines) == 0
    written = json.loads((tmp_path / "kv-vllm.json").read_text())
    assert written["environment"]["measures"] == "new"
    assert [bar["measured"] for bar in written["bars"]] == [1.4]
