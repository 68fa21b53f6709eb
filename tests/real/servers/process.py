"""A server as a process of its own: started, waited for, and ended with everything it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 600.0  # seconds until it answers


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def answers(url: str, holds: Callable[[bytes], bool] = lambda said: True) -> Callable[[], bool]:
    """Whether the address answers, and this holds of what it says."""

    def ask() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return holds(answer.read())
        except OSError:
            return False

    return ask


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, ready: Callable[[], bool], environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """From when it is ``ready`` until the block is left. Without .pyc files some servers start much later."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | dict(environ)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield process
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, end)
                process.wait(20)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
