from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import warm

# The package takes a second to import, so it is looked for and not imported.
needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
SERVERS = str(Path(__file__).parent / "servers.py")
PLAIN_SERVER = [sys.executable, "-I", "-S", str(Path(__file__).parent / "plain_server.py")]  # starts at once


def command(*arguments: str) -> list[str]:
    return warm.command(SERVERS, *arguments, imports=warm.MCP_IMPORTS)


@contextmanager
def http_server(*modes: str, port: int = 0, **variables: str) -> Iterator[str]:
    """The URL of a server of its own process."""
    process = subprocess.Popen(
        command("http", str(port), *modes), stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/bin", **variables}
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """What the server notes: one line per call that ran."""
    path = tmp_path / "notes"
    path.touch()
    return path
