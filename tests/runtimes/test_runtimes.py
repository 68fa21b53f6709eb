"""Command-line agents as workers, with stand-ins for the programs: prompts, trees, permissions, and how they end."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.runtimes.agents import KINDS, Context, context, git, repository, runtime
from tests.warm import start

from batch_agent.errors import AgentTimeout, SpecError, WorkerFailed
from batch_agent.messages import Usage
from batch_agent.runtimes import OpenCodeRuntime
from batch_agent.runtimes.base import Transcript, read_opencode

each = pytest.mark.parametrize("kind", KINDS)
PROMPT = "--help 'quoted' $HOME\n-- {braces} ünïcode \\ end"


@each
async def test_an_agent_gets_its_prompt_unchanged_and_only_what_it_may_know(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    async with context(tmp_path, "env", PROMPT) as ctx:
        told = json.loads(await runtime(kind, tmp_path)(None, ctx))
    assert told["prompt"] == PROMPT
    assert PROMPT not in told["argv"]
    assert "hush" not in told["env"].values()
    assert told["env"]["HOME"].startswith(str(ctx.workdir))
    assert told["env"]["OPENAI_API_KEY"].startswith("row-")
    assert told["cwd"] == str(ctx.workdir / "tree")
    assert {"events.jsonl", "stderr.txt"} <= ctx.saved.keys()


@each
@pytest.mark.parametrize("isolation", ["worktree", "copy"])
async def test_what_an_agent_changes_is_a_patch_and_the_users_tree_stays_as_it_is(
    kind: str, isolation: str, tmp_path: Path
) -> None:
    source = repository(tmp_path)
    (source / "b.txt").write_text("not committed\n")
    agent = runtime(kind, tmp_path, working_dir=source, isolation=isolation)
    async with context(tmp_path, "write hello") as ctx:
        assert await agent(None, ctx) == "write hello"
    patch = ctx.saved["diff.patch"].decode()
    assert "+++ b/new.txt\n@@ -0,0 +1 @@\n+hello\n" in patch
    assert "-one\n+changed\n" in patch
    assert "b.txt" not in patch
    assert sorted(path.name for path in source.iterdir()) == [".git", "a.txt", "b.txt"]
    assert (source / "a.txt").read_text() == "one\n"
    assert len(git(source, "worktree", "list").splitlines()) == 1
    assert not (ctx.workdir / "tree").exists()


async def test_without_isolation_the_agent_works_in_the_users_own_tree(tmp_path: Path) -> None:
    source = repository(tmp_path)
    async with context(tmp_path, "write hello") as ctx:
        await runtime("codex", tmp_path, working_dir=source, isolation="none")(None, ctx)
    assert (source / "new.txt").read_text() == "hello"


async def test_what_an_interrupted_attempt_left_behind_is_gone(tmp_path: Path) -> None:
    source = repository(tmp_path)
    async with context(tmp_path, "write hello") as ctx:
        git(source, "worktree", "add", "-q", "--detach", str(ctx.workdir / "tree"))
        (ctx.workdir / "tree" / "old.txt").write_text("old")
        await runtime("claude", tmp_path, working_dir=source)(None, ctx)
    assert b"old.txt" not in ctx.saved["diff.patch"]
    assert len(git(source, "worktree", "list").splitlines()) == 1


@each
async def test_an_agent_that_fails_says_how(kind: str, tmp_path: Path) -> None:
    async with context(tmp_path, "fail") as ctx:
        with pytest.raises(WorkerFailed, match=r"(?s)exited with status 3.*it went wrong"):
            await runtime(kind, tmp_path)(None, ctx)
    assert ctx.saved["stderr.txt"].strip().endswith(b"it went wrong")


@each
async def test_an_agent_that_says_nothing_readable_has_no_answer(kind: str, tmp_path: Path) -> None:
    async with context(tmp_path, "garbage") as ctx:
        with pytest.raises(WorkerFailed, match="gave no answer"):
            await runtime(kind, tmp_path)(None, ctx)


def test_what_is_missing_or_misspelt_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="npm install -g opencode-ai"):
        OpenCodeRuntime(opencode_bin="no-such-program").check()
    with pytest.raises(SpecError, match="isolation='copy'"):
        runtime("codex", tmp_path, working_dir=tmp_path).check()
    with pytest.raises(SpecError, match="is not one of read, write, full"):
        OpenCodeRuntime(permissions="all")  # type: ignore[arg-type]


def test_events_of_both_forms_and_their_usage() -> None:
    transcript = Transcript()
    for event in (
        {"type": "text", "text": "one"},
        {"type": "text", "part": {"text": "two"}},
        {"type": "step_finish", "part": {"tokens": {"input": 5, "output": 3, "cache": {"read": 2, "write": 1}}}},
        {"type": "step_finish", "tokens": {"input": 1, "output": 1, "reasoning": 4}},
    ):
        read_opencode(transcript, event)
    assert transcript.text == "two"
    assert transcript.usage == Usage(9, 2, 8, 4, 1)


# Nothing is left behind


async def until_gone(pid: int) -> None:
    """Returns when the process is gone; the test's own time limit bounds it."""
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        await asyncio.sleep(0.02)


