"""A server that answers garbage is down; it costs no row. Real sockets, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.backends.certificates import self_signed
from tests.dispatch.gate import Gate

from batch_agent import BatchAgent
from batch_agent.job import AgentResult
from batch_agent.testing import Say, ScriptedServer, virtual_clock

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
GARBAGE = {
    "not valid HTTP": b"\x00\x01\x02 what is this\r\n\r\n",
    "nothing": b"",
    "empty": OK + b"Content-Type: application/json\r\nContent-Length: 0\r\n\r\n",
    "HTML": OK + b"Content-Type: text/html\r\nContent-Length: 26\r\n\r\n<html>Be right back</html>",
}
CHAT = b"POST "  # what probes ask is not POSTed


def server(text: str = "ok", latency: float = 1.0) -> ScriptedServer:
    return ScriptedServer(lambda request: Say(text, latency=latency))


async def finish(backend: str | Sequence[str], rows: int, **options: int) -> list[AgentResult[str]]:
    inputs = [str(n) for n in range(rows)]
    return list(await BatchAgent.run(task="{input}", inputs=inputs, backend=backend, model="m", **options))


async def spoil(gate: Gate, garbage: bytes) -> None:
    """For fifteen seconds, in the middle of things."""
    await asyncio.sleep(2.5)
    gate.garbage = garbage
    await gate.close_connections()
    await asyncio.sleep(15)
    gate.garbage = None


@pytest.mark.parametrize("only", [b"", CHAT], ids=["to all", "to rows alone"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_fifteen_seconds_of_garbage_cost_no_row(kind: str, only: bytes) -> None:
    @virtual_clock
    async def scenario() -> None:
        async with server() as inner, Gate(int(inner.address.rpartition(":")[2]), only=only) as gate:
            spoiling = asyncio.create_task(spoil(gate, GARBAGE[kind]))
            results = await finish(f"vllm://127.0.0.1:{gate.port}", 150, max_inflight=16)
            await spoiling
            assert gate.spoilt
        assert [result.output for result in results] == ["ok"] * 150

    scenario()


def test_fifteen_seconds_of_broken_tls_cost_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    @virtual_clock
    async def scenario() -> None:
        async with server() as inner, Gate(int(inner.address.rpartition(":")[2]), tls=context) as gate:
            spoiling = asyncio.create_task(spoil(gate, GARBAGE["not valid HTTP"]))
            results = await finish(f"https://localhost:{gate.port}/v1", 150, max_inflight=16)
            await spoiling
            assert gate.spoilt
        assert [result.output for result in results] == ["ok"] * 150

    scenario()


@pytest.mark.parametrize(
    ("kind", "only"),
    [
        ("not valid HTTP", b""),
        ("empty", CHAT),
        *(pytest.param(kind, only, marks=pytest.mark.soak) for kind in GARBAGE for only in (b"", CHAT)),
    ],
)
def test_one_of_eight_that_answers_garbage_costs_no_row_and_retries_go_elsewhere(kind: str, only: bytes) -> None:
    @virtual_clock
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            inner = [await stack.enter_async_context(server(latency=0.3)) for _ in range(8)]
            bad = Gate(int(inner[0].address.rpartition(":")[2]), only=only)
            gate = await stack.enter_async_context(bad)
            gate.garbage = GARBAGE[kind]
            results = await finish([f"vllm://127.0.0.1:{gate.port}", *(each.backend_url for each in inner[1:])], 400)
        assert [result.output for result in results] == ["ok"] * 400
        assert gate.spoilt and max(result.attempts for result in results) <= 3

    scenario()
