"""Files in and out of the whole command, against a server on a real socket."""

import asyncio
import csv
import json
from pathlib import Path

from tests.cli.commandline import batch_agent, read_results, rows, serving

from batch_agent.testing import CallTools, Fail, Request, Say, ToolUse


async def test_results_in_order_come_out_as_the_rows_went_in(tmp_path: Path) -> None:
    rows(tmp_path, *map(str, range(20)))
    others = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.text == "Say 0":
            await others.wait()
        return Say("done")

    arguments = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--output", "out.jsonl", "--ordered")
    async with serving(tmp_path, script) as server:
        running = asyncio.create_task(batch_agent(tmp_path, *arguments))
        await server.wait_until(lambda: server.received == 20 and server.inflight == 1)
        assert (tmp_path / "out.jsonl").read_bytes() == b""
        others.set()
        assert (await running).code == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(20))
    assert not (tmp_path / "out.jsonl.waiting.jsonl").exists()


async def test_a_table_in_makes_a_table_out(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('input,more\na,"x, y"\nb\n')
    async with serving(tmp_path, lambda request: Say(request.text.upper())):
        outcome = await batch_agent(
            tmp_path, "run", "spec.yaml", "--inputs", "rows.csv", "--output", "out.csv", "--ordered"
        )
    assert outcome.code == 2, outcome.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        good, bad = csv.DictReader(file)
    assert (good["output"], good["input"], good["more"], good["ok"]) == ("SAY A", "a", "x, y", "true")
    assert (bad["ok"], bad["error_type"]) == ("false", "InputError") and "line 3 has 1 cells" in bad["error_message"]


async def test_an_openai_batch_file_runs_with_a_task_of_its_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    line = {"custom_id": "r-7", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "body": {}}) + "\n")
    async with serving(tmp_path, lambda request: Say(request.text)) as server:
        spec = f"task: '{{prompt}}'\nmodel: m\nbackend: {server.backend_url}\n"
        (tmp_path / "spec.yaml").write_text(spec)
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "batch.jsonl")
    good, bad = outcome.results
    assert (good["job_id"], good["output"]) == ("r-7", "Why?")
    assert "batch.jsonl line 2 is an OpenAI batch line that cannot be used" in str(bad["error"])


async def test_a_directory_of_texts_is_a_batch_and_keeps_its_results_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("alpha")
    (tmp_path / "texts" / "b.bin").write_bytes(b"\xff\x00")
    async with serving(tmp_path, lambda request: Say(request.text)) as server:
        spec = f"task: '{{name}}: {{text}}'\nmodel: m\nbackend: {server.backend_url}\ninputs: texts\n"
        (tmp_path / "spec.yaml").write_text(spec)
        inside = await batch_agent(tmp_path, "run", "spec.yaml", "--output", "texts/out.jsonl")
        await batch_agent(tmp_path, "run", "spec.yaml", "--output", "out.jsonl")
    assert inside.code == 1 and "is in the directory of the inputs" in inside.stderr
    good, bad = read_results((tmp_path / "out.jsonl").read_text())
    assert good["output"] == "a.md: alpha"
    assert "b.bin is not UTF-8" in str(bad["error"])


async def test_exported_conversations_are_what_was_sent_and_answered(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(
        "print('imported')\n"
        "from pydantic import BaseModel\n"
        "class Answer(BaseModel):\n    value: int\n"
        "def look(key: str) -> str:\n    return key * 2\n"
    )
    policy = "Be kind. " * 200  # the same in every row, so it moves to the system prompt
    rows(tmp_path, *({"input": name, "policy": policy} for name in ("a", "b", "fails")))

    def script(request: Request) -> Say | CallTools | Fail:
        if "fails" in str(request.messages):
            return Fail(400)
        return [CallTools(ToolUse("look", {"key": "k"})), Say("not a number"), Say('{"value": 3}')][request.turn]

    async with serving(tmp_path, script) as server:
        spec = f"task: 'Say {{input}}. {{policy}}'\nmodel: m\nbackend: {server.backend_url}\ntools: ['things:look']\n"
        (tmp_path / "spec.yaml").write_text(f"{spec}output_schema: 'things:Answer'\nmax_retries: 1\n")
        ran = await batch_agent(
            tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--run-dir", "run", "--output", "out.jsonl"
        )
    assert ran.code == 2, ran.stderr
    sent = {str(request.messages[1]["content"]): request for request in server.requests if request.turn == 2}
    exported = await batch_agent(tmp_path, "export", "run", "--format", "messages")
    assert exported.code == 0, exported.stderr
    assert exported.stderr == "imported\nbatch-agent: skipped 1 row that failed; --format jsonl includes them\n"
    lines = [json.loads(line) for line in exported.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        *before, last = line["messages"]
        request = sent.pop(before[1]["content"])
        assert [(m["role"], m["content"] or "") for m in before] == [
            (m["role"], m["content"] or "") for m in request.messages
        ]
        assert [m["role"] for m in before] == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert "Be kind." in before[0]["content"] and "Be kind." not in before[1]["content"]
        assert last == {"role": "assistant", "content": '{"value": 3}'}
        assert [tool["function"]["name"] for tool in line["tools"]] == ["look"]

    to_file = await batch_agent(tmp_path, "export", "run", "--format", "messages", "--output", "chat.jsonl")
    assert to_file.code == 0 and (tmp_path / "chat.jsonl").read_text() == exported.stdout
    table = await batch_agent(tmp_path, "export", "run", "--format", "csv")
    good, _, bad = csv.DictReader(table.stdout.splitlines())
    assert (good["output.value"], bad["error_type"]) == ("3", "Rejected")

    (tmp_path / "spec.yaml").write_text(spec)
    changed = await batch_agent(tmp_path, "export", "run", "--format", "messages", "--output", "chat.jsonl")
    assert changed.code == 1 and "have changed since run was recorded" in changed.stderr
    assert (tmp_path / "chat.jsonl").read_text() == exported.stdout
