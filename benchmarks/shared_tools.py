"""The tool of ``benchmarks.cluster``, which workers import: it notes each of its runs in a file."""

from __future__ import annotations

import asyncio
import os

from batch_agent import Tool

CALLS = "BENCHMARK_CALLS"  # the environment variable that names the file


@Tool.define(cacheable=True)
async def lookup(topic: str) -> str:
    """Look up what is known about a topic."""
    if path := os.environ.get(CALLS):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{topic}\n".encode())
        os.close(descriptor)
    await asyncio.sleep(0.05)
    return f"What is known about {topic}: it has been seen before, and it was harmless then."