async def pid_in(file: Path) -> int:
    while not (file.exists() and file.read_text()):
        await asyncio.sleep(0.02)
    return int(file.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="what detaches itself is found on Linux alone")
@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_an_agent_is_ended_with_all_that_it_started(end: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    agent = runtime("opencode", tmp_path, timeout=3.0 if end == "timeout" else None)
    async with context(tmp_path, f"hang {file}") as ctx:
        working = asyncio.ensure_future(agent(None, ctx))
        while not (file.exists() and file.read_text()) and not working.done():
            await asyncio.sleep(0.02)
        if end == "cancel":
            working.cancel()
        with pytest.raises((AgentTimeout, asyncio.CancelledError)):
            await working
        if file.exists():  # on a very slow machine the time is over before it has begun
            await until_gone(int(file.read_text()))


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.runtimes.agents import context, runtime

async def main():
    folder = Path({folder!r})
    async with context(folder, "hang {folder}/pid") as ctx:
        await runtime("codex", folder)(None, ctx)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what detaches itself is found on Linux alone")
async def test_nothing_is_left_when_this_process_is_killed(tmp_path: Path) -> None:
    program = KILLED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    process = await start("-c", program)
    try:
        pid = await pid_in(tmp_path / "pid")
    finally:
        process.kill()
        await process.wait()
    await until_gone(pid)


async def test_many_agents_share_one_repository(tmp_path: Path) -> None:
    source = repository(tmp_path)
    agent = runtime("codex", tmp_path, working_dir=source)
    contexts = []
    async with context(tmp_path, "write hello") as ctx:
        for number in range(6):
            workdir = tmp_path / f"row-{number}"
            workdir.mkdir()
            contexts.append(Context(ctx.prompt, workdir, ctx.base_url, ctx.api_key, ctx.env))
        answers = await asyncio.gather(*(agent(None, each) for each in contexts))
    assert answers == ["write hello"] * 6
    assert all(b"+hello" in each.saved["diff.patch"] for each in contexts)
    assert len(git(source, "worktree", "list").splitlines()) == 1


async def test_a_row_that_is_given_up_while_its_tree_is_made_leaves_none(tmp_path: Path) -> None:
    source = repository(tmp_path)
    agent = runtime("codex", tmp_path, working_dir=source)
    async with context(tmp_path, "write hello") as ctx:
        with agent.worktrees:  # it waits for its turn
            working = asyncio.ensure_future(agent(None, ctx))
            while not (ctx.workdir / "home").exists():
                await asyncio.sleep(0.01)
            working.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await working
    assert not (ctx.workdir / "tree").exists()
    assert len(git(source, "worktree", "list").splitlines()) == 1
