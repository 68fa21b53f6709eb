"""The tools of the rows of the cluster suite. Every write, and every run of a look-up, is one line of a file."""

from __future__ import annotations

import asyncio
import os

from batch_agent import Tool


@Tool.define(effect="write")
def write_note(row: int, path: str) -> str:
    """Write down that a row was worked on."""
    _append(path, row)
    return "written"


@Tool.define(cacheable=True)
async def find(key: str) -> str:
    """Look a key up."""
    _append(os.environ["FIND_LOG"], key)
    await asyncio.sleep(float(os.environ.get("FIND_SECONDS", "0")))
    return f"value of {key}"


def _append(path: str, line: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
