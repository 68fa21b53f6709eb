"""Tools of a real MCP server, which the official SDK serves over standard input and output."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.tools.conftest import OpenPool
from tests.tools.mcp_tools.conftest import PLAIN_SERVER, command, needs_mcp
from tests.tools.mcp_tools.test_bad_mcp_servers import bad
from tests.tools.tool_calls import call

from batch_agent.errors import SpecError
from batch_agent.tools import Tool
from batch_agent.tools.schema import MAX_TOKENS

pytestmark = needs_mcp


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tool]]:
    """The notes and the tools of the server, which is asked for them once: each start of it takes a second of CPU."""
    path = tmp_path_factory.mktemp("mcp") / "notes"
    return path, Tool.mcp(command("stdio"), env={"NOTES": str(path)})


@pytest.fixture
def notes(listed: tuple[Path, list[Tool]]) -> Path:
    """What the server notes in this test: one line per call that ran."""
    listed[0].write_text("")
    return listed[0]


@pytest.fixture
def tools(listed: tuple[Path, list[Tool]], notes: Path) -> list[Tool]:
    return listed[1]


@pytest.fixture
def plain(notes: Path) -> list[Tool]:
    """The tools of a server that starts at once, for what is the same with any server."""
    return Tool.mcp(PLAIN_SERVER, env={"NOTES": str(notes), "GIVEN": "x"})


def ran(notes: Path, kind: str) -> int:
    return sum(line.startswith(kind) for line in notes.read_text().splitlines())


async def until(condition: object) -> None:
    """Waits for what another process does."""
    async with asyncio.timeout(30):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


async def test_the_tools_of_a_server_work_like_any_others(
    tools: list[Tool], notes: Path, open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {tool.name: tool for tool in tools}
    assert list(by_name) == sorted(by_name), "a server's own order is often random"
    assert by_name["look_up"].spec.parameters["properties"] == {"word": {"title": "Word", "type": "string"}}
    assert (by_name["look_up"].effect, by_name["look_up"].cacheable) == ("read", True)
    assert (by_name["add_line"].effect, by_name["add_line"].cacheable) == ("write", False)

    async with open_pool(tools) as pool:
        # Identical reads of many agents run once; writes run each time.
        reads = [pool.start(call("look_up", word="a")) for _ in range(20)]
        assert {(await read.wait()).text for read in reads} == {"a looked up 1 times"}
        assert (await pool.start(call("look_up", word="a")).wait()).source == "cache"
        writes = [pool.start(call("add_line", text="x")) for _ in range(3)]
        assert [(await write.wait()).text for write in writes] == ["added x"] * 3
        assert ran(notes, "add_line") == 3
        # What was read before a write may have changed with it.
        assert (await pool.start(call("look_up", word="a")).wait()).text == "a looked up 2 times"

        structured = await pool.start(call("weather", city="Rome")).wait()
        assert structured.text.count("21.5") == 1, "the text form and the structured one are the same"
        gallery = await pool.start(call("gallery")).wait()
        assert "image/png" in gallery.text and "https://example.org/a" in gallery.text and "a note" in gallery.text
        assert "not shown: the image is not a PNG" in gallery.text and not gallery.images
        painted = [await pool.start(call("paint")).wait() for _ in range(2)]
        assert [(each.text, each.source) for each in painted] == [
            ("a painting\n[image image/png, about 33 bytes]", "run"),
            ("a painting\n[image image/png, about 33 bytes]", "cache"),
        ]
        assert [[image.url[:22] for image in each.images] for each in painted] == [["data:image/png;base64,"]] * 2
        assert (await pool.start(call("dotted_name_x")).wait()).text == "dots"

        failed = await pool.start(call("fail", reason="because")).wait()
        assert not failed.ok and failed.text.startswith("Error: ")
        wrong = await pool.start(call("look_up", wort=1)).wait()
        assert not wrong.ok and '"word" is a required property' in wrong.text

        much = await pool.start(call("say_much", size=10 * MAX_TOKENS)).wait()
        assert "[cut: " in much.text
        too_much = await pool.start(call("say_much", size=9_000_000)).wait()
        assert "longer than" in too_much.text
        assert (await pool.start(call("flood", lines=500)).wait()).text == "flooded"


async def test_a_server_gets_none_of_our_secrets(
    plain: list[Tool], open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    async with open_pool(plain) as pool:
        names = (await pool.start(call("variables")).wait()).text.splitlines()
    assert "GIVEN" in names and "PATH" in names and "SOME_API_KEY" not in names


async def test_a_cancelled_call_is_cancelled_at_the_server_and_its_siblings_go_on(
    tools: list[Tool], notes: Path, open_pool: OpenPool
) -> None:
    async with open_pool(tools) as pool:
        long, other = pool.start(call("sleep_long", label="a")), pool.start(call("sleep_long", label="b"))
        await until(lambda: ran(notes, "began") == 2)
        long.abandon()
        await until(lambda: "ended a" in notes.read_text())
        assert (await pool.start(call("add_line", text="x")).wait()).ok
        assert "ended b" not in notes.read_text()
        other.abandon()


async def test_a_hanging_call_times_out_alone_and_progress_keeps_a_call_alive(
    tools: list[Tool], open_pool: OpenPool
) -> None:
    async with open_pool(tools, timeout=2.0) as pool:
        assert (await pool.start(call("add_line", text="x")).wait()).ok  # the server is up
        hanging = pool.start(call("sleep_long", label="a"))
        busy = pool.start(call("with_progress", steps=6, seconds=0.5))  # longer than the timeout in all
        assert "ran longer than 2 s" in (await hanging.wait()).text
        assert (await busy.wait()).text == "done"


async def test_a_server_that_dies_is_started_again_and_no_write_is_repeated(
    plain: list[Tool], notes: Path, open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pool(plain) as pool:
        died = await pool.start(call("die_writing", text="x")).wait()
        assert "outcome is unknown" in died.text and "I am dying" in died.text
        assert ran(notes, "die_writing") == 1
        again = await pool.start(call("die_once", text="x")).wait()
        assert again.text == "alive again" and ran(notes, "die_once") == 2
        always = await pool.start(call("die_always")).wait()
        assert not always.ok and "unknown" not in always.text and ran(notes, "die_always") == 2
        assert (await pool.start(call("look_up", word="b")).wait()).ok


async def test_no_process_of_a_server_outlives_the_run(plain: list[Tool], open_pool: OpenPool) -> None:
    async with open_pool(plain) as pool:
        server, child = map(int, (await pool.start(call("process_ids")).wait()).text.split())
        os.kill(server, 0)
        os.kill(child, 0)
    for process in (server, child):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


async def test_a_tool_can_be_called_without_a_run(plain: list[Tool]) -> None:
    look_up = next(tool for tool in plain if tool.name == "look_up")
    assert await look_up(word="w") == "w looked up 1 times"


def test_names_can_be_chosen_and_prefixed() -> None:
    [tool] = bad("fine", only=["look"], prefix="notes_", reads=["look"], timeout=3)
    assert (tool.name, tool.effect, tool.timeout) == ("notes_look", "read", 3)
    with pytest.raises(SpecError, match="has no tool 'add'; it has look"):
        bad("fine", only=["add"])
