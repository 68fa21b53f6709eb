import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from tests.warm import start

from batch_agent.cli.commands.ticks import runtime_of
from batch_agent.cli.main import main
from batch_agent.cli.spec.specfile import read_mapping
from batch_agent.testing import Say, ScriptedServer

SPEC = """
model: m
deadline: 5
system_prompt: You live in a wood.
tools: [world:gather, wait]
goals: [eat]
agents:
  - agent_id: ann
    priority: 2
    fallback: {tool: wait, params: {for: 1}}
  - {id: bob, tools: [{name: sing, description: Sing., parameters: {type: object}}], goals: sing well}
  - carl
"""
WORLD = '''
def gather(what: str) -> str:
    """Pick something up."""
'''


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("agents.yaml").write_text(SPEC)
    Path("world.py").write_text(WORLD)


def test_a_file_says_the_agents_and_what_they_have_in_common() -> None:
    runtime = runtime_of(read_mapping(Path("agents.yaml")), {"backend": "vllm://h:1", "deadline": 1.0})
    ann, bob, carl = runtime.get_all_agents()
    assert [spec.name for spec in ann.action_space.form.tools] == ["gather", "wait"]
    assert [spec.name for spec in bob.action_space.form.tools] == ["sing"] and bob.state.goals == ["sing well"]
    assert carl.state.goals == ["eat"] and ann.priority == 2
    assert runtime.deadline == 1.0
    action = ann.fallback_for("why")
    assert (action.tool_name, action.parameters) == ("wait", {"for": 1})  # type: ignore[attr-defined]


def test_agents_may_be_given_by_id() -> None:
    Path("agents.json").write_text(json.dumps({"backend": "vllm://h:1", "agents": {"ann": None, "bob": {"goals": []}}}))
    assert list(runtime_of(read_mapping(Path("agents.json")), {}).agents) == ["ann", "bob"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deadline: 1", "agents"),
        ("agents: []", "agents"),
        ("agents: [3]", "agents[0]"),
        ("agents: [{goals: x}]", "agent_id"),
        ("agents: [a, a]", "twice"),
        ("agents: [{agent_id: a, gaols: x}]", "goals"),
        ("agents: [a]\ndeadlin: 1", "deadline"),
        ("agents: [a]\ndeadline: 0", "deadline"),
        ("agents: [a]\ntools: [world:nothing]", "nothing"),
        ("agents: [a]\nbackend: nonsense", "nonsense"),
        ("agents: [a]\nfallback: {tol: x}", "tool"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_in_a_line(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.yaml").write_text(text)
    assert main(["ticks", "serve", "--agents", "bad.yaml", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "bad.yaml" in line


def test_a_file_that_is_not_there_and_a_port_that_is_none_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ticks", "serve", "--agents", "none.yaml"]) == 1
    assert "none.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ticks", "serve", "--agents", "agents.yaml", "--port", "70000"])


def test_a_deadline_of_nothing_is_refused_on_the_command_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ticks", "serve", "--agents", "agents.yaml", "--port", "0", "--deadline", "0"]) == 1
    assert "deadline is 0" in capsys.readouterr().err


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
async def test_the_command_serves_until_it_is_interrupted(by: signal.Signals) -> None:
    answer = json.dumps({"tool": "gather", "params": {"what": "berries"}, "reasoning": "hungry"})
    async with ScriptedServer(lambda request: Say(answer), models=["m"]) as server:
        words = ("--agents", "agents.yaml", "--port", "0", "--backend", server.backend_url, "--trace", "t.jsonl")
        process = await start("-m", "batch_agent", "ticks", "serve", *words, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        said = (await process.stderr.readline()).decode()
        assert said.startswith("3 agents at http://127.0.0.1:")
        url = said.split()[3].rstrip(";")
        async with aiohttp.ClientSession() as session:
            body = {"tick": 1, "agents": [{"agent_id": "ann", "observations": {"see": "berries"}}]}
            async with session.post(f"{url}/tick", json=body) as response:
                actions = (await response.json())["actions"]
            async with session.get(f"{url}/health") as response:
                assert (await response.json())["status"] == "ok"
        process.send_signal(by)
        assert await process.wait() == 0
        assert (await process.stderr.read()).decode() == "stopped\n"
    assert actions[0]["action"] == {"tool": "gather", "params": {"what": "berries"}, "reasoning": "hungry"}
    assert len(Path("t.jsonl").read_text().splitlines()) == 1
