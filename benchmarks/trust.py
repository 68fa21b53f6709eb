"""How far the numbers about answers can be trusted: does an interval that says 95 % cover the truth as often?

``python -m benchmarks.trust [PART …]``. ``exact`` computes the coverage of the exact intervals, without chance;
``path`` runs 1,000 simulated tables with a pilot and gold, and looks whether the score covers the truth of the table;
``groups`` does the same for gold that was collected by groups; ``votes`` counts what three votes cost; ``canary``
searches for gold in all bytes that a server, a tool and a worker get; ``million`` scores a million rows and compares
CPU and memory with those of the run. A broken variant of each method is measured beside it: a bar that the broken one
meets too measures nothing. Answers are simulated, so any machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall
from batch_agent.files.read import read_inputs
from batch_agent.messages import Reply, Usage
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ScriptedServer, ToolUse
from batch_agent.testing.clock import run_virtual
from batch_agent.trust.intervals import Interval, clopper_pearson, grouped
from benchmarks import report
from benchmarks.stream_rows import peak_bytes

Sample = dict[str, float]
SIZES, TRUTHS = (20, 50, 100, 200, 500, 1000), (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
TABLES, ROWS, PILOT = 1000, 300, 50
MOODS = {"mood": "angry|calm"}
PARTS = ("exact", "path", "groups", "votes", "canary", "million")


def wald(right: float, rows: float) -> Interval:
    """The broken variant: the interval of the normal distribution."""
    part = right / rows
    half = 1.96 * math.sqrt(part * (1 - part) / rows)
    return Interval(part - half, part + half)


def coverage(method: Callable[[float, float], Interval], rows: int, truth: float) -> float:
    """Return the probability that the interval covers the truth, summed over all outcomes."""
    found = 0.0
    for right in range(rows + 1):
        low, high = method(right, rows)
        if low <= truth <= high:
            choose = math.lgamma(rows + 1) - math.lgamma(right + 1) - math.lgamma(rows - right + 1)
            found += math.exp(choose + right * math.log(truth) + (rows - right) * math.log1p(-truth))
    return found


def exact() -> tuple[list[report.Bar], object]:
    cells = {f"n {rows}, truth {truth}": coverage(clopper_pearson, rows, truth) for rows in SIZES for truth in TRUTHS}
    worst = min(cells, key=lambda name: cells[name])
    broken = coverage(wald, 50, 0.98)
    return [
        report.Bar(f"exact interval, worst cell ({worst}): coverage", cells[worst], ">=", 0.95),
        report.Bar("broken: Wald, n 50, truth 0.98: coverage", broken, "<=", 0.93),
    ], {"clopper_pearson": cells, "wald 50 0.98": broken}


# The whole path: 1,000 tables, each a run with a pilot that is scored. Hard rows come last, and slow rows fail.


def table_of(seed: int) -> list[dict[str, object]]:
    """Return a table whose rows get harder, so that its first rows are no sample of it."""
    draw, rows = random.Random(seed), list[dict[str, object]]()
    for row in range(ROWS):
        wrong = draw.random() < 0.02 + 0.2 * row / ROWS
        failed = draw.random() < 0.12
        answer = "failed" if failed else "angry" if wrong else "calm"
        rows.append({"id": f"{seed}-{row}", "answer": answer, "label": "calm"})
    return rows


def answer(request: Request) -> Say | Fail:
    said = str(request.messages[-1]["content"]).rpartition(" ")[2]
    return Fail(400) if said == "failed" else Say(json.dumps({"mood": said}))


async def one_table(seed: int) -> Mapping[str, bool]:
    """Return which methods cover the accuracy of one table."""
    rows = table_of(seed)
    truth = sum(row["answer"] == "calm" for row in rows) / len(rows)
    results = await BatchAgent.run(
        task="Mood: {answer}",
        inputs=rows,
        output_schema=MOODS,
        backend=ScriptedBackend(answer),
        gold="label",
        gold_sample="random",
        pilot=PILOT,
        pilot_only=True,
        progress=False,
        max_retries=0,
    )
    assert len(results) == PILOT, len(results)
    score = results.score()["mood"]
    assert score.interval is not None
    first = [row["answer"] == "calm" for row in rows[:PILOT]]
    drawn = [result for result in results if result.ok]
    right = sum(result.output["mood"] == "calm" for result in drawn)
    covers = {
        "ours": score.interval,
        "first rows": clopper_pearson(sum(first), PILOT),
        "failed left out": clopper_pearson(right, len(drawn)),
    }
    return {name: interval.low - 1e-12 <= truth <= interval.high + 1e-12 for name, interval in covers.items()}


def path(tables: int) -> tuple[list[report.Bar], object]:
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state  # the looks of simulated tables are not those of a user
        found = [run_virtual(one_table(seed)) for seed in range(tables)]
    shares = {name: sum(each[name] for each in found) / tables for name in found[0]}
    return [
        report.Bar(f"whole path, {tables:,} tables of {ROWS}, pilot of {PILOT}: coverage", shares["ours"], ">=", 0.93),
        report.Bar("broken: the first rows as pilot, with drift: coverage", shares["first rows"], "<=", 0.85),
        report.Bar("broken: failed rows left out: coverage", shares["failed left out"], "<=", 0.93),
    ], shares


def groups(tables: int) -> tuple[list[report.Bar], object]:
    """Rows of a group are alike: an intraclass correlation of 0.3."""
    shares: dict[str, float] = {}
    for number in (20, 40, 100):
        for truth in (0.8, 0.9, 0.95):
            ours = naive = 0
            spread = (1 - 0.3) / 0.3
            for seed in range(tables):
                draw = random.Random(f"{number} {truth} {seed}")
                counts = []
                for _ in range(number):
                    own = draw.betavariate(truth * spread, (1 - truth) * spread)
                    counts.append((sum(draw.random() < own for _ in range(10)), 10))
                interval = grouped(counts)
                assert interval is not None
                ours += interval.interval.low <= truth <= interval.interval.high
                low, high = clopper_pearson(sum(right for right, _ in counts), 10 * number)
                naive += low <= truth <= high
            shares[f"{number} groups, truth {truth}"] = ours / tables
            shares[f"ignored: {number} groups, truth {truth}"] = naive / tables
    own = {name: share for name, share in shares.items() if not name.startswith("ignored")}
    worst = min(own, key=lambda name: own[name])
    return [
        report.Bar(f"groups, worst cell ({worst}): coverage", own[worst], ">=", 0.9),
        report.Bar("broken: groups ignored, 20 groups, truth 0.9", shares["ignored: 20 groups, truth 0.9"], "<=", 0.8),
    ], shares


async def votes(rows: int) -> tuple[list[report.Bar], object]:
    draw = random.Random(5)
    backend = ScriptedBackend(lambda _: Say(json.dumps({"mood": "calm" if draw.random() < 0.8 else "angry"})))
    inputs = [{"text": f"row {row}"} for row in range(rows)]
    await BatchAgent.run(task="{text}", inputs=inputs, output_schema=MOODS, samples=3, backend=backend, progress=False)
    cost = len(backend.requests) / rows
    return [report.Bar("three votes, two classes, right with 0.8: answers per row", cost, "<=", 2.4)], cost


async def canary() -> tuple[list[report.Bar], object]:
    """Search for gold in all bytes that a server, a tool and a worker get."""
    secret, seen = "canary-41c7", list[str]()

    @Tool.define(cacheable=True)
    def look_up(text: str) -> str:
        """Look a text up."""
        seen.append(text)
        return "nothing"

    def script(request: Request) -> Say | CallTools:
        seen.append(json.dumps(request.body))
        return CallTools(ToolUse("look_up", {"text": "row"})) if request.turn == 0 else Say('{"mood": "calm"}')

    async def work(row: Any, ctx: Any) -> dict[str, str]:
        seen.append(repr(row) + repr(vars(ctx)))
        await ctx.ask(str(row))
        return {"mood": "calm"}

    inputs = [{"id": f"r{row}", "text": f"row {row}", "label": f"{secret}-{row}"} for row in range(50)]
    shapes: Sequence[dict[str, Any]] = (
        {"task": "{text}", "tools": [look_up]},
        {"task": "{{ row }}", "template": "jinja", "tools": [look_up]},
        {"worker": work},
    )
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        async with ScriptedServer(script, models=["m"]) as server:
            for shape in shapes:
                schema = {} if "worker" in shape else {"output_schema": {"mood": "text"}}
                options = {"backend": server.backend_url, "model": "m", "progress": False, **schema, **shape}
                results = await BatchAgent.run(inputs=inputs, gold={"mood": "label"}, **options)
                assert results.score().all.rows == 50
    found = sum(text.count(secret) for text in seen)
    bars = [report.Bar(f"gold in what a server, a tool and a worker got ({len(seen):,} texts)", found, "<=", 0)]
    return bars, {"texts": len(seen), "found": found}


# A million rows, all with gold, from a file. Each number is of a process of its own.


class Instant(Backend):
    """Answers in no time."""

    name = "instant://"
    capabilities = Capabilities(native_schema=True, streaming=False)

    async def models(self) -> list[str]:
        return ["instant"]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        await asyncio.sleep(0)
        return Reply('{"mood": "calm"}', usage=Usage(100, 0, 6))


async def scored_run(rows: int, *, gold: bool) -> Sample:
    """Return CPU and memory of a recorded run of so many rows from a file."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        source = Path(folder) / "rows.jsonl"
        with source.open("w") as file:
            for row in range(rows):
                label = "calm" if row % 7 else "angry"
                file.write(json.dumps({"id": f"r{row}", "text": f"message {row} of a customer", "label": label}) + "\n")
        inputs = read_inputs(source, at_once_bytes=0)
        options: dict[str, Any] = {"gold": "label"} if gold else {}
        options |= {"backend": Instant(), "model": "instant", "max_inflight": 64, "run_dir": Path(folder) / "run"}
        cpu, done = time.process_time(), 0
        async with BatchAgent.open(task="Mood of {text}", inputs=inputs, output_schema=MOODS, **options) as run:
            async for _ in run.results():
                done += 1
            if gold and run.score(count=False).all.rows != rows:
                raise SystemExit("rows are missing in the score")
        if done != rows:
            raise SystemExit(f"{done} of {rows} rows were done")
        return {"cpu_s": time.process_time() - cpu, "peak_bytes": peak_bytes()}


