"""The server that every contender talks to: in C, compiled when a benchmark starts, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Stats:
    """What the server saw since it was last asked."""

    answers: int
    peak_in_flight: int


@dataclass(frozen=True, slots=True)
class Server:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self) -> Stats:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=5) as response:
            return Stats(**json.load(response))


@contextmanager
def compiled(source: str) -> Iterator[Path]:
    """The program of ``source``.c, for the length of the block. ``BENCHMARK_PROGRAMS`` is a folder of compiled ones."""
    if folder := os.environ.get("BENCHMARK_PROGRAMS"):
        yield Path(folder, source)
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        program = Path(folder, source)
        compiler = os.environ.get("CC", "cc")
        try:
            subprocess.run([compiler, "-O2", "-o", program, SOURCES / f"{source}.c"], check=True)
        except FileNotFoundError:
            raise SystemExit(f"the benchmarks need a C compiler: there is no {compiler!r} (set CC)") from None
        yield program


@contextmanager
def serving(latency: float = 0.020, stream_writes: int = 4) -> Iterator[Server]:
    """A server that takes ``latency`` seconds for each answer and sends a streamed one in ``stream_writes`` parts; with
    0 it writes token by token, an event each."""
    with (
        compiled("server") as program,
        subprocess.Popen(
            [program, str(round(latency * 1e6)), str(stream_writes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(port=int(process.stdout.readline()))
        finally:
            process.stdin.close()
