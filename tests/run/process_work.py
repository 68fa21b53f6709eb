"""What worker processes import in ``test_processes``: a tool that writes, and a stage of a pipeline."""

from __future__ import annotations

import os
from pathlib import Path

from batch_agent import Tool

NOTES = "BATCH_AGENT_TEST_NOTES"  # names the file of the notes


@Tool.define(effect="write")
def note(row: str) -> str:
    """Write down that a row was worked on, as one line of a file."""
    descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{row}\n".encode())
    finally:
        os.close(descriptor)
    return "written"


def notes() -> list[str]:
    path = Path(os.environ[NOTES])
    return path.read_text().split() if path.exists() else []
