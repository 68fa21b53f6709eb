"""A spec file that says a pipeline, run against a server on a real socket."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commandline import batch_agent

from batch_agent.testing import Fail, Request, Say, ScriptedServer

MODULE = """
from pydantic import BaseModel

class Word(BaseModel):
    word: str

def is_short(word):
    return len(word.word) < 5

def letters(word):
    return list(word.word)

def first(value):
    return (value.word if isinstance(value, Word) else value["word"])[0]

def joined(pair):
    return [f"{pair[0].word}+{pair[1]['word']}"]
"""
SPEC = """
model: m
max_retries: 0
inputs: [abc, toolong, xy]
stages:
  - map: {name: read, task: "read {input}", output_schema: "words:Word"}
  - filter: words:is_short
  - flat_map: words:letters
  - map: {name: letters, task: "letter {input}"}
  - reduce: {prompt: "Sum up {n}", tree: 3}
"""


def answer(request: Request) -> Say | Fail:
    text = request.text
    if text.startswith("Sum up"):
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return Say("".join(row["output"] for row in rows if row["status"] == "ok"))
    return Say(json.dumps({"word": text.split()[1]}) if text.startswith("read") else text.split()[1])


async def test_a_spec_file_says_a_pipeline_and_run_runs_it(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(MODULE)
    (tmp_path / "spec.yaml").write_text(SPEC)
    async with ScriptedServer(answer, models=["m"]) as server:
        command = ("run", "spec.yaml", "--backend", server.backend_url, "--run-dir", "here")
        status, out, err = await batch_agent(tmp_path, *command, "-v", "--log-file", "log.jsonl")
        assert status == 0, err
        assert "> row 0, turn 1: user: read abc" in err and "user: letter a" in err, "all stages are logged"
        assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2 * len(server.requests)
        [line] = out.splitlines()
        assert json.loads(line)["output"] == "abcxy"
        asked = len(server.requests)
        assert asked == 3 + 5 + 3
        assert {path.name for path in (tmp_path / "here").iterdir() if path.is_dir()} == {"read", "letters", "reduce"}
        status, out, err = await batch_agent(tmp_path, "resume", "here")
        assert (status, json.loads(out)["output"]) == (0, "abcxy"), err
        assert len(server.requests) == asked


async def test_what_is_wrong_with_a_stage_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(MODULE)
    wrong = {
        "filter: words:is_short": ("filter: words:is_shot", "number 2, filter: there is no is_shot in the module"),
        "tree: 3": ("tree: 1", "number 5, reduce: reduce_tree must be"),
        'task: "letter': ('tusk: "letter', "number 4, map: task is missing"),
        "- flat_map": ("- flatmap", "number 3 must be one of map, flat_map, filter, join, reduce"),
    }
    async with ScriptedServer(answer, models=["m"]) as server:
        for old, (new, says) in wrong.items():
            (tmp_path / "spec.yaml").write_text(SPEC.replace(old, new))
            status, _, err = await batch_agent(tmp_path, "run", "spec.yaml", "--backend", server.backend_url)
            assert status == 1 and says in err, err
        assert not server.requests


async def test_a_dry_run_has_rows_first_message_and_cost_of_each_stage(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(MODULE)
    (tmp_path / "spec.yaml").write_text(SPEC)
    command = ("run", "spec.yaml", "--backend", "vllm://nowhere:1", "--dry-run")
    status, out, err = await batch_agent(tmp_path, *command)
    assert status == 0, err
    for part in (
        "read (map) → is_short (filter) → letters (flat map)",
        "Stage 1 of 3: read\n",
        "read «abc»",
        "Stage 2 of 3: letters\n",
        "unknown: a flat_map comes before it",
        "letter «[input]»",
        "Stage 3 of 3: reduce\n",
    ):
        assert part in out, part
    (tmp_path / "spec.yaml").write_text(
        """
model: m
inputs: [abc, toolong, xy]
prices: {input: 1, output: 2}
stages:
  - map: {name: read, task: "read {input}", output_schema: "words:Word"}
  - map: {name: check, task: "check {word}", max_tokens: 10}
  - reduce: {prompt: "Sum up {n}", tree: 2}
"""
    )
    status, out, err = await batch_agent(tmp_path, *command, "--json")
    assert status == 0, err
    plan = json.loads(out)
    read, check, reduction = plan["stages"]
    assert (read["rows"], check["rows"], reduction["rows"]) == (3, 3, 3), "two parts and the whole"
    assert check["first_prompt"] == "check [word of read]"
    assert reduction["first_prompt"].startswith("Sum up 3")
    costs = [stage["estimated_cost"]["nothing_cached"] for stage in plan["stages"]]
    assert all(costs) and plan["estimated_cost"]["nothing_cached"] == sum(costs)


async def test_a_join_has_stages_and_inputs_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(MODULE)
    spec = """
model: m
inputs: [abc]
stages:
  - map: {task: "read {input}", output_schema: "words:Word"}
  - join: {inputs: [{word: aa}], stages: [{filter: "words:first"}], key: "words:first", other_key: "words:first"}
  - flat_map: words:joined
  - map: {name: last, task: "say {input}"}
"""
    (tmp_path / "spec.yaml").write_text(spec)
    async with ScriptedServer(answer, models=["m"]) as server:
        status, out, err = await batch_agent(tmp_path, "run", "spec.yaml", "--backend", server.backend_url)
    assert (status, json.loads(out)["output"]) == (0, "abc+aa"), err


async def test_a_reduction_that_fails_is_a_failed_line(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(MODULE)
    (tmp_path / "spec.yaml").write_text(SPEC)
    refusing = ScriptedServer(lambda r: Fail(400) if r.text.startswith("Sum up") else answer(r), models=["m"])
    async with refusing as server:
        command = ("run", "spec.yaml", "--backend", server.backend_url, "--run-dir", "here")
        status, out, _ = await batch_agent(tmp_path, *command)
    assert (status, json.loads(out)["error"]["type"]) == (2, "Rejected")


async def test_a_pipeline_over_files_counts_the_rows_of_all_stages_and_not_the_files(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text(name)
    (tmp_path / "spec.yaml").write_text(
        '{inputs: texts, stages: [{map: {task: "say {text}"}}, {reduce: {prompt: All}}]}'
    )
    async with ScriptedServer(models=["m"]) as server:
        command = ("run", "spec.yaml", "--backend", server.backend_url, "--no-run-dir", "--json")
        status, out, err = await batch_agent(tmp_path, *command, "--output", "out.jsonl")
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert (rows["total"], rows["done"]) == (None, 3)


async def test_a_pipeline_whose_server_is_down_names_its_record(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace('output_schema: "words:Word"', "max_turns: 1"))
    (tmp_path / "words.py").write_text(MODULE)
    command = ("run", "spec.yaml", "--backend", "vllm://127.0.0.1:9", "--run-dir", "here", "--set", "max_outage=0.2")
    status, _, err = await batch_agent(tmp_path, *command)
    assert status == 4 and "batch-agent resume here" in err, err
