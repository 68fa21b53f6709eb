"""The tool of the rows of the cluster suite: it writes, and every write is one line of a file."""

from __future__ import annotations

import os

from batch_agent import Tool


@Tool.define(effect="write")
def write_note(row: int, path: str) -> str:
    """Write down that a row was worked on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{row}\n".encode())
    finally:
        os.close(descriptor)
    return "written"
