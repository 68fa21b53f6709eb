"""``show --unfinished`` after a kill: the rows that had begun, with their inputs, in several shapes of a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.warm import start

sys.path.insert(0, str(Path(__file__).parents[1]))  # the stand-ins of command-line agents
from tests.runtimes.agents import runtime

from batch_agent.cli.main import main
from batch_agent.record.reader import open_run
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

MODULE = """
async def ask(row, ctx):
    await ctx.ask(f"Do {row['text']}")
    return str(await ctx.ask(f"Do more of {row['text']}"))


def look_up(sku: str) -> str:
    return sku + " is a kettle"
"""


def begun(run: Path) -> int:
    with open_run(run) as reader:
        return reader.unfinished_count()


MORE = {"processes": ("--processes", "1"), "Ray": ("--ray", "local", "--workers", "1", "--worker-cpus", "0.5")}


@pytest.mark.covers("show with inputs of unfinished rows", "local", "processes", "Ray", "worker=", "runtime")
async def test_rows_that_were_killed_are_shown_with_their_inputs(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shape == "Ray" and not os.environ.get("BATCH_AGENT_TEST_CLUSTER"):
        pytest.skip("make test-cluster runs it on a real Ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpful.py").write_text(MODULE)
    (tmp_path / "rows.csv").write_text("text\nwater\nfire\n")
    never = asyncio.Event()

    async def script(request: Request) -> Say:
        if shape == "runtime":  # its program does not end
            return Say(f"hang {tmp_path / str(request.number)}")
        if request.number < 2:
            return Say("once") if shape == "worker=" else CallTools(ToolUse("look_up", {"sku": "K-1"}))
        await never.wait()
        return Say("never")

    async with ScriptedServer(script, models=["m"]) as server:
        spec: dict[str, object] = {"inputs": "rows.csv", "model": "m", "backend": server.backend_url}
        spec |= {"worker": "helpful:ask"} if shape == "worker=" else {"task": "Do {text}"}
        if shape == "runtime":
            runtime("opencode", tmp_path)
            monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
            spec["runtime"] = "opencode"
        elif shape != "worker=":
            spec["tools"] = ["helpful:look_up"]
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        words = ("run", "spec.json", "--run-dir", "run", "--output", "out.jsonl")
        more, out = MORE.get(shape, ()), asyncio.subprocess.PIPE
        run = await start(
            "-m", "batch_agent", *words, *more, cwd=tmp_path, stdout=out, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(120 if shape == "Ray" else 30):
                await server.wait_requests(2 if shape == "runtime" else 4)
                while shape == "runtime" and not all((tmp_path / str(number)).exists() for number in range(2)):
                    await asyncio.sleep(0.05)
                while await asyncio.to_thread(begun, tmp_path / "run") < 2:  # a streamed answer is recorded at its end
                    await asyncio.sleep(0.05)
        finally:
            run.kill()
            said, _ = await run.communicate()
            for number in range(2) if shape == "runtime" else ():
                with suppress(ProcessLookupError):  # the guard has ended it
                    os.kill(int((tmp_path / str(number)).read_text()), signal.SIGKILL)
    assert await asyncio.to_thread(main, ["show", "run", "--unfinished"]) == 0, said
    shown, warned = capsys.readouterr()
    assert [f"row {row}: not done" in shown for row in range(2)] == [True, True], warned
    assert "water" in shown and "fire" in shown


@pytest.mark.covers("show with inputs of unfinished rows", "reduction")
async def test_a_request_of_a_reduction_that_was_killed_is_shown_with_the_answers_that_it_sums_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three answers are summed up two at a time; the request that merges the two sums calls a tool and does not end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpful.py").write_text(MODULE)
    (tmp_path / "rows.csv").write_text("text\nwater\nfire\nearth\n")

    async def script(request: Request) -> Say:
        text = str(request.messages[1 if request.messages[0]["role"] == "system" else 0]["content"])
        if "Do " in text and "Sum up" not in text:
            return Say(f"did {text.split()[-1]}")
        if "each line below is the answer for a part" not in text:
            return Say("a sum of " + " and ".join(word for word in ("water", "fire", "earth") if word in text))
        if not request.turn:
            return CallTools(ToolUse("look_up", {"sku": "K-1"}))
        await asyncio.Event().wait()
        return Say("never")

    async with ScriptedServer(script, models=["m"]) as server:
        reduce = {"prompt": "Sum up {n} answers", "tree": 2, "tools": ["helpful:look_up"]}
        stages = [{"map": {"name": "read", "task": "Do {text}"}}, {"reduce": reduce}]
        spec = {"inputs": "rows.csv", "model": "m", "backend": server.backend_url, "stages": stages}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        words = ("run", "spec.json", "--run-dir", "run", "--output", "out.jsonl")
        out = asyncio.subprocess.PIPE
        run = await start("-m", "batch_agent", *words, cwd=tmp_path, stdout=out, stderr=asyncio.subprocess.STDOUT)
        try:
            async with asyncio.timeout(30):
                await server.wait_requests(7)
        finally:
            run.kill()
            said, _ = await run.communicate()
    assert await asyncio.to_thread(main, ["show", "run", "--unfinished", "--full"]) == 0, said
    shown, warned = capsys.readouterr()
    assert shown.count(": not done") == 1 and "unknown" not in shown, warned
    assert "Sum up 3 answers" in shown and "a sum of water and fire" in shown and "a sum of earth" in shown
    assert "K-1 is a kettle" in shown
