"""Every socket on which a command listens keeps the rules of the door (docs/security.md)."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from tests.cli.commandline import started

from batch_agent import AgentContext, BatchAgent
from batch_agent.cli.main import COMMANDS, add_arguments
from batch_agent.testing import Hang, Say, ScriptedServer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

HEAD = b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
EVIL = b"http://evil.example"
# What anyone may send to any door, and the statuses that they may get. None: the connection is closed at once.
RULES: dict[str, tuple[bytes, set[int | None]]] = {
    "another host": (b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", {403}),
    "a host that begins like ours": (
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\nConnection: close\r\n\r\n",
        {403},
    ),
    "no host": (b"GET / HTTP/1.0\r\n\r\n", {400, 403}),
    "another page": (b"POST /tick" + HEAD + b"Origin: " + EVIL + b"\r\nContent-Length: 2\r\n\r\n{}", {403}),
    "a page without origin": (b"GET /status" + HEAD + b"Origin: null\r\n\r\n", {403}),
    "an image of another page": (
        b"GET /" + HEAD + b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n\r\n",
        {403},
    ),
    "a preflight": (
        b"OPTIONS /v1/chat/completions"
        + HEAD
        + b"Origin: "
        + EVIL
        + b"\r\nAccess-Control-Request-Method: POST\r\n\r\n",
        {403},
    ),
    "a long line": (b"GET /" + b"x" * 200_000 + HEAD + b"\r\n", {400, 414, None}),
    "a long header": (b"GET /" + HEAD + b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n", {400, 431, None}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n", {400, None}),
    "deep JSON": (
        b"POST /v1/chat/completions" + HEAD + b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000,
        {400, 401, 403, 404, 502, 503},
    ),
    "a deep observation": (
        b"POST /tick" + HEAD + b"Content-Length: 100005\r\n\r\n" + b'{"a":' + b"[" * 50_000 + b"]" * 50_000,
        {400, 401, 403, 404},
    ),
    "a huge body": (b"POST /tick" + HEAD + b"Content-Length: 99999999999\r\n\r\n", {401, 403, 404, 413}),
}


async def status_of(port: int, request: bytes) -> int | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            line = await reader.readline()
        return int(line.split()[1]) if line else None
    except ConnectionError:
        return None
    finally:
        writer.close()


def listening(pid: int) -> dict[int, str]:
    """The addresses on which a process and its children listen, by port. A Unix socket is not among them."""
    inodes = set()
    for each in (pid, *_children(pid)):
        with suppress(FileNotFoundError):  # it has ended
            for descriptor in Path(f"/proc/{each}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(str(descriptor.readlink()))
    found = {}
    for line in [*_lines("/proc/net/tcp"), *_lines("/proc/net/tcp6")]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, _, port = fields[1].partition(":")
            found[int(port, 16)] = address
    return found


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:]


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _children(int(child))


LOOPBACK = "0100007F"  # as /proc writes 127.0.0.1


async def sockets(pid: int, count: int) -> dict[int, str]:
    """The sockets of a process, once there are as many as are expected."""
    async with asyncio.timeout(60):
        while len(found := listening(pid)) < count:
            await asyncio.sleep(0.05)
    return found


async def assert_rules(ports: dict[int, str]) -> None:
    assert set(ports.values()) == {LOOPBACK}
    for port in ports:
        for name, (request, statuses) in RULES.items():
            status = await status_of(port, request)
            assert status in statuses, f"port {port}, {name}: {status}"


@asynccontextmanager
async def model_server() -> AsyncIterator[str]:
    async with ScriptedServer(lambda _: Hang(), models=["m"]) as server:
        yield server.address


def fleet_proxy(path: Path, server: str) -> Sequence[str]:
    (path / "hosts.txt").write_text(server)
    return ["fleet", "proxy", "hosts.txt", "--port", "0"]


def ticks_serve(path: Path, server: str) -> Sequence[str]:
    (path / "agents.yaml").write_text(f"backend: vllm://{server}\nmodel: m\ntools: [{{name: rest}}]\nagents: [ann]\n")
    return ["ticks", "serve", "--agents", "agents.yaml", "--port", "0"]


def simulate(path: Path, server: str) -> Sequence[str]:
    return ["simulate", "--port", "0"]


def serve(path: Path, server: str) -> Sequence[str]:
    return ["serve", "--backend", f"vllm://{server}", "--port", "0"]


def view(path: Path, server: str) -> Sequence[str]:
    BatchAgent.run_sync(task="{input}", inputs=["a"], backend="simulated://", run_dir=path / "runs" / "r")
    return ["view", "--port", "0"]


def review(path: Path, server: str) -> Sequence[str]:
    BatchAgent.run_sync(task="{input}", inputs=["a"], backend="simulated://", run_dir=path / "r")
    return ["review", "r", "--page", "--port", "0"]


def run_with_page_and_metrics(path: Path, server: str) -> Sequence[str]:
    (path / "rows.txt").write_text("one\n")
    backend = f"--backend=vllm://{server}"
    return ["run", "--task", "{input}", "rows.txt", backend, "--metrics-port", "0", "--run-dir", "r", "--view"]


# The sockets of each command that listens.
COMMAND_LINES: dict[str, tuple[Callable[[Path, str], Sequence[str]], int]] = {
    "fleet": (fleet_proxy, 1),
    "ticks": (ticks_serve, 1),
    "serve": (serve, 1),
    "simulate": (simulate, 1),
    "view": (view, 1),
    "review": (review, 1),
    "run": (run_with_page_and_metrics, 2),
}
# They start a run as ``run`` does, with the same code.
LIKE_RUN = {"resume", "retry-failed", "plan", "work", "pipeline"}


@pytest.mark.parametrize("name", COMMAND_LINES)
async def test_every_socket_of_a_command_keeps_the_rules_of_the_door(name: str, tmp_path: Path) -> None:
    line, count = COMMAND_LINES[name]
    async with model_server() as server, started(tmp_path, *line(tmp_path, server)) as process:
        await assert_rules(await sockets(process.pid, count))
        assert process.returncode is None
        process.kill()


async def test_the_gateway_keeps_the_rules_of_the_door() -> None:
    async def work(row: str, ctx: AgentContext) -> str:
        port = int(ctx.base_url.rpartition(":")[2].partition("/")[0])
        assert listening(os.getpid())[port] == LOOPBACK
        await assert_rules({port: LOOPBACK})
        headers = {"Authorization": f"Bearer {ctx.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for dialect in ("chat/completions", "responses", "messages"):
                for body in (b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"messages":[{"x":"\\ud800"}]}'):
                    async with session.post(f"{ctx.base_url}/{dialect}", data=body) as answer:
                        assert answer.status == 400
                        assert (await answer.json())["error"]["message"]
        return "all refused"

    async with ScriptedServer(lambda _: Say("ok"), models=["m"]) as server:
        [result] = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url)
    assert result.output == "all refused", result.error


def test_no_command_listens_that_is_not_asked_here() -> None:
    def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from flags(inner)

    listen = set()
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        add_arguments(name, parser)
        if {"--port", "--metrics-port", "--view"} & set(flags(parser)):
            listen.add(name)
    assert listen - LIKE_RUN == COMMAND_LINES.keys()


async def test_an_address_for_other_machines_needs_a_key(tmp_path: Path) -> None:
    async with model_server() as server:
        line = [*fleet_proxy(tmp_path, server), "--host", "0.0.0.0"]
        async with started(tmp_path, *line) as process:
            assert process.stderr is not None
            words = ""
            while "must send the key" not in words:
                words = (await process.stderr.readline()).decode()
            key = words.partition("must send the key ")[2].partition(";")[0]
            [port] = await sockets(process.pid, 1)
            models = b"GET /status" + HEAD
            assert await status_of(port, models + b"\r\n") == 401
            assert await status_of(port, models + b"Authorization: Bearer wrong\r\n\r\n") == 401
            assert await status_of(port, models + b"Authorization: Bearer " + key.encode() + b"\r\n\r\n") == 200
            assert await status_of(port, b"GET /health" + HEAD + b"\r\n") in (200, 503)
            assert (
                await status_of(port, b"GET /status HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n") == 403
            )
            process.kill()
