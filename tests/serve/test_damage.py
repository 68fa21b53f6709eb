"""A batch of which a part is missing or damaged: it is made again, or the batch ends as failed with all it has."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.serve.served import Client, chat, serving
from tests.serve.test_kills import served
from tests.serve.test_openai_batches import backend

from batch_agent.serve import batches
from batch_agent.serve.recovery import check
from batch_agent.testing import Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply

LINES = [chat(f"l{n}") for n in range(20)] + [chat("late-0"), chat("late-1")]
Damage = Callable[[Path], object]


class Gate:
    """Answers late lines once it is open."""

    is_open = False

    def script(self, request: Request) -> ScriptedReply:
        return Say(f"echo {request.text}") if self.is_open or "late" not in request.text else Hang()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(batches, "GRACE_SECONDS", 0.05)


async def answered(client: Client, lines: list[Any] = LINES) -> Any:
    """Return a batch of which all lines but the late ones are answered."""
    batch = await client.create(lines)
    while (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 20:
        await asyncio.sleep(0.01)
    return batch


async def continued(
    data: Path, damage: Damage, *, cancels: bool = False, deletes: bool = False
) -> tuple[Any, list[Any], list[Any], int]:
    """Return a batch that was damaged while no server ran, its outcomes, and how many lines were asked again or for the
    first time."""
    gate = Gate()
    async with backend(gate.script) as model:
        async with serving(data, model) as client:
            batch = await answered(client)
            if deletes:
                await client.send("DELETE", f"/v1/files/{batch['input_file_id']}")
        asked, gate.is_open = model.received, True
        damage(data / "batches" / batch["id"])
        async with serving(data, model) as client:
            if cancels:
                await client.send("POST", f"/v1/batches/{batch['id']}/cancel")
            async with asyncio.timeout(30):
                done = await client.wait(batch["id"])
            output, errors = await client.outcomes(done)
            for state in ("succeeded", "failed", "waiting"):  # the page can show it
                await client.get(f"/serve/batches/{batch['id']}/rows?state={state}")
            return done, output, errors, model.received - asked


def without(*names: str) -> Damage:
    def remove(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def filled(name: str, content: bytes) -> Damage:
    def fill(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).write_bytes(content)

    return fill


def bad_bytes(folder: Path, name: str = "output.jsonl.part", line: int = 3) -> None:
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    lines[line] = lines[line][:10] + b"\x00\xff\x00" + lines[line][13:]
    (folder / name).write_bytes(b"".join(lines))


def bad_index(folder: Path) -> None:
    index = folder / "lines.db"
    index.write_bytes(index.read_bytes()[:4096] + b"no index" * 4096)


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        pytest.param(without("lines.db"), 0, id="no index"),
        pytest.param(bad_index, 0, id="damaged index"),
        pytest.param(filled("lines.db", b""), 0, id="empty index"),
        pytest.param(filled("lines.db", os.urandom(9000)), 0, id="index of garbage"),
        pytest.param(without("input.jsonl"), 0, id="no input, but the upload"),
        pytest.param(filled("input.jsonl", b"\x00" * 3000), 0, id="input of garbage, but the upload"),
        pytest.param(bad_bytes, 0, id="damaged outcomes"),
        pytest.param(filled("output.jsonl.part", os.urandom(3000)), 0, id="outcomes of garbage"),
        pytest.param(filled("output.jsonl.part", b'{"custom_id": 7}\n[]\nnull\n{}\n'), 0, id="outcomes of other lines"),
        pytest.param(both(bad_bytes, without("run")), 1, id="damaged outcomes and no record"),
        pytest.param(without("run"), 0, id="no record"),
        pytest.param(filled("run/journal.db", os.urandom(9000)), 0, id="record of garbage"),
    ],
)
async def test_a_part_that_is_missing_or_damaged_is_made_again(tmp_path: Path, damage: Damage, again: int) -> None:
    done, output, errors, asked = await continued(tmp_path, damage)
    assert done["status"] == "completed" and done["request_counts"] == {"total": 22, "completed": 22, "failed": 0}
    assert sorted(line["custom_id"] for line in output) == sorted(str(line["custom_id"]) for line in LINES)
    assert not errors and asked == 2 + again


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        pytest.param(without("input.jsonl"), "2 lines of the input cannot be read", id="no input"),
        pytest.param(filled("input.jsonl", b"\x00" * 3000), "2 lines of the input cannot be read", id="garbage"),
        pytest.param(without("lines.db", "input.jsonl"), "lines.db was missing, and its input.jsonl", id="no index"),
        pytest.param(
            without("lines.db", "input.jsonl", "output.jsonl.part"), "input.jsonl is missing", id="only its record"
        ),
    ],
)
async def test_a_batch_beyond_repair_ends_as_failed_with_every_answer_and_a_reason(
    tmp_path: Path, damage: Damage, told: str
) -> None:
    done, output, _, asked = await continued(tmp_path, damage, deletes=True)
    assert done["status"] == "failed" and told in done["errors"]["data"][0]["message"]
    assert done["request_counts"] == {"total": 22, "completed": 20, "failed": 2}
    assert len(output) == 20 and not asked


async def test_a_line_of_the_input_that_cannot_be_read_keeps_no_other_from_its_answer(tmp_path: Path) -> None:
    """The upload is the same file as the input, so that it is damaged too."""

    def damage(folder: Path) -> None:
        lines = (folder / "input.jsonl").read_bytes().splitlines(keepends=True)
        lines[20] = lines[20][:-9] + b"\xff\x00\xff" + lines[20][-6:]
        with (folder / "input.jsonl").open("r+b") as file:
            file.write(b"".join(lines))

    done, output, errors, asked = await continued(tmp_path, damage)
    assert done["status"] == "failed" and "21" in done["errors"]["data"][0]["message"]
    assert len(output) == 21 and asked == 1
    assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [("late-0", "batch_unreadable")]
    assert done["request_counts"] == {"total": 22, "completed": 21, "failed": 1}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        pytest.param(without("lines.db"), "lines.db: it was missing; it is made again from the input", id="index"),
        pytest.param(
            without("input.jsonl"), "input.jsonl: it is missing; it is made again from the upload", id="input"
        ),
        pytest.param(bad_bytes, "output.jsonl.part: 1 of its 20 lines cannot be read", id="outcomes"),
        pytest.param(shutil.rmtree, "it is missing; the batch, which is in_progress, ends as failed", id="folder"),
    ],
)
async def test_check_names_the_damage_and_what_a_start_does(tmp_path: Path, damage: Damage, told: str) -> None:
    async with backend(Gate().script) as model, serving(tmp_path, model) as client:
        batch = await answered(client)
        ended = await client.wait((await client.create([chat("a")]))["id"])
    assert not check(tmp_path)[1]
    damage(tmp_path / "batches" / batch["id"])
    (finding,) = check(tmp_path)[1]
    assert told in str(finding)
    (tmp_path / "batches" / ended["id"] / "output.jsonl").unlink()
    assert [ended["output_file_id"] in str(each) or ended["id"] in str(each) for each in check(tmp_path)[1]].count(True)


async def test_a_batch_without_its_folder_ends_as_failed(tmp_path: Path) -> None:
    done, output, errors, asked = await continued(tmp_path, shutil.rmtree)
    assert done["status"] == "failed" and "folder is missing" in done["errors"]["data"][0]["message"]
    assert not output and not errors and not asked


@pytest.mark.parametrize("damage", [without("input.jsonl"), without("lines.db", "input.jsonl"), bad_index, bad_bytes])
async def test_a_damaged_batch_can_be_cancelled(tmp_path: Path, damage: Damage) -> None:
    done, output, _, _ = await continued(tmp_path, damage, cancels=True, deletes=True)
    assert done["status"] in ("cancelled", "failed", "completed") and len(output) >= 20


async def test_a_killed_server_delivers_every_answer_without_index_and_with_damaged_outcomes(tmp_path: Path) -> None:
    gate = Gate()
    async with backend(gate.script) as model:
        async with served(tmp_path, model.backend_url) as client:
            batch = await answered(client)
        asked, gate.is_open = model.received, True
        both(without("lines.db"), bad_bytes)(tmp_path / "batches" / batch["id"])
        async with served(tmp_path, model.backend_url) as client:
            done = await client.wait(batch["id"])
            output, errors = await client.outcomes(done)
            assert done["status"] == "completed" and len(output) == 22 and not errors
        assert model.received == asked + 2


async def test_a_message_batch_gets_its_index_again(tmp_path: Path) -> None:
    route, gate = "/v1/messages/batches", Gate()
    requests = [
        {"custom_id": f"{name}-{n}", "params": {"model": "m", "max_tokens": 8, "messages": [_user(f"{name} {n}")]}}
        for name in ("early", "late")
        for n in range(3)
    ]
    async with backend(gate.script) as model:
        async with serving(tmp_path, model) as client:
            batch = await client.post(route, {"requests": requests})
            running = client.server.batches.running
            while batch["id"] not in running or running[batch["id"]].lines.left > 3:
                await asyncio.sleep(0.01)
        asked, gate.is_open = model.received, True
        without("lines.db")(tmp_path / "batches" / batch["id"])
        async with serving(tmp_path, model) as client:
            ended = await client.wait_messages(batch["id"])
            assert ended["request_counts"]["succeeded"] == 6 and model.received == asked + 3


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_batch_whose_input_is_gone_before_it_was_checked_ends_as_failed(tmp_path: Path) -> None:
    """As after a kill right after its creation."""
    async with backend() as model:
        async with serving(tmp_path, model) as client:
            batch = await client.wait((await client.create([chat("a")]))["id"])
            client.server.catalog.change_batch(batch["id"], _validating)
            shutil.rmtree(tmp_path / "batches" / batch["id"])
        async with serving(tmp_path, model) as client:
            done = await client.wait(batch["id"])
            assert done["status"] == "failed" and "input is missing" in done["errors"]["data"][0]["message"]


def _validating(batch: Any) -> Any:
    from dataclasses import replace

    return replace(batch, status="validating", total=0, completed=0, output_file="", times={})
