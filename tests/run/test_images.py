"""Rows with pictures: what is sent, what is kept, and what becomes of those that cannot be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from tests.files.test_pictures import png

from batch_agent import BatchAgent, Image, SpecError, Tool
from batch_agent.backends.base import Capabilities
from batch_agent.testing import CallTools, Fail, MessagesServer, Say, ScriptedBackend, ToolUse

URL = "https://example.org/cat.png"


def parts(backend: ScriptedBackend, number: int = 0) -> Any:
    return backend.requests[number].messages[-1]["content"]


def shown(part: Any) -> str:
    return part["text"] if part["type"] == "text" else part["image_url"]["url"][:22]


async def ask(task: str, *rows: object, **options: Any) -> tuple[ScriptedBackend, Any]:
    backend = ScriptedBackend(lambda request: Say("seen"))
    return backend, await BatchAgent.run(task=task, inputs=list(rows), backend=backend, **options)


async def test_a_picture_stands_where_the_task_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    backend, results = await ask("Before {photo} after {n}.", {"photo": Image(tmp_path / "a.png"), "n": 1})
    assert results[0].output == "seen"
    assert [shown(part) for part in parts(backend)] == ["Before ", "data:image/png;base64,", " after 1."]


async def test_a_picture_that_the_task_does_not_name_follows_it() -> None:
    backend, _ = await ask("What is this?", {"photo": Image(URL)})
    assert parts(backend) == [
        {"type": "text", "text": "What is this?\n"},
        {"type": "image_url", "image_url": {"url": URL}},
    ]


class Row(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    photo: Image
    n: int = 1


@dataclass
class Plain:
    photo: Image
    n: int = 1


@pytest.mark.parametrize("row", [Row(photo=Image(URL)), Plain(Image(URL)), {"photo": [Image(URL)], "n": 1}])
async def test_rows_of_every_kind_may_hold_pictures(row: object) -> None:
    backend, _ = await ask("{n}: {photo}", row)
    assert [part["type"] for part in parts(backend)] == ["text", "image_url"]


async def test_a_row_may_be_a_picture() -> None:
    backend, _ = await ask("Describe {input}", Image(URL))
    assert [part["type"] for part in parts(backend)] == ["text", "image_url"]


async def test_several_pictures_of_one_field_come_in_their_order() -> None:
    backend, _ = await ask("{pages}", {"pages": [Image(URL + "?1"), Image(URL + "?2")]})
    assert [part["image_url"]["url"] for part in parts(backend) if part["type"] == "image_url"] == [
        URL + "?1",
        URL + "?2",
    ]


async def test_jinja_tasks_show_pictures_too() -> None:
    backend, _ = await ask("{% if photo %}Look: {{ photo }}{% endif %}", {"photo": Image(URL)}, template="jinja")
    assert [part["type"] for part in parts(backend)] == ["text", "image_url"]


async def test_named_fields_are_pictures_whatever_form_they_have(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"photo": "a.png"}, {"photo": png()}, {"photo": URL}, {"photo": ""}]
    backend, results = await ask("Look at {photo}.", *rows, images=["photo"], image_root=tmp_path, max_inflight=1)
    assert all(results)
    kinds = [c if isinstance(c, str) else [p["type"] for p in c] for c in (parts(backend, n) for n in range(4))]
    assert kinds == [["text", "image_url", "text"]] * 3 + ["Look at ."]


async def test_a_picture_that_cannot_be_read_fails_its_row_alone() -> None:
    _, results = await ask("{photo}", {"photo": Image("/nowhere.png")}, {"photo": Image(URL)})
    assert [result.ok for result in results] == [False, True]
    assert "/nowhere.png cannot be read" in results[0].error.message


async def test_results_hold_the_mark_of_a_picture_and_not_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    _, results = await ask("{photo}", {"photo": Image(tmp_path / "a.png")})
    assert results[0].messages[-2].content.startswith("[image sha256:")


async def test_a_changed_picture_is_another_question_and_the_record_holds_no_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "resume": True}
    row = {"photo": Image(file), "note": Image(png(3, 3))}
    asked = [len((await ask("{photo} {note}", row, **options))[0].requests) for _ in range(2)]
    file.write_bytes(png(2, 2))
    with pytest.raises(SpecError, match=r"kept 0, to send 1 \(1 changed\)"):
        await ask("{photo} {note}", row, **options)
    asked.append(len((await ask("{photo} {note}", row, **options, on_change="resend"))[0].requests))
    assert asked == [1, 0, 1]
    recorded = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"base64" not in recorded
    line = json.loads((tmp_path / "run" / "results.jsonl").read_text().splitlines()[0])
    assert line["input"]["photo"] == str(file)
    assert line["input"]["note"].startswith("[image sha256:")


async def test_a_backend_that_cannot_see_is_told_before_anything_is_sent() -> None:
    blind = ScriptedBackend(capabilities=Capabilities(images=False))
    with pytest.raises(SpecError, match="images: scripted:// cannot be shown images"):
        await BatchAgent.run(task="{p}", inputs=[{"p": URL}], images=["p"], backend=blind)


async def test_a_picture_for_a_backend_that_cannot_see_fails_its_row() -> None:
    blind = ScriptedBackend(capabilities=Capabilities(images=False))
    results = await BatchAgent.run(task="{p}", inputs=[{"p": Image(URL)}, {"p": "words"}], backend=blind)
    assert [result.ok for result in results] == [False, True]
    assert "cannot be shown images" in str(results[0].error)


async def test_a_field_that_no_row_has_is_an_error_at_once() -> None:
    with pytest.raises(SpecError, match="images: the first input has no field 'photo'"):
        await ask("{p}", {"p": URL}, images=["photo"])


async def test_a_picture_counts_as_the_tokens_it_takes() -> None:
    with_picture = {"photo": Image(png(1000, 1000))}
    _, results = await ask("{photo}", with_picture, model_max_context=1200)
    assert results[0].error.type == "OVERSIZED"


async def test_a_long_text_beside_a_picture_is_done_in_parts_that_all_see_it() -> None:
    row = {"photo": Image(URL), "text": "word " * 6000}
    backend, results = await ask("{photo} {text}", row, model_max_context=4000, oversized="chunk")
    assert results[0].chunks > 1
    first = [parts(backend, number) for number in range(results[0].chunks)]
    assert all("image_url" in {part["type"] for part in content} for content in first)


# Images in results of tools


@Tool.define(effect="write")
async def paint() -> tuple[str, Image]:
    """Paint."""
    return "painted", Image(png())


def ask_for_paint(request: Any) -> Any:
    if not any(message["role"] == "tool" for message in request.messages):
        return CallTools(ToolUse("paint", "{}"), ToolUse("paint", "{}"))
    return Say("seen")


async def paintings(backend: object, **options: Any) -> Any:
    return await BatchAgent.run(task="{input}", inputs=["a"], tools=[paint], backend=backend, **options)


async def test_images_of_tools_follow_the_results_in_the_chat_wire() -> None:
    backend = ScriptedBackend(ask_for_paint)
    results = await paintings(backend)
    assert results[0].output == "seen"
    *_, called, first, second, shown_ = backend.requests[1].messages
    assert called["role"] == "assistant"
    assert [first["content"], second["content"], shown_["role"]] == ["painted", "painted", "user"]
    assert [shown(part) for part in shown_["content"]] == ["Images from paint:", "data:image/png;base64,"] * 2
    assert results[0].messages[-2].content.startswith("painted[image sha256:"), "results hold no bytes"


async def test_images_of_tools_are_in_the_result_in_anthropics_wire() -> None:
    def script(request: Any) -> Any:
        return Say("seen") if len(request.body["messages"]) > 1 else CallTools(ToolUse("paint", "{}"))

    async with MessagesServer(script) as server:
        results = await paintings(server.backend_url, model="m")
        assert results[0].output == "seen", results[0].error
        (block,) = server.requests[1].body["messages"][-1]["content"]
        assert [part["type"] for part in block["content"]] == ["text", "image"]
        assert block["content"][1]["source"]["media_type"] == "image/png"


async def test_a_model_that_refuses_images_is_asked_without_them_and_later_rows_too() -> None:
    def script(request: Any) -> Any:
        if "data:image" in request.raw.decode():
            return Fail(400, {"error": {"message": "this is not a multimodal model"}})
        return ask_for_paint(request)

    backend = ScriptedBackend(script)
    options: dict[str, Any] = {"tools": [paint], "backend": backend, "max_inflight": 1}
    results = await BatchAgent.run(task="{input}", inputs=[*map(str, range(40))], **options)
    assert [result.output for result in results] == ["seen"] * 40
    shown_to = {request.messages[0]["content"] for request in backend.requests if "data:image" in request.raw.decode()}
    assert 3 <= len(shown_to) < 20, sorted(shown_to)
    assert backend.requests[-1].messages[-1]["content"] == "painted\n[not shown: images are not accepted here]"


async def test_one_refused_image_does_not_hide_those_of_other_rows() -> None:
    def script(request: Any) -> Any:
        is_bad = request.messages[0]["content"] == "a" and "data:image" in request.raw.decode()
        return Fail(400, {"error": {"message": "the image is too large"}}) if is_bad else ask_for_paint(request)

    backend = ScriptedBackend(script)
    options: dict[str, Any] = {"tools": [paint], "backend": backend, "max_inflight": 1}
    assert all(await BatchAgent.run(task="{input}", inputs=list("abcdef"), **options))
    seen = {request.messages[0]["content"] for request in backend.requests if "data:image" in request.raw.decode()}
    assert seen == set("abcdef")


async def test_a_backend_without_images_gets_the_text() -> None:
    backend = ScriptedBackend(ask_for_paint, capabilities=Capabilities(images=False))
    results = await paintings(backend)
    assert results[0].output == "seen"
    assert backend.requests[1].messages[-1]["content"] == "painted\n[not shown: images are not accepted here]"


async def test_images_of_tools_are_recorded_and_shown_again_after_a_resume(tmp_path: Path) -> None:
    def broken(request: Any) -> Any:
        asked = ask_for_paint(request)
        return asked if isinstance(asked, CallTools) else Fail(400)

    options: dict[str, Any] = {"run_dir": tmp_path / "run", "resume": True, "retry_from": "failure"}
    first, second = ScriptedBackend(broken), ScriptedBackend(ask_for_paint)
    assert not (await paintings(first, **options))[0].ok
    assert (await paintings(second, **options))[0].output == "seen"
    (again,) = second.requests
    assert [shown(part) for part in again.messages[-1]["content"]] == [
        "Images from paint:",
        "data:image/png;base64,",
    ] * 2, "the recorded calls are not made again"
    assert (await paintings(ScriptedBackend(), **options))[0].output == "seen"
