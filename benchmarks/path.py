"""What one turn runs through: calls, files, crossings of packages and nested coroutines, between two requests.

``python -m benchmarks.path``. One recorded row with one tool call runs on ``vllm://`` with every default, against the
scripted server in a thread of its own. What the event loop's thread runs of this package between the first and the
second request is counted with ``sys.setprofile``: a resumed coroutine is a call. ``--calls`` prints them one by one.
A whole run of one row shows what a reader has to follow from its start to its end: the functions that run, in all
threads, and their lines. A batch of ``--rows`` rows then shows the calls of a whole row, on the event loop's thread and
on that of the record.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import queue
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

from pydantic import BaseModel

import batch_agent
from batch_agent import BatchAgent, Tool
from batch_agent.http.connection import Connection
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

PACKAGE = str(Path(batch_agent.__file__).parent) + "/"
ASK = Connection.ask.__code__  # a request is written here
ROWS = 200


class Verdict(BaseModel):
    verdict: str


@Tool.define(cacheable=True)
async def lookup(topic: str) -> str:
    """Look up what is known about a topic."""
    await asyncio.sleep(0.001)
    return f"nothing bad is known about {topic}"


@dataclass(slots=True)
class Trace:
    """The calls of this package, in their order, each as the code and the number of coroutines around it."""

    made: list[tuple[CodeType, int]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return sorted({code.co_filename.removeprefix(PACKAGE) for code, _ in self.made})

    @property
    def crossings(self) -> int:
        packages = [_package(code) for code, _ in self.made]
        return sum(first != second for first, second in pairwise(packages))

    @property
    def nested(self) -> int:
        return max(depth for _, depth in self.made)

    @property
    def lines(self) -> int:
        return sum(len(Path(PACKAGE, name).read_bytes().splitlines()) for name in self.files)

    def numbers(self) -> dict[str, int]:
        return {
            "calls": len(self.made),
            "files": len(self.files),
            "crossings": self.crossings,
            "nested_coroutines": self.nested,
            "lines_of_files": self.lines,
        }


def _package(code: CodeType) -> str:
    name = code.co_filename.removeprefix(PACKAGE)
    return name.partition("/")[0]


def _nested(frame: FrameType | None) -> int:
    """Return how many coroutines of this package are on the stack."""
    count = 0
    while frame is not None:
        code = frame.f_code
        count += bool(code.co_flags & inspect.CO_COROUTINE) and code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


def answer(request: Request) -> Say | CallTools:
    if request.messages[-1]["role"] == "tool":
        return Say('{"verdict": "clean"}')
    return CallTools(ToolUse("lookup", {"topic": request.text[-6:]}))


@contextmanager
def scripted() -> Iterator[str]:
    """The URL of a scripted server in a thread of its own: each row calls the tool once and then answers."""
    loop, url = asyncio.new_event_loop(), queue.SimpleQueue[str]()
    over: asyncio.Future[None] = loop.create_future()

    async def serve() -> None:
        async with ScriptedServer(answer) as server:
            url.put(server.backend_url)
            await over

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield url.get()
    finally:
        loop.call_soon_threadsafe(over.set_result, None)
        thread.join()
        loop.close()


async def run(url: str, rows: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        results = await BatchAgent.run(
            system_prompt="You review records.",
            task="Review record {number}",
            inputs=[{"number": number} for number in range(10_000, 10_000 + rows)],
            tools=[lookup],
            output_schema=Verdict,
            model="m",
            backend=url,
            run_dir=Path(directory),
        )
    if not results.ok:
        raise SystemExit("rows failed")


def between_requests(url: str) -> Trace:
    """Return what runs between the first and the second request of one row."""
    trace, requests = Trace(), 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal requests
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        requests += code is ASK and frame.f_locals["head"].startswith(b"POST")
        if requests == 1:
            trace.made.append((code, _nested(frame)))

    asyncio.run(run(url, 1))  # imports and whatever else happens once
    sys.setprofile(see)
    try:
        asyncio.run(run(url, 1))
    finally:
        sys.setprofile(None)
    return trace


def of_whole_run(url: str) -> dict[str, int]:
    """Return how many functions a run of one recorded row executes, in how many files, and their lines."""
    executed: set[CodeType] = set()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            executed.add(frame.f_code)

    asyncio.run(run(url, 1))  # imports and whatever else happens once
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        asyncio.run(run(url, 1))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    own = [code for code in executed if not code.co_filename.startswith(f"{PACKAGE}testing/")]  # not the server
    return {
        "run_functions": len(own),
        "run_files": len({code.co_filename for code in own}),
        "run_lines_of_functions": sum(map(_lines, own)),
    }


def _lines(code: CodeType) -> int:
    """Return the lines of a function without its docstring, which saves reading."""
    first = code.co_consts[0] if code.co_consts and not code.co_name.startswith("<") else None
    docstring = first.count("\n") + 1 if isinstance(first, str) else 0
    return max(line for _, _, line in code.co_lines() if line is not None) - code.co_firstlineno + 1 - docstring


def of_whole_rows(url: str, rows: int) -> dict[str, float]:
    """Return the calls of this package per row, on the thread of the event loop and on that of the record."""
    counts: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts["record" if "commits" in threading.current_thread().name else "loop"] += 1

    def counted(number: int) -> Counter[str]:
        counts.clear()
        threading.setprofile(see)
        sys.setprofile(see)
        try:
            asyncio.run(run(url, number))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return counts.copy()

    few, many = counted(rows), counted(2 * rows)
    return {f"calls_per_row_{name}": (many[name] - few[name]) / rows for name in ("loop", "record")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.path", description="What one turn runs through.")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the batch whose calls are counted")
    parser.add_argument("--calls", action="store_true", help="print each call between the two requests")
    options = parser.parse_args()
    with scripted() as url:
        trace, run_once = between_requests(url), of_whole_run(url)
        whole = of_whole_rows(url, options.rows) if options.rows else {}
    if options.calls:
        for code, nested in trace.made:
            print(f"{nested:3} {code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")
    print("\n".join(trace.files))
    print(json.dumps(trace.numbers() | run_once | whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