def measured(rows: int, *, gold: bool) -> Sample:
    """Return the same of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trust", "--work", str(rows), *(["--gold"] if gold else [])]
    found: Sample = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def million(rows: int) -> tuple[list[report.Bar], object]:
    few = measured(max(1000, rows // 100), gold=True)
    plain, scored = measured(rows, gold=False), measured(rows, gold=True)
    more = scored["cpu_s"] / plain["cpu_s"] - 1
    each = (scored["peak_bytes"] - plain["peak_bytes"]) / rows  # of which seven are its id
    return [
        report.Bar(f"{rows:,} rows with gold: CPU above that of the run", more, "<=", 0.1),
        report.Bar(f"{rows:,} rows with gold: bytes of memory per row above those of the run", each, "<=", 16),
        report.Bar(
            f"{rows:,} rows with gold: memory over that of the run",
            scored["peak_bytes"] / plain["peak_bytes"],
            "<=",
            1.15,
        ),
    ], {"rows": rows, "few": few, "without gold": plain, "with gold": scored}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description="How far scores can be trusted.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--tables", type=int, default=TABLES)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        print(json.dumps(asyncio.run(scored_run(options.work, gold=options.gold))))
        return 0
    env = report.environment()
    does: Mapping[str, Callable[[], tuple[list[report.Bar], object]]] = {
        "exact": exact,
        "path": lambda: path(options.tables),
        "groups": lambda: groups(4 * options.tables),
        "votes": lambda: asyncio.run(votes(5_000)),
        "canary": lambda: asyncio.run(canary()),
        "million": lambda: million(options.rows),
    }
    bars, measurements = list[report.Bar](), dict[str, object]()
    for part in options.parts or PARTS:
        if part not in does:
            parser.error(f"there is no part {part!r}: {', '.join(PARTS)}")
        own, measurements[part] = does[part]()
        bars += own
    return report.finish("trust", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
