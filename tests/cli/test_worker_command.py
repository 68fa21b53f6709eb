"""A worker of the user's in a spec file and on the command line: run, planned, shown and exported."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commandline import batch_agent, rows

from batch_agent.testing import Request, Say, ScriptedServer

MODULE = """
from batch_agent import Tool

@Tool.define(effect="write")
def publish(text: str) -> str:
    return "published " + text

async def work(row, ctx):
    first = await ctx.ask("Name it: " + row["text"])
    second = await ctx.ask([{"role": "user", "content": "Name it: " + row["text"]}, first.message,
                            {"role": "user", "content": "Shorter."}])
    ctx.save("name.txt", second.text)
    return {"name": second.text, "done": await ctx.call("publish", text=second.text)}

NOTHING = 7
"""
SPEC = "worker: 'kettles:work'\ntools: ['kettles:publish']\nmodel: m\nsystem_prompt: Be brief.\n"


def name(request: Request) -> Say:
    return Say("short" if request.text == "Shorter." else "a long name")


async def test_a_worker_is_named_in_a_spec_file_and_its_rows_are_shown_and_exported(tmp_path: Path) -> None:
    (tmp_path / "kettles.py").write_text(MODULE)
    rows(tmp_path, {"id": "x", "text": "kettle"})
    async with ScriptedServer(name, models=["m"]) as server:
        (tmp_path / "spec.yaml").write_text(f"{SPEC}backend: {server.backend_url}\n")
        command = ("spec.yaml", "--inputs", "rows.jsonl")
        planned = await batch_agent(tmp_path, "run", *command, "--dry-run")
        assert "kettles.work: its requests are not known before the run" in planned.stdout
        done = await batch_agent(tmp_path, "run", *command, "--run-dir", "here")
        assert done.code == 0, done.stderr
        [result] = done.results
        assert result["output"] == {"name": "short", "done": "published short"}
        assert Path(str(result["artifacts"]["name.txt"])).name == "name.txt"  # type: ignore[index]
        shown = (await batch_agent(tmp_path, "show", "here")).stdout
        for part in (
            "2 turns",
            "ask 1, user\n    Name it: kettle",
            "ask 2\n    continues ask 1",
            "ask 2, user\n    Shorter.",
            'the worker calls\n    publish(text="short")',
            "publish answers\n    published short",
        ):
            assert part in shown
        exported = await batch_agent(tmp_path, "export", "here", "--format", "messages")
        [line] = exported.stdout.splitlines()
        said = [message["content"] for message in json.loads(line)["messages"]]
        assert said == ["Be brief.", "Name it: kettle", "a long name", "Shorter.", "short"]
        again = await batch_agent(tmp_path, "resume", "here")
        assert (again.code, server.received) == (0, 2), again.stderr


async def test_a_worker_may_be_all_that_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "kettles.py").write_text(MODULE)
    rows(tmp_path, {"text": "kettle"})
    async with ScriptedServer(name, models=["m"]) as server:
        options = ("--backend", server.backend_url, "--model", "m", "--no-run-dir")
        command = ("run", "rows.jsonl", "--tool", "kettles:publish", *options)
        done = await batch_agent(tmp_path, *command, "--worker", "kettles:work")
        assert (done.code, len(done.results)) == (0, 1), done.stderr
        for wrong, says in (
            ("kettles:NOTHING", "must be a function"),
            ("kettles:none", "there is no none in the module kettles"),
        ):
            refused = await batch_agent(tmp_path, *command, "--worker", wrong)
            assert refused.code != 0 and says in refused.stderr


async def test_a_worker_of_a_run_on_this_machine_ends_with_0_for_a_complete_run_and_with_3_without_its_process(
    tmp_path: Path,
) -> None:
    rows(tmp_path, {"text": "kettle"})
    async with ScriptedServer(lambda request: Say("ok"), models=["m"]) as server:
        command = ("--task", "Name {text}", "rows.jsonl", "--backend", server.backend_url, "--model", "m")
        assert (await batch_agent(tmp_path, "run", *command, "--run-dir", "here")).code == 0
    done = await batch_agent(tmp_path, "work", "here", "--wait", "0.1")
    assert (done.code, "0 rows done by this worker" in done.stderr) == (0, True), done.stderr
    gone = await batch_agent(tmp_path, "work", "nowhere", "--wait", "0.1")
    assert (gone.code, "nowhere is not running" in gone.stderr) == (3, True), gone.stderr
