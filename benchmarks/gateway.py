"""What a request through the gateway costs, against one through ``fleet proxy``.

    python -m benchmarks.gateway

- ``cpu``: CPU seconds of the process in the middle, for each request that clients send it over 32 open connections; the
  same C server answers both
- ``many``: 1,000 workers that each have a request open at the same time, and what memory 1,000 more of them take
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from batch_agent import AgentContext, BatchAgent
from batch_agent.fleet.hostfile import parse_hosts
from batch_agent.fleet.proxy import serve_proxy
from batch_agent.testing import Request, Say, ScriptedServer
from benchmarks import report
from benchmarks.server import compiled

CLIENTS, REQUESTS, WARM = 32, 6_400, 1_600
WORKERS = 1_000
BODY = {"model": "bench", "messages": [{"role": "user", "content": "Say something. " * 20}]}


@contextmanager
def c_server() -> Iterator[str]:
    with (
        compiled("server") as program,
        subprocess.Popen([program, "1000", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


# The process in the middle: prints where it listens, and its CPU time whenever it is asked.


async def commands() -> None:
    """Prints the CPU time so far for each line of standard input; returns at its end."""
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(time.process_time()), flush=True)


async def proxy_child(address: str) -> None:
    serving = asyncio.create_task(
        serve_proxy(
            parse_hosts(address, "bench"),
            host="127.0.0.1",
            port=0,
            ready=lambda url: print(json.dumps([[f"{url}/v1", "none"]] * CLIENTS), flush=True),
        )
    )
    await commands()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def gateway_child(address: str) -> None:
    """A worker for each client: it gives its address and key away, and waits."""
    places: list[tuple[str, str]] = []
    over = asyncio.Event()

    async def work(row: str, ctx: AgentContext) -> str:
        places.append((ctx.base_url, ctx.api_key))
        if len(places) == CLIENTS:
            print(json.dumps(places), flush=True)
        await over.wait()
        return row

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            BatchAgent.run(
                worker=work,
                inputs=[str(number) for number in range(CLIENTS)],
                backend=f"http://{address}/v1",
                model="bench",
                max_agents=CLIENTS,
                max_inflight=CLIENTS,
                progress=False,
            )
        )
        await commands()
        over.set()


async def load(places: list[list[str]], requests: int) -> None:
    """Clients with one open connection each."""

    async def client(session: aiohttp.ClientSession, url: str, key: str) -> None:
        for _ in range(requests // CLIENTS):
            head = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/chat/completions", json=BODY, headers=head) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for url, key in places:
            tasks.create_task(client(session, url, key))


def cpu_per_request(mode: str, address: str) -> float:
    command = [sys.executable, "-m", "benchmarks.gateway", "--child", mode, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        places = json.loads(process.stdout.readline())

        def cpu() -> float:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return float(json.loads(process.stdout.readline()))

        asyncio.run(load(places, WARM))
        before = cpu()
        asyncio.run(load(places, REQUESTS))
        spent = cpu() - before
        process.stdin.close()
    return spent / REQUESTS


# Many at once


async def many_child(count: int) -> None:
    gate = asyncio.Event()
    most = 0

    async def script(request: Request) -> Say:
        nonlocal most
        most = max(most, server.inflight)
        if server.inflight >= min(count, WORKERS):
            gate.set()
        await gate.wait()
        return Say("ok")

    async with (
        ScriptedServer(script) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def work(row: str, ctx: AgentContext) -> int:
            head = {"Authorization": f"Bearer {ctx.api_key}"}
            async with session.post(f"{ctx.base_url}/chat/completions", json=BODY, headers=head) as answer:
                await answer.read()
                return answer.status

        results = await BatchAgent.run(
            worker=work,
            inputs=map(str, range(count)),
            backend=server.backend_url,
            model="bench",
            max_agents=WORKERS,
            max_inflight=WORKERS,
            progress=False,
        )
    assert {result.output for result in results} == {200}, next(result.error for result in results if not result)
    print(json.dumps({"peak_mib": peak_mib(), "most_at_once": most}))


def peak_mib() -> float:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def many(count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.gateway", "--child", "many", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description="The gateway against the proxy.")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("MODE", "ARGUMENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mode, argument = options.child
        child = {"proxy": proxy_child, "gateway": gateway_child}
        asyncio.run(many_child(int(argument)) if mode == "many" else child[mode](argument))
        return 0
    env = report.environment()
    with c_server() as address:
        pairs = [
            (cpu_per_request("proxy", address), cpu_per_request("gateway", address)) for _ in range(options.repetitions)
        ]
    once, more = many(WORKERS), many(5 * WORKERS)
    bars = [
        report.Bar(
            "CPU of a gateway request over a proxy request",
            statistics.median(gateway / proxy for proxy, gateway in pairs),
            "<=",
            1.5,
        ),
        report.Bar("1,000 workers: requests open at once", once["most_at_once"], ">=", WORKERS),
        report.Bar("5,000 rows, 1,000 at once: memory over 1,000 rows", more["peak_mib"] / once["peak_mib"], "<=", 1.3),
    ]
    print(f"CPU in µs for each request: {[tuple(round(1e6 * seconds) for seconds in pair) for pair in pairs]}")
    return report.finish(Path(__file__).stem, env, bars, {"cpu": pairs, "many": [once, more]})


if __name__ == "__main__":
    raise SystemExit(main())
