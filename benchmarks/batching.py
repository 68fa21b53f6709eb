"""Look-ups by key, batched, against one query per call.

``python -m benchmarks.batching``. 200 agents, each of which asks for three rows of a table, one after the other:

- on a virtual clock, in a database that takes 20 ms for a query and 0.05 ms for each key, on 8 connections
- in a real SQLite file, a connection for each query; ``--postgres ADDRESS`` does the same with psycopg
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batch_agent import BatchAgent, Tool
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse
from batch_agent.testing.clock import run_virtual
from benchmarks import report

AGENTS, LOOKUPS = 200, 3
QUERY_S, KEY_S, CONNECTIONS = 0.02, 0.00005, 8
BATCHED = "SELECT id, name FROM things WHERE id IN ({ids})"


@dataclass(frozen=True, slots=True)
class Outcome:
    queries: int
    wall_s: float


def script(request: Request) -> Say:
    agent = int(str(request.messages[-1 - 2 * request.turn]["content"]))
    if request.turn < LOOKUPS:
        return CallTools(ToolUse("get", {"id": agent * LOOKUPS + request.turn}))
    return Say("done")


async def measure(tool: Tool, clock: Callable[[], float]) -> Outcome:
    began = clock()
    async with BatchAgent.open(
        task="{input}",
        inputs=[str(number) for number in range(AGENTS)],
        tools=[tool],
        backend=ScriptedBackend(script),
        max_inflight=None,
    ) as run:
        async for result in run.results():
            assert result.ok, result.error
        return Outcome(run.tool_statistics()["get"].runs, clock() - began)


async def modelled(batched: bool) -> Outcome:
    async def query(keys: list[int]) -> dict[int, str]:
        await asyncio.sleep(QUERY_S + KEY_S * len(keys))
        return {key: f"thing {key}" for key in keys}

    async def get(id: int) -> str:
        return (await query([id]))[id]

    if batched:
        tool = Tool.batchable(key_arg="id", batch=query)(get)
    else:
        tool = Tool.define(get, effect="read", max_concurrent=CONNECTIONS)
    return await measure(tool, asyncio.get_running_loop().time)


async def real(connect: Callable[[], Any], mark: str, batched: bool) -> Outcome:
    def get(id: int) -> dict[str, object]:
        connection = connect()
        try:
            cursor = connection.cursor()
            cursor.execute(f"SELECT id, name FROM things WHERE id = {mark}", [id])
            return dict(zip(("id", "name"), cursor.fetchone(), strict=True))
        finally:
            connection.close()

    if batched:
        tool = Tool.batchable(key_arg="id", batch_query=BATCHED, connection=connect)(get)
    else:
        tool = Tool.define(get, effect="read")
    return await measure(tool, time.perf_counter)


def fill(connect: Callable[[], Any], mark: str) -> None:
    connection = connect()
    cursor = connection.cursor()
    cursor.execute("DROP TABLE IF EXISTS things")
    cursor.execute("CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT)")
    rows = [(number, f"thing {number}") for number in range(AGENTS * LOOKUPS)]
    cursor.executemany(f"INSERT INTO things VALUES ({mark}, {mark})", rows)
    connection.commit()
    connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description="Batched look-ups.")
    parser.add_argument("--postgres", metavar="ADDRESS", help="of a database in which a table things may be made")
    address = parser.parse_args().postgres
    env = report.environment()
    outcomes = {"virtual clock": [run_virtual(modelled(batched)) for batched in (False, True)]}
    with tempfile.TemporaryDirectory() as folder:
        databases: dict[str, tuple[Callable[[], Any], str]] = {
            "SQLite": (lambda: sqlite3.connect(Path(folder) / "things.db"), "?")
        }
        if address:
            import psycopg

            databases["PostgreSQL"] = (lambda: psycopg.connect(address), "%s")
        for name, (connect, mark) in databases.items():
            fill(connect, mark)
            outcomes[name] = [asyncio.run(real(connect, mark, batched)) for batched in (False, True)]
    rows, bars = [], []
    for name, (single, batched) in outcomes.items():
        cells = [f"{one.queries} in {one.wall_s:.2f} s" for one in (single, batched)]
        rows.append((name, *cells, f"{single.wall_s / batched.wall_s:.1f}"))
        bars.append(report.Bar(f"{name}: queries, over one per call", batched.queries / single.queries, "<=", 0.1))
    single, batched = outcomes["virtual clock"]
    times = single.wall_s / batched.wall_s
    bars.append(report.Bar("virtual clock: wall, one per call over batched", times, ">=", 5))
    print(report.table(("queries and wall", "one per call", "batched", "times as fast"), rows), "\n")
    numbers = {name: [asdict(one) for one in pair] for name, pair in outcomes.items()}
    return report.finish("batching", env, bars, numbers)


if __name__ == "__main__":
    sys.exit(main())
