"""Hostfiles that change while a fleet or a proxy is in use."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.fleet.proxies import chat, get, nobody, proxy, servers

from batch_agent import BatchAgent, Fleet
from batch_agent.backends.base import Capabilities
from batch_agent.fleet.hostfile import WATCH_SECONDS, Hostfile
from batch_agent.testing import Say, ScriptedBackend, ScriptedServer, virtual_clock

BAD_LINES = ["gpu-1 weight=much", "ftp://gpu-1"]


async def look() -> None:
    """Long enough for a change of the file to be seen."""
    await asyncio.sleep(2 * WATCH_SECONDS)


@virtual_clock
async def test_lines_join_leave_and_change_a_fleet(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a\nb weight=3\n")
    fleet = Fleet.from_hostfile(hosts)
    hosts.write_text("b weight=2 context=4096 model=m\nc\n")  # before it is in use
    async with fleet:
        await look()
        assert list(fleet.servers) == ["vllm://b:8000", "vllm://c:8000"]
        member = next(iter(fleet.servers.values()))
        assert (member.weight, member.context, member.models) == (2.0, 4096, frozenset({"m"}))
        hosts.write_text("b\nc\n")
        await look()
        member = next(iter(fleet.servers.values()))
        assert (member.weight, member.context, member.models) == (1.0, None, None)


@virtual_clock
async def test_a_line_that_no_longer_has_the_selected_tag_leaves(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a role=worker\nb role=worker\n")
    async with Fleet.from_hostfile(hosts, {"role": ["worker"]}) as fleet:
        hosts.write_text("a role=worker\nb role=critic\n")
        await look()
        assert list(fleet.servers) == ["vllm://a:8000"]


async def servers_of_rows(hosts: Path, rows: int, options: str) -> list[str]:
    """The servers a and b that answered the rows, in order. After 100 rows the line of b gets the options."""
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(ScriptedServer(lambda request, name=name: Say(name, latency=0.5)))
            for name in "ab"
        ]
        hosts.write_text(f"{a.address}\n{b.address}\n")
        outputs = list[str]()
        async with BatchAgent.open(
            task="{input}", inputs=map(str, range(rows)), backend=f"fleet://{hosts}", model="m", max_inflight=16
        ) as run:
            async for result in run.results():
                outputs.append(str(result.output))
                if len(outputs) == 100:
                    hosts.write_text(f"{a.address}\n{b.address} {options}\n")
    assert len(outputs) == rows
    return outputs


@virtual_clock
async def test_a_run_under_way_follows_weights_and_loses_nothing(tmp_path: Path) -> None:
    outputs = await servers_of_rows(tmp_path / "hosts.txt", 600, "weight=7")
    before, after = Counter(outputs[:100]), Counter(outputs[-200:])
    assert before["a"] > 40
    assert after["b"] > 2 * after["a"] > 0


@virtual_clock
async def test_a_server_that_gets_another_model_gets_no_more_requests_for_this_one(tmp_path: Path) -> None:
    outputs = await servers_of_rows(tmp_path / "hosts.txt", 300, "model=other")
    assert Counter(outputs[:100])["b"] > 20
    assert set(outputs[-50:]) == {"a"}


@virtual_clock
async def test_a_weight_moves_the_limit_of_a_server_that_has_a_number() -> None:
    fleet = Fleet([ScriptedBackend(lambda request: Say("x"), capabilities=Capabilities(default_inflight=8))])
    assert next(iter(fleet.servers.values())).default_inflight == 8
    fleet.add(ScriptedBackend(capabilities=Capabilities(default_inflight=8)), weight=2)
    assert list(fleet.servers.values())[1].default_inflight == 16


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_changes_nothing_and_is_warned_of_once(
    bad: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_clock
    async def scenario() -> None:
        hosts = tmp_path / "hosts.txt"
        hosts.write_text("a\nb\n")
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(Fleet.from_hostfile(hosts))
            address = await stack.enter_async_context(proxy("a", "b", hostfile=hosts))
            hosts.write_text(f"a weight=5\nc\n{bad}\n")
            for _ in range(4):
                await look()
            hosts.touch()
            await look()
            _, status = await get(address, "/status")
        assert list(fleet.servers) == ["vllm://a:8000", "vllm://b:8000"]
        assert next(iter(fleet.servers.values())).weight == 1.0
        assert [(place["endpoint"], place["tags"]) for place in status["endpoints"]] == [  # type: ignore[attr-defined]
            ("vllm://a:8000", {}),
            ("vllm://b:8000", {}),
        ]

    caplog.set_level(logging.WARNING, "batch_agent")
    scenario()
    said = [message for message in caplog.messages if "stay as they were" in message]
    assert len(said) == 2  # the fleet and the proxy
    assert all(f"line 3 of the hostfile '{tmp_path / 'hosts.txt'}'" in message for message in said)


@virtual_clock
async def test_a_file_that_goes_away_or_is_empty_changes_nothing(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a\n")
    async with Fleet.from_hostfile(hosts) as fleet:
        hosts.unlink()
        await look()
        hosts.write_text("# nobody\n")
        await look()
        assert list(fleet.servers) == ["vllm://a:8000"]
        hosts.write_text("b\n")
        await look()
        assert list(fleet.servers) == ["vllm://b:8000"]


@virtual_clock
async def test_a_content_that_is_still_being_written_is_not_applied(tmp_path: Path) -> None:
    hosts, seen = tmp_path / "hosts.txt", list[list[str]]()
    hosts.write_text("gpu-1")
    file = Hostfile(hosts)
    file.read()
    following = asyncio.create_task(file.follow(lambda found: seen.append([host.host for host in found])))
    hosts.write_text("gpu-1\ngpu-2")
    await asyncio.sleep(WATCH_SECONDS + 0.05)
    hosts.write_text("gpu-1\ngpu-22\n")
    await look()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert seen == [["gpu-1", "gpu-22"]]


@virtual_clock
async def test_lines_join_leave_and_change_a_proxy(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    async with AsyncExitStack() as stack:
        first, second = await servers(stack, "first", "second")
        hosts.write_text(first.address)
        address = await stack.enter_async_context(proxy(first.address, hostfile=hosts, max_inflight=10))
        assert await chat(address) == (200, "first")
        hosts.write_text(f"{first.address} weight=2 model=m role=worker\n{nobody()}")
        await look()
        _, status = await get(address, "/status")
        kept = status["endpoints"][0]  # type: ignore[index]
        assert (kept["limit"], kept["requests"]) == (20, 1)
        assert kept["tags"] == {"weight": "2", "model": "m", "role": "worker"}
        hosts.write_text(second.address)
        await look()
        assert await chat(address) == (200, "second")
