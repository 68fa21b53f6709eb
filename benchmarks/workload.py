"""The work that every contender does, and how it is measured.

A contender is a module with one coroutine that takes a ``Work`` and returns one Review per row, run as a process of its
own: ``python -m benchmarks.loop --url … --agents 1000``. It prints one JSON line. Only the standard library and
pydantic are used here, because contenders run in environments that share nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel

MODEL = "bench"
TOOL_SECONDS = 0.005
WARM_UP_AGENTS = 100

SYSTEM_PROMPT = (
    "You review records of a long-running system. "
    + (
        "Read the record from its first line to its last before you judge any of it. Name the line, say what is wrong "
        "there in one sentence, and grade it: low when a reader would stumble, high when a user would notice. Do not "
        "repeat what the record says, do not praise, and do not propose a rewrite. "
    )
    * 6
)
TASK = "Review record #{record}: {text}"
TEXT = "The loop walks over the entries, adds each to the total and returns it when the list is at its end. " * 4


class Finding(BaseModel):
    line: int
    severity: Literal["low", "high"]
    note: str


class Review(BaseModel):
    record: int
    verdict: Literal["clean", "suspect"]
    findings: list[Finding]


async def lookup(topic: str) -> str:
    """Look up what is known about a topic.

    Args:
        topic: The topic's name.
    """
    await asyncio.sleep(TOOL_SECONDS)
    return f"What is known about {topic}: " + "it has been seen before, and it was harmless then. " * 4


LOOKUP_SPEC = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up what is known about a topic.",
        "parameters": {
            "type": "object",
            "properties": {"topic": {"type": "string", "description": "The topic's name."}},
            "required": ["topic"],
        },
    },
}

# What a person writes who asks for JSON by hand.
SYSTEM_PROMPT_WITH_SCHEMA = (
    f"{SYSTEM_PROMPT}\n\nAnswer with one JSON object of this schema and nothing else:\n"
    f"{json.dumps(Review.model_json_schema())}"
)


def row(record: int) -> dict[str, object]:
    return {"record": record, "text": f"Entry {record} of the log. {TEXT}"}


def rows(count: int) -> Iterator[dict[str, object]]:
    return map(row, range(count))


def request_body(messages: Sequence[object], *, tools: bool, stream: bool) -> dict[str, object]:
    body: dict[str, object] = {"model": MODEL, "messages": messages}
    if tools:
        body["tools"] = [LOOKUP_SPEC]
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body


def first_body(*, record: int, tools: bool, stream: bool) -> dict[str, object]:
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT_WITH_SCHEMA},
        {"role": "user", "content": TASK.format(**row(record))},
    ]
    return request_body(messages, tools=tools, stream=stream)


@dataclass(frozen=True, slots=True)
class Work:
    """``turns`` is 1 (no tools) or 2 (the model calls ``lookup`` once, then answers)."""

    url: str
    agents: int
    turns: int
    inflight: int
    stream: bool

    def arguments(self) -> list[str]:
        out = ["--url", self.url, "--agents", str(self.agents), "--turns", str(self.turns)]
        out += ["--inflight", str(self.inflight)]
        return [*out, "--stream"] if self.stream else out

    @classmethod
    def from_arguments(cls) -> Work:
        parser = argparse.ArgumentParser()
        parser.add_argument("--url", required=True)
        parser.add_argument("--agents", type=int, default=1000)
        parser.add_argument("--turns", type=int, choices=(1, 2), default=1)
        parser.add_argument("--inflight", type=int, default=64)
        parser.add_argument("--stream", action="store_true")
        return cls(**vars(parser.parse_args()))


Contender = Callable[[Work], Awaitable[list[Review]]]


def contend(run: Contender) -> None:
    """Measures ``run`` on the work of the command line and prints what it cost.

    A small batch goes first, so that imports and compilations that happen once per process are not counted.
    """
    allow_open_files()
    print(json.dumps(asyncio.run(_measure(run, Work.from_arguments()))))


async def _measure(run: Contender, work: Work) -> dict[str, float]:
    await run(replace(work, agents=WARM_UP_AGENTS))
    gc.collect()
    await asyncio.to_thread(_reset_stats, work.url)
    wall, cpu = time.perf_counter(), time.process_time()
    reviews = await run(work)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if [review.record for review in reviews] != list(range(work.agents)):
        raise SystemExit("the answers are not those of the rows")
    return {"wall_s": wall, "cpu_s": cpu}


def _reset_stats(url: str) -> None:
    with urllib.request.urlopen(f"{url}/stats", timeout=5) as response:
        response.read()


def allow_open_files() -> None:
    """A thousand calls in flight are a thousand sockets, and the usual soft limit is near that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
