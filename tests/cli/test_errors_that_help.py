"""Errors of the command line say what to do: which argument, which name was meant, which directory is missing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cli.commandline import batch_agent, started

from batch_agent.cli.main import main

RUN = ["run", "--task", "Say {message}", "rows.csv", "--no-run-dir"]
INSTANT = ["--backend", "simulated://instant"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BATCH_AGENT_BACKEND", raising=False)
    Path("rows.csv").write_text("id,message\na,hello\n")
    Path("shop_tools.py").write_text("def look_up(key: str) -> str:\n    return key\n")
    Path("empty.yaml").write_text("model: m\ninputs: rows.csv\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "rows.csv"], "rows.csv: it holds rows, and a spec file ends in .yaml"),
        (["run", "rows.csv"], "batch-agent run --task 'Sum up {…}' rows.csv"),
        (["run", "empty.yaml", *INSTANT], "task is missing: give the message that each agent gets, such as"),
        (
            [*RUN, *INSTANT, "--output", "no/dir/t.csv"],
            "results to no/dir/t.csv: No such file or directory: create no/dir first",
        ),
        ([*RUN, *INSTANT, "--output", "no/dir/t.jsonl"], "create no/dir first"),
        ([*RUN, *INSTANT, "--tool", "shop_tool:look_up"], "did you mean 'shop_tools'?"),
        ([*RUN, *INSTANT, "--tool", "shop_tools:lookup"], "did you mean 'look_up'?"),
        ([*RUN, *INSTANT, "--tool", "read_fiel"], "there is no built-in tool 'read_fiel'; did you mean 'read_file'?"),
        ([*RUN, *INSTANT, "--id-column", "idd"], "did you mean 'id'?"),
        ([*RUN, "--model", "gpt-5-mini"], "no backend for the model 'gpt-5-mini'; did you mean openai/gpt-5-mini?"),
        ([*RUN, "--model", "claude-x"], "did you mean anthropic/claude-x?"),
    ],
)
def test_an_error_says_what_to_do(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert says in said
    assert ".partial.jsonl" not in said and "](" not in said


async def test_a_server_that_is_not_there_is_named_at_once_also_without_a_model(tmp_path: Path) -> None:
    async with started(tmp_path, *RUN, "--backend", "vllm://127.0.0.1:9") as running, asyncio.timeout(20):
        assert running.stderr is not None
        line = (await running.stderr.readline()).decode()
    assert "vllm://127.0.0.1:9 is asked for its model again, for 30 s" in line and "connection refused" in line


async def test_how_to_continue_stands_after_the_error(tmp_path: Path) -> None:
    command = ["run", "--task", "Say {message}", "rows.csv", "--run-dir", "run"]
    ended = await batch_agent(
        tmp_path, *command, "--backend", "vllm://127.0.0.1:9", "--model", "m", "--max-outage", "1"
    )
    lines = ended.stderr.splitlines()
    assert ended.code == 4, ended.stderr
    assert lines[-1].startswith("batch-agent: the server never answered")
    assert lines[-1].endswith("is the server running? Continue batch-agent resume run")
