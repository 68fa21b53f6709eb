"""An engine process with its pipes. It belongs to no event loop, so that it can outlive one.

``process`` connects it to an event loop. ``keeper`` holds it while no run uses it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from batch_agent.messages import JsonObject

STDERR_TAIL_BYTES = 4096


@dataclass(slots=True, eq=False)
class LoadedEngine:
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]  # a file, because no task reads a pipe between two runs
    owner: int = field(default_factory=os.getpid)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    unread: bytearray = field(default_factory=bytearray)  # the start of an incomplete line
    ready: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def memory_bytes(self) -> int | None:
        """Return the memory that the process uses, in bytes, or None if it is unknown."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        """Kill the process and wait until it has ended. Blocks until its memory is freed."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def how_it_ended(self) -> str:
        code = self.process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if self.stderr.closed:
            return how
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        tail = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {tail[-1]}" if tail else how


def start_engine(program: str, config: JsonObject) -> Future[LoadedEngine]:
    """Start the process with this program's import path and ``config``. A separate thread starts the process and waits
    for its end, because the system kills the process when the thread that started it ends. A run may be in a thread
    that ends with the run."""
    started: Future[LoadedEngine] = Future()
    arguments = [orjson.dumps(sys.path).decode(), orjson.dumps({**config, "parent": os.getpid()}).decode()]

    def accompany() -> None:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  the engine closes it
        try:
            # In its own session it gets no Ctrl-C from the terminal: this process may drain the requests in flight.
            process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            stderr.close()
            started.set_exception(error)
            return
        started.set_result(LoadedEngine(process, stderr))
        process.wait()

    threading.Thread(target=accompany, daemon=True).start()
    return started
