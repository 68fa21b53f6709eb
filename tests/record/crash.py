"""A run that is killed with SIGKILL again and again until it completes, and what must be true afterwards.

``python -m tests.record.crash --kills 100`` is the long form of ``test_crash.py``. The server lives in this process and
remembers everything it was asked; the run is a process of its own (``--work``), killed in the middle of whatever it is
doing. After every kill the journal is read: what it holds then must never be asked again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sqlite3
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel
from tests import warm

from batch_agent import AgentResult, BatchAgent, Tool
from batch_agent.record.codec import ASKED, ENDED, decode
from batch_agent.record.reader import look
from batch_agent.record.steps import Asked as AskedStep
from batch_agent.record.steps import Ended
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

Asked = tuple[int, int]  # row, turn
WRITES, DELIVERED = "writes.log", "delivered.log"


class Answer(BaseModel):
    row: int
    turn: int


@dataclass
class Report:
    kills: int = 0
    requests: int = 0
    asked_again: int = 0  # requests that were in flight, or not yet recorded, at a kill
    problems: list[str] = field(default_factory=list)


def row_of(request: Request) -> int:
    user = next(message for message in request.messages if message["role"] == "user")
    found = re.search(r"row (\d+)", str(user["content"]))
    assert found is not None
    return int(found[1])


def script(request: Request) -> Say:
    """Every row looks something up; some write, some answer badly first."""
    row, turn = row_of(request), request.turn
    latency = random.Random(request.number).uniform(0.001, 0.02)
    mark = f"row {row} turn {turn}"
    if turn == 0:
        calls = [ToolUse("look_up", {"row": row})]
        if row % 2:
            calls.append(ToolUse("write_down", {"row": row}))
        return CallTools(*calls, text=mark, latency=latency)
    if turn == 1 and row % 3 == 0:
        return Say(f"{mark}: not JSON", latency=latency)
    return Say(json.dumps({"row": row, "turn": turn}), latency=latency)


async def work(url: str, directory: Path, rows: int) -> None:
    """The process that is killed."""

    @Tool.define(cacheable=True)
    async def look_up(row: int) -> str:
        await asyncio.sleep(0.001)
        return f"seen {row}"

    @Tool.define(effect="write")
    def write_down(row: int) -> str:
        append(directory / WRITES, str(row))
        return "written"

    def delivered(result: AgentResult[Answer]) -> None:
        append(directory / DELIVERED, f"{result.index}")

    await BatchAgent.run(
        task="Work on row {n}",
        inputs=({"n": n} for n in range(rows)),
        tools=[look_up, write_down],
        output_schema=Answer,
        model="m",
        backend=url,
        max_inflight=8,
        run_dir=directory / "run",
        resume=True,
        on_result=delivered,
    )


def append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def recorded(directory: Path) -> set[Asked]:
    """The turns that the journal holds, found by the marks that the script put into them."""
    path = directory / "run" / "journal.db"
    if not path.exists():
        return set()
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        steps = [decode(*row) for row in db.execute(f"SELECT kind, body FROM record WHERE kind IN ({ASKED}, {ENDED})")]
    except sqlite3.OperationalError:  # killed before there was a table
        return set()
    finally:
        db.close()
    turns = set()
    for step in steps:
        assert isinstance(step, AskedStep | Ended) and step.reply is not None
        found = re.search(r"row\D+(\d+)\D+turn\D+(\d+)", step.reply.text)
        assert found is not None, step.reply.text
        turns.add((int(found[1]), int(found[2])))
    return turns


async def crash(directory: Path, *, rows: int, kills: int, seed: int) -> Report:
    """Runs ``rows`` rows, killed ``kills`` times, to the end."""
    chance, report = random.Random(seed), Report()
    asked: Counter[Asked] = Counter()
    async with ScriptedServer(script, models=["m"]) as server:
        while True:
            before, held = server.received, recorded(directory)
            process = await warm.start(__file__, "--work", server.backend_url, str(directory), str(rows))
            ending = asyncio.ensure_future(process.wait())
            if report.kills < kills:
                moment = asyncio.ensure_future(server.wait_requests(before + chance.randint(1, 12)))
                await asyncio.wait([moment, ending], return_when=asyncio.FIRST_COMPLETED)
                moment.cancel()
                if not ending.done():
                    await asyncio.sleep(chance.uniform(0, 0.03))
            if report.kills < kills and not ending.done():
                process.kill()
                report.kills += 1
            code = await ending
            new = [(row_of(request), request.turn) for request in server.requests[before:]]
            report.problems += [f"{turn} is recorded and was asked again" for turn in new if turn in held]
            asked.update(new)
            if code == 0:
                break
            if code != -9:
                raise SystemExit(f"the run failed with status {code}")
    report.requests = server.received
    report.asked_again = sum(count - 1 for count in asked.values())
    report.problems += at_the_end(directory, rows)
    return report


def at_the_end(directory: Path, rows: int) -> list[str]:
    problems = []
    view = look(directory / "run")
    if (view.state, view.latest.ok) != ("complete", rows):
        problems.append(f"the run is {view.state} with {view.latest}")
    lines = (directory / "run" / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    if sorted(result["index"] for result in results) != list(range(rows)):
        problems.append("not every row has exactly one result")
    if any(result["output"]["row"] != result["index"] for result in results):
        problems.append("a row has the answer of another")
    writes = Counter((directory / WRITES).read_text().split()) if (directory / WRITES).exists() else Counter()
    problems += [f"row {row} was written down {count} times" for row, count in writes.items() if count > 1]
    return problems


def main() -> int:
    if "--work" in sys.argv:
        _, _, url, directory, rows = sys.argv
        asyncio.run(work(url, Path(directory), int(rows)))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.record.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, help="default: enough for the kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = options.rows or 4 * options.kills + 20
        report = asyncio.run(crash(Path(directory), rows=rows, kills=options.kills, seed=options.seed))
    text = f"{report.kills} kills, {rows} rows, {report.requests} requests, {report.asked_again} of them a second time"
    print(text, *report.problems, sep="\n")  # noqa: T201
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
