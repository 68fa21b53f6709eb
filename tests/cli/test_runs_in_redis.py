"""Commands on a run that is kept in Redis: what works on a directory works on its URL."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent
from batch_agent.cli.main import main
from batch_agent.messages import Usage
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedServer, ToolUse

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import RedisServer, needs_redis, redis_server

pytestmark = [needs_redis]
PASSWORD = "s3cret-words"
ROWS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
async def models() -> AsyncIterator[ScriptedServer]:
    def script(request: Any) -> Say | Fail:
        return Fail(400, {"error": "no"}) if "Row 7" in str(request.messages[-1]["content"]) else Say("fine")

    async with ScriptedServer(script) as started:
        yield started


@pytest.fixture
async def run(server: RedisServer, models: ScriptedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a run with eleven rows that are ok and one that failed."""
    url = f"{server.url}/{request.node.name}"
    inputs = [{"n": number} for number in range(ROWS)]
    await BatchAgent.run(inputs=inputs, task="Row {n}", backend=models.backend_url, model="m", run_dir=url)
    return url


class Said:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str, status: int = 0) -> str:
        self._capsys.readouterr()
        assert await asyncio.to_thread(main, arguments) == status
        captured = self._capsys.readouterr()
        return captured.out + captured.err


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


async def test_a_run_is_looked_at_listed_and_shown(said: Said, run: str, server: RedisServer, tmp_path: Path) -> None:
    status = json.loads(await said("status", run, "--json"))
    listed = json.loads(await said("runs", server.url, "--json"))
    await said("report", run, "--output", str(tmp_path / "report.html"))

    assert status["rows"] == {"total": ROWS, "done": 12, "ok": 11, "failed": 1, "resumed": 0}
    assert status["state"] == "complete" and status["tokens"] > 0
    assert status["summary"]["rows"]["ok"] == 11
    assert {"spec", "pieces"}.isdisjoint(status)
    assert [each["state"] for each in listed if each["run_dir"] == run] == ["complete"]
    assert "Row" in await said("show", run, "--row", "3") and "fine" in await said("show", run, "--row", "3")
    assert "7" in await said("show", run, "--failed")
    assert "fine" in (tmp_path / "report.html").read_text()


