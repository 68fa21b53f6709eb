"""``batch-agent`` and programs for tests: in this process, or as a process where streams, signals or locks are the
subject."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import runpy
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, chdir, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from tests.warm import WarmProcess, interpreter, start

from batch_agent.cli.main import main
from batch_agent.testing import ScriptedServer
from batch_agent.testing.wire import Script


class Outcome(NamedTuple):
    code: int | None
    stdout: str
    stderr: str

    @property
    def results(self) -> list[dict[str, object]]:
        return read_results(self.stdout)


def read_results(text: str) -> list[dict[str, object]]:
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda result: result["index"])


async def batch_agent(directory: Path, *arguments: str, stdin: bytes = b"") -> Outcome:
    """The command in this directory, beside the servers of the test's event loop."""
    return await in_process(directory, lambda: main(arguments), stdin)


async def program(directory: Path, path: str, *arguments: str) -> Outcome:
    """A Python program as ``python path`` runs it, in the same way."""

    def run() -> int:
        sys.path.insert(0, str(Path(path).parent.absolute()))
        argv, sys.argv = sys.argv, [path, *arguments]
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            sys.argv = argv
        return 0

    return await in_process(directory, run)


async def in_process(directory: Path, act: Callable[[], int], stdin: bytes = b"") -> Outcome:
    return await asyncio.to_thread(_call, directory, act, stdin)


def _call(directory: Path, act: Callable[[], int], stdin: bytes) -> Outcome:
    with ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write(stdin)
        streams[0].seek(0)
        with _streams(streams), own_modules(directory), chdir(directory):
            try:
                code: int | None = act()
            except SystemExit as error:
                code = int(error.code or 0)
        for stream in streams:
            stream.seek(0)
        return Outcome(code, streams[1].read().decode(), streams[2].read().decode())


@contextmanager
def _streams(files: list[IO[bytes]]) -> Iterator[None]:
    """Descriptors 0 to 2 and the streams of ``sys`` are these files."""
    before, saved = (sys.stdout, sys.stderr), [os.dup(descriptor) for descriptor in range(3)]
    log, last = logging.getLogger("batch_agent"), logging.lastResort
    assert last is not None  # which writes to standard error where nobody has set up logging, as pytest has
    log.addHandler(last)
    for descriptor, file in enumerate(files):
        os.dup2(file.fileno(), descriptor)
    try:
        with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
            yield
    finally:
        log.removeHandler(last)
        sys.stdout, sys.stderr = before
        for descriptor, file_number in enumerate(saved):
            os.dup2(file_number, descriptor)
            os.close(file_number)


@contextmanager
def own_modules(directory: Path) -> Iterator[None]:
    """What is imported from the directory and set in the environment here does not outlast it. Processes of the package
    that are started here are copies (``tests/warm.py``)."""
    path, environment, known, python = list(sys.path), dict(os.environ), set(sys.modules), sys.executable
    importlib.invalidate_caches()
    sys.executable = interpreter()
    try:
        yield
    finally:
        sys.path[:], sys.executable = path, python
        os.environ.clear()
        os.environ.update(environment)
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(directory)):
                del sys.modules[name]


@asynccontextmanager
async def started(directory: Path, *arguments: str, **variables: str) -> AsyncIterator[WarmProcess]:
    """The command as a process, which is killed if the test leaves it running."""
    process = await start(
        *("-m", "batch_agent", *arguments),
        cwd=directory,
        env=os.environ | variables,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def serving(directory: Path, script: Script | None = None, spec: str = "") -> AsyncIterator[ScriptedServer]:
    """A server, and a spec file that names it."""
    async with ScriptedServer(script, models=["m"]) as server:
        text = f"task: 'Say {{input}}'\nmodel: m\nbackend: {server.backend_url}\nmax_retries: 0\n{spec}"
        (directory / "spec.yaml").write_text(text)
        yield server


def rows(directory: Path, *values: object) -> None:
    (directory / "rows.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
