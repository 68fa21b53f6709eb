"""One process of ``memory``: ``BatchAgent.stream`` over rows from a generator (or a list), and what it took; or, with
``--text``, the memory of agents that wait for a tool, and of their results.

Prints one JSON line. The peak is the kernel's VmHWM, which begins anew with the process; ``ru_maxrss`` does not: it
starts at the size of whoever started us.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from contextlib import aclosing
from pathlib import Path

from batch_agent import BatchAgent, Tool
from benchmarks.workload import MODEL, SYSTEM_PROMPT, TASK, Review, rows


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell VmHWM")


async def stream(url: str, count: int, *, as_list: bool, first_only: bool) -> dict[str, float]:
    inputs = list(rows(count)) if as_list else rows(count)
    first, done = 0.0, 0
    start, cpu = time.perf_counter(), time.process_time()
    results = BatchAgent.stream(
        system_prompt=SYSTEM_PROMPT,
        task=TASK,
        inputs=inputs,
        output_schema=Review,
        model=MODEL,
        backend=url,
        max_inflight=64,
    )
    async with aclosing(results):
        async for result in results:
            if not result.ok:
                raise SystemExit(f"row {result.index} failed: {result.error}")
            first = first or time.perf_counter() - start
            done += 1
            if first_only:
                break
    if not first_only and done != count:
        raise SystemExit(f"{done} results for {count} rows")
    cpu = (time.process_time() - cpu) / done
    return {"first_result_s": first, "cpu_per_row_s": cpu, "peak_bytes": peak_bytes()}


async def waiting(url: str, agents: int, text_bytes: int) -> dict[str, float]:
    """Bytes that Python holds for each agent while all of them wait for a tool, and for each result afterwards. The
    text is that of the row, so each agent has it in its input and in its conversation."""
    all_wait, go_on = asyncio.Event(), asyncio.Event()
    begun = 0

    @Tool.define(effect="write")
    async def lookup(topic: str) -> str:
        """Look up what is known about a topic."""
        nonlocal begun
        begun += 1
        if begun == agents:
            all_wait.set()
        await go_on.wait()
        return f"nothing bad is known about {topic}"

    inputs = ({"record": number, "text": str(number).ljust(text_bytes)} for number in range(agents))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]  # imports of the small batch
    run = asyncio.ensure_future(
        BatchAgent.run(
            system_prompt=SYSTEM_PROMPT,
            task=TASK,
            inputs=inputs,
            tools=[lookup],
            model=MODEL,
            backend=url,
            max_inflight=64,
        )
    )
    await all_wait.wait()
    gc.collect()
    live = tracemalloc.get_traced_memory()[0]
    go_on.set()
    results = await run
    gc.collect()
    done = tracemalloc.get_traced_memory()[0]
    if not all(result.ok for result in results):
        raise SystemExit("rows failed")
    return {"live_bytes": (live - before) / agents, "result_bytes": (done - before) / agents}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--list", action="store_true", help="rows from a list, not a generator")
    parser.add_argument("--first-only", action="store_true", help="stop at the first result")
    parser.add_argument("--text", type=int, help="measure agents that wait for a tool, with rows of this many bytes")
    options = parser.parse_args()

    async def measured() -> dict[str, float]:
        if options.text is not None:
            await waiting(options.url, 64, options.text)
            return await waiting(options.url, options.rows, options.text)
        await stream(options.url, 100, as_list=False, first_only=False)  # imports and compilations happen here
        return await stream(options.url, options.rows, as_list=options.list, first_only=options.first_only)

    print(json.dumps(asyncio.run(measured())))


if __name__ == "__main__":
    main()