async def test_results_are_exported_in_input_order(said: Said, run: str, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    await said("export", run, "--output", str(output))
    records = [json.loads(line) for line in output.read_text().splitlines()]

    assert [record["index"] for record in records] == list(range(ROWS))
    assert [record["index"] for record in records if not record["ok"]] == [7]
    assert records[0]["output"] == "fine" and "worker" not in records[0]
    assert (await said("export", run, "--format", "csv")).count("\n") == ROWS + 1


async def test_a_run_goes_into_a_directory_and_back(
    said: Said, run: str, server: RedisServer, models: ScriptedServer, tmp_path: Path
) -> None:
    directory, back = tmp_path / "copied", f"{server.url}/back"
    await said("copy", run, str(directory))
    here, asked = json.loads(await said("status", str(directory), "--json")), models.received
    await said("copy", str(directory), back)
    resumed = await BatchAgent.run(
        inputs=[{"n": number} for number in range(ROWS)], task="Row {n}", backend=models.backend_url, model="m",
        run_dir=directory, resume=True, retry_failed=False,
    )  # fmt: skip
    there = json.loads(await said("status", back, "--json"))
    again = await BatchAgent.run(
        inputs=[{"n": number} for number in range(ROWS)], task="Row {n}", backend=models.backend_url, model="m",
        run_dir=back, resume=True, retry_failed=False,
    )  # fmt: skip

    assert here["rows"]["ok"] == there["rows"]["ok"] == 11
    assert [result.output for result in resumed] == [result.output for result in again]
    assert [message.content for message in resumed[0].messages][-1] == "fine"
    assert models.received == asked  # nothing was asked again
    assert "fine" in await said("show", back, "--row", "3")
    assert "not empty" in await said("copy", run, str(directory), status=1)
    assert "already" in await said("copy", str(directory), run, status=1)


PIPELINE = """
model: m
stages:
  - map: {{name: read, task: "Row {{n}}"}}
  - reduce: {{name: survey, prompt: "Sum up {{n}}", tree: 5}}
"""


async def test_commands_on_a_pipeline_do_what_they_do_in_a_directory(
    said: Said, server: RedisServer, models: ScriptedServer, tmp_path: Path
) -> None:
    spec, rows, directory = tmp_path / "spec.yaml", tmp_path / "rows.jsonl", tmp_path / "run"
    spec.write_text(PIPELINE.format())
    rows.write_text("".join(f'{{"n": {number}}}\n' for number in range(ROWS)))
    url, back, to = f"{server.url}/pipeline", f"{server.url}/pipeline-back", ("--output", str(tmp_path / "out"))
    given = (str(spec), "--inputs", str(rows), "--backend", models.backend_url, *to)
    await said("run", *given, "--run-dir", str(directory), status=2)
    await said("run", *given, "--run-dir", url, status=2)

    def counts(status: str) -> dict[str, Any]:
        stages = json.loads(status)["stages"]
        return {stage["name"]: (stage["rows"]["ok"], stage["rows"]["failed"]) for stage in stages}

    status = await said("status", url, "--json")
    assert counts(status) == {"read": (11, 1), "survey": (4, 0)}
    assert counts(status) == counts(await said("status", str(directory), "--json"))
    assert json.loads(status)["rows"]["ok"] == 15
    tokens = [stage["tokens"] for stage in json.loads(status)["stages"]]
    assert min(tokens) > 0 and sum(tokens) == json.loads(status)["tokens"]
    assert "Row 3" in await said("show", url, "--row", "read/3")
    assert "Row 7" in await said("show", url, "--failed")
    exported = await said("export", url, "--stage", "read", "--format", "csv")
    assert exported.count("\n") == ROWS + 1
    await said("report", url, "--output", str(tmp_path / "report.html"))

    asked = models.received
    await said("copy", url, str(tmp_path / "copied"))
    await said("copy", str(tmp_path / "copied"), back)
    assert "was not" not in await said("resume", back, "--no-retry-failed", status=2)
    assert models.received == asked  # nothing was asked again
    retried = await said("retry-failed", back, status=2)
    assert "retrying 1 row that failed: 1 of read" in retried and models.received == asked + 1
    assert counts(await said("status", back, "--json"))["read"] == (11, 1)
    await said("delete", back)
    assert "holds no run" in await said("status", back, status=1)
    assert "pipeline-back" not in await said("runs", server.url)


async def test_a_row_that_has_begun_goes_on_in_a_copy_of_its_directory_and_writes_once(
    said: Said, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends by its budget, after the write of a row and before its last answer."""

    def script(request: Request) -> Say:
        if "Row 1" in str(request.messages[0]["content"]) and request.turn == 0:
            return CallTools(ToolUse("note_row", {}), usage=Usage(10, completion_tokens=900))
        return Say("fine", usage=Usage(10, completion_tokens=1))

    (tmp_path / "copied_notes.py").write_text(
        "from batch_agent import Tool\n\n@Tool.define(effect='write')\ndef note_row() -> str:\n"
        f"    with open({str(tmp_path / 'notes')!r}, 'a') as notes:\n        notes.write('note\\n')\n"
        "    return 'noted'\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    directory, copied, out = tmp_path / "run", f"{server.url}/begun", ("--output", str(tmp_path / "out.jsonl"))
    async with ScriptedServer(script, models=["m"]) as models:
        spec = {"task": "Row {n}", "model": "m", "backend": models.backend_url, "tools": ["copied_notes:note_row"]}
        (tmp_path / "spec.json").write_text(json.dumps({**spec, "max_inflight": 1, "max_tokens": 900}))
        given = ("run", str(tmp_path / "spec.json"), "--inputs", str(tmp_path / "rows.jsonl"), *out)
        await said(*given, "--run-dir", str(directory), "--max-total-tokens", "1500", status=3)
        asked = models.received
        await said("copy", str(directory), copied)
        assert "Row 1" in await said("show", copied, "--unfinished")
        await said("resume", copied, "--max-total-tokens", "9000")
    assert [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["fine"] * 2
    assert (asked, models.received) == (2, 3)
    assert (tmp_path / "notes").read_text() == "note\n"


async def test_a_deleted_run_is_gone(said: Said, run: str) -> None:
    await said("delete", run)

    assert "holds no run" in await said("status", run, status=1)
    assert "holds no run" in await said("delete", run, status=1)


async def test_what_cannot_be_done_says_why(said: Said, run: str, tmp_path: Path) -> None:
    assert "no worker" in await said("control", run, "pause", status=4)
    assert "already holds a run" in await said("copy", run, run, status=1)
    assert "was not started by the command line" in await said("resume", run, status=1)
    assert "URL of a run in Redis" in await said("delete", str(tmp_path), status=1)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[RedisServer]:
    import redis

    with redis_server(tmp_path / "locked") as started:
        with redis.Redis(port=started.port) as client:
            client.config_set("requirepass", PASSWORD)
        yield started


async def test_a_run_that_could_not_be_recorded_is_not_said_to_be_resumable(
    said: Said, locked: RedisServer, models: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import redis

    spec = tmp_path / "spec.yaml"
    spec.write_text(f"task: Row {{n}}\nmodel: m\nbackend: {models.backend_url}\ninputs: [{{n: 1}}]\n")
    command = ("run", str(spec), "--output", str(tmp_path / "out.jsonl"), "--run-dir")
    refused = await said(*command, f"{locked.url}/kept", status=1)
    away = await said(*command, "redis://127.0.0.1:1/0/kept", status=1)
    with redis.Redis(port=locked.port, password=PASSWORD) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "100mb")
    recorded = await said(*command, f"redis://:{PASSWORD}@127.0.0.1:{locked.port}/0/kept")

    assert "BATCH_AGENT_REDIS_PASSWORD" in refused and "unreachable" in away
    assert "resume" not in refused + away
    assert "batch-agent show" in recorded
    assert "allkeys-lru" in caplog.text


async def test_the_password_is_in_no_word_and_in_no_key(
    said: Said, locked: RedisServer, models: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import redis

    url = f"redis://:{PASSWORD}@127.0.0.1:{locked.port}/0/kept"
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"task: Row {{n}}\nmodel: m\nbackend: {models.backend_url}\ninputs: rows.jsonl\n")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(9)))
    wrong = f"redis://:wrong-{PASSWORD}@127.0.0.1:{locked.port}/0/kept"
    words = [
        await said("run", str(spec), "--run-dir", url, "--output", str(tmp_path / "out.jsonl"), status=2),
        await said("status", url),
        await said("runs", url.removesuffix("/kept")),
        await said("resume", url, status=2),
        await said("retry-failed", url, status=2),
        await said("show", url, "--row", "1"),
        await said("export", url),
        await said("control", url, "pause", status=4),
        await said("copy", url, str(tmp_path / "copied")),
        await said("status", wrong, status=1),
        await said("show", f"{url}/a/b", status=1),
    ]
    with pytest.raises(SystemExit):
        await said("status", "here", url)
    with redis.Redis(port=locked.port, password=PASSWORD) as client:
        kept = b"".join(client.dump(key) or b"" for key in client.scan_iter())

    copied = "".join(path.read_text(errors="ignore") for path in (tmp_path / "copied").iterdir())
    assert PASSWORD not in "".join(words) + copied + caplog.text
    assert PASSWORD.encode() not in kept
    assert all(f"redis://127.0.0.1:{locked.port}/0" in each for each in (words[1], words[2], words[8]))
