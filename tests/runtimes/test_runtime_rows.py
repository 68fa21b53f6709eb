"""Command-line agents on the rows of a run: through the gateway, recorded, resumed, from files and by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.runtimes.agents import KINDS, repository, runtime

from batch_agent import BatchAgent, Tool
from batch_agent.errors import SpecError
from batch_agent.runtimes import CodexRuntime, OpenCodeRuntime
from batch_agent.runtimes.named import runtime_of
from batch_agent.testing import CallTools, Hang, Request, Say, ScriptedServer, ToolUse


@pytest.mark.parametrize("kind", KINDS)
async def test_agents_work_on_rows_and_their_calls_are_the_rows(kind: str, tmp_path: Path) -> None:
    source = repository(tmp_path)
    agent = runtime(kind, tmp_path, working_dir=source)
    async with ScriptedServer(lambda request: Say(f"write {request.text}"), models=["m"]) as server:
        results = await BatchAgent.run(
            runtime=agent, task="do {input}", inputs=["a", "b", "c"], backend=server.backend_url, max_agents=3
        )
    for row, result in zip("abc", results, strict=True):
        assert result.output == f"write do {row}", result.error
        assert (result.turns, result.usage.prompt_tokens > 0) == (1, True)
        assert f"+do {row}" in result.artifacts["diff.patch"].read_text()
        assert result.artifacts["events.jsonl"].exists()
    assert sorted(path.name for path in source.iterdir()) == [".git", "a.txt"]


async def test_an_agent_with_a_backend_of_its_own_is_pointed_straight_at_it(tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: Say("direct"), models=["m"]) as server:
        agent = runtime("opencode", tmp_path, backend=server.backend_url, model="m")
        results = await BatchAgent.run(runtime=agent, task="{input}", inputs=["a"])
        assert results[0].output == "direct", results[0].error
        assert server.requests[0].headers["Authorization"] == "Bearer none"
    assert results[0].turns == 0
    assert results[0].usage.completion_tokens == 4  # as its events say


async def test_a_resumed_row_starts_afresh_and_pays_for_nothing_twice(tmp_path: Path) -> None:
    def script(request: Request) -> Say | Hang:
        return Hang() if request.text == "b" and not resumed else Say("done")

    resumed = False
    options: dict[str, Any] = {"runtime": runtime("claude", tmp_path), "task": "{input}", "inputs": ["a", "b"]}
    options |= {"run_dir": tmp_path / "run", "max_agents": 1}
    async with ScriptedServer(script, models=["m"]) as server:
        async with BatchAgent.open(**options, backend=server.backend_url) as run:
            async for _ in run.results():
                break
            await server.wait_inflight(1)
            run.cancel()
        await server.wait_idle()
        resumed = True
        results = await BatchAgent.run(**options, backend=server.backend_url, resume=True)
        asked = Counter(request.text for request in server.requests)
    assert [result.output for result in results] == ["done", "done"]
    assert asked == {"a": 1, "b": 2}  # the second was in flight


async def test_output_is_read_by_a_schema(tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: Say('{"city": "Oslo"}'), models=["m"]) as server:
        results = await BatchAgent.run(
            runtime=runtime("codex", tmp_path),
            task="{input}",
            inputs=["a"],
            output_schema={"type": "object", "properties": {"city": {"type": "string"}}},
            backend=server.backend_url,
        )
    assert results[0].output == {"city": "Oslo"}, results[0].error


def test_a_runtime_is_named_by_text_or_by_a_mapping(tmp_path: Path) -> None:
    assert runtime_of("opencode") == OpenCodeRuntime()
    assert runtime_of({"name": "codex", "isolation": "copy"}) == CodexRuntime(isolation="copy")
    assert runtime_of(None) is None
    for wrong, words in (("aider", "is none of"), ({"name": "codex", "isolaton": "copy"}, "did you mean 'isolation'")):
        with pytest.raises(SpecError, match=words):
            runtime_of(wrong)
    with pytest.raises(SpecError, match="give one of them"):
        BatchAgent.plan(task="x", inputs=[], runtime="codex", worker=print)


async def test_a_missing_program_is_an_error_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match="npm install -g @openai/codex"):
        await BatchAgent.run(runtime=CodexRuntime(codex_bin="no-such-codex"), task="x", inputs=["a"])


async def test_a_spec_file_names_a_runtime_and_its_directory_is_beside_the_file(tmp_path: Path) -> None:
    repository(tmp_path)
    program = runtime("codex", tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"input": "a"}\n')
    async with ScriptedServer(lambda request: Say("write it"), models=["m"]) as server:
        options = {"name": "codex", "codex_bin": program.binary, "working_dir": "source", "isolation": "copy"}
        spec = {"task": "do {input}", "runtime": options, "inputs": "rows.jsonl", "backend": server.backend_url}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        outcome = await batch_agent(tmp_path, "run", "spec.json", "--output", "out.jsonl", "--no-run-dir")
    assert outcome.code == 0, outcome
    assert json.loads((tmp_path / "out.jsonl").read_text())["output"] == "write it"


@pytest.mark.parametrize("own", [True, False])
async def test_an_agent_is_a_tool_that_a_model_gives_a_task(tmp_path: Path, own: bool) -> None:
    def script(request: Request) -> Say:
        if not request.tools:  # it is the agent that asks
            return Say(f"write {request.text}")
        results = [str(message.content) for message in request.conversation() if message.role == "tool"]
        return Say(results[0]) if results else CallTools(ToolUse("helper", {"task": "sweep"}))

    async with ScriptedServer(script, models=["m"]) as server:
        given = {"backend": server.backend_url, "model": "m"} if own else {}
        helper = Tool.agent(runtime("opencode", tmp_path, permissions="write", **given), name="helper")
        results = await BatchAgent.run(task="{input}", inputs=["a"], tools=[helper], backend=server.backend_url)
        sent = server.received
    assert helper.effect == "write"
    assert "write sweep" in str(results[0].output), results[0].error
    assert "+sweep" in str(results[0].output)
    assert (sent, results.summary.statistics.turns) == (3, 2 if own else 3)  # the run counts what its gateway sent


LOGINS = {
    "claude": ".claude/.credentials.json",
    "codex": ".codex/auth.json",
    "opencode": ".local/share/opencode/auth.json",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BATCH_AGENT_BACKEND", "CLAUDE_CONFIG_DIR", "CLAUDE_CODE_OAUTH_TOKEN", "CODEX_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_without_any_backend_uses_the_login_of_its_command(
    kind: str, home: Path, tmp_path: Path
) -> None:
    login = home / LOGINS[kind]
    login.parent.mkdir(parents=True)
    login.write_text("{}")
    known: dict[str, Any] = {"runtime": runtime(kind, tmp_path), "task": "{input}", "inputs": ["a"]}
    [result] = await BatchAgent.run(**known, run_dir=tmp_path / "run")
    assert result.ok, result.error
    [again] = await BatchAgent.run(**known, run_dir=tmp_path / "run", resume=True)
    assert again.resumed and again.output == result.output
    told = json.loads(result.output)
    assert str(login.parent).startswith(
        told["env"][{"claude": "CLAUDE_CONFIG_DIR", "codex": "CODEX_HOME"}.get(kind, "XDG_DATA_HOME")]
    )
    assert not {"ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"} & told["env"].keys()
    assert "--model" not in told["argv"] and result.usage.prompt_tokens >= 7  # as its events say


async def test_the_runs_backend_comes_before_a_login(home: Path, tmp_path: Path) -> None:
    (home / ".claude").mkdir(parents=True)
    (home / LOGINS["claude"]).write_text("{}")
    async with ScriptedServer(lambda request: Say("through the gateway"), models=["m"]) as server:
        agent = runtime("claude", tmp_path)
        known: dict[str, Any] = {"runtime": agent, "task": "{input}", "run_dir": tmp_path / "run"}
        results = await BatchAgent.run(**known, inputs=["a"], backend=server.backend_url)
        again = await BatchAgent.run(**known, inputs=["a", "b"], resume=True)  # at the recorded backend
    assert results[0].output == "through the gateway" and results[0].turns == 1
    assert [result.output for result in again] == ["through the gateway"] * 2


def test_a_login_that_is_wanted_and_missing_is_named_before_anything_starts(home: Path, tmp_path: Path) -> None:
    agent = runtime("claude", tmp_path, backend="login")
    with pytest.raises(SpecError, match=r"Claude Code has no login here: start .*claude and log in, or give a backend"):
        BatchAgent.run_sync(runtime=agent, task="{input}", inputs=["a"])
