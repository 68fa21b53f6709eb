"""Python processes for tests that are killed, interrupted or read: copies of a process that has imported the package.

A new interpreter takes half a second of CPU to import it, and a copy nothing. Nothing else differs: a copy has its own
streams, environment, directory, signals, locks and exit status. Tests of the start itself and of flags of the
interpreter start one of their own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 200_000  # bytes of a message
SHARED = "BATCH_AGENT_TEST_WARM"  # names the socket of a process that several processes of tests copy
IMPORTS = (
    *("pytest", "batch_agent.cli.main", "batch_agent.cli.commands.run", "batch_agent.cli.commands.work"),
    *("batch_agent.run.run", "batch_agent.run.joined_worker", "batch_agent.testing"),
    *("batch_agent.backends.engines.vllm", "batch_agent.backends.openai.responses", "docstring_parser"),
    *("pydantic.dataclasses", "encodings.idna", "tests.run.process_work", "redis.asyncio"),
)
# Of a server with the SDK of MCP, which takes a second and a half to import, and of ``batch-agent mcp``.
MCP_IMPORTS = ("mcp.server.mcpserver", "mcp.server.stdio", "uvicorn", "batch_agent.cli.commands.mcp_server")


class WarmProcess:
    """What tests use of ``asyncio.subprocess.Process``."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._ended = asyncio.ensure_future(self._end(connection))

    async def _end(self, connection: socket.socket) -> None:
        with connection:
            told = await asyncio.get_running_loop().sock_recv(connection, LONGEST)
        self.returncode = int(told)
        if self.stdin is not None:
            self.stdin.close()

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    async def communicate(self, given: bytes = b"") -> tuple[bytes, bytes]:
        """Write ``given``, read both outputs to their ends, and wait for the exit."""
        if self.stdin is not None:
            self.stdin.write(given)
            with contextlib.suppress(ConnectionError):
                await self.stdin.drain()
            self.stdin.close()
        out, err = [stream.read() if stream is not None else _nothing() for stream in (self.stdout, self.stderr)]
        said = await asyncio.gather(out, err)
        await self.wait()
        return said[0], said[1]


async def _nothing() -> bytes:
    return b""


async def start(
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> WarmProcess:
    """Start ``python -m MODULE …``, ``python -c CODE …`` or ``python FILE …``; ``words`` follow ``python``. A stream is
    ``PIPE``, ``DEVNULL``, ``STDOUT`` (of stderr), a descriptor, or None for that of this process."""
    ours: list[int | None] = [None, None, None]
    theirs: list[int] = []
    for number, stream in enumerate((stdin, stdout, stderr)):
        if stream == PIPE:
            ends = os.pipe()
            theirs.append(ends[number > 0])
            ours[number] = ends[number == 0]
        elif stream == STDOUT:
            theirs.append(os.dup(theirs[1]))
        elif stream == DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        else:
            theirs.append(os.dup(number if stream is None else stream))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(_parent())
    order = {"words": words, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
    socket.send_fds(connection, [json.dumps(order).encode()], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    pid = int(connection.recv(LONGEST))
    connection.setblocking(False)
    process = WarmProcess(connection, pid)
    loop = asyncio.get_running_loop()
    if ours[0] is not None:
        pipe = os.fdopen(ours[0], "wb", 0)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
        process.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
    process.stdout, process.stderr = [await _reader(descriptor) for descriptor in ours[1:]]
    return process


async def _reader(descriptor: int | None) -> asyncio.StreamReader | None:
    if descriptor is None:
        return None
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", 0))
    return reader


# The process that is copied


def command(*words: str, imports: tuple[str, ...] = IMPORTS) -> list[str]:
    """The command that does what ``python WORDS`` does, for what starts a process by its command."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("copied.py")), _parent(imports), *words]


@functools.cache
def interpreter() -> str:
    """Return the path of a program for ``sys.executable``: a copy for ``-m batch_agent`` and for files, and Python for
    all else. The command ``batch-agent`` is beside it."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(folder.cleanup)
    path, command = Path(folder.name, "python"), Path(folder.name, "batch-agent")
    copied = str(Path(__file__).with_name("copied.py"))
    path.write_text(
        f"#!{sys.executable} -IS\n"
        "import os, sys\n"
        "if sys.argv[1:3] != ['-m', 'batch_agent'] and not sys.argv[1].endswith('.py'):\n"
        f"    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
        f"sys.argv[1:1] = [{_parent()!r}]\n"
        f"__file__ = {copied!r}\n"
        "exec(open(__file__).read())\n"
    )
    command.write_text(f'#!/bin/sh\nexec {path} -m batch_agent "$@"\n')
    for each in (path, command):
        each.chmod(0o755)
    return str(path)


def share() -> None:
    """Start one process that is copied for this process and for those that it starts."""
    os.environ[SHARED] = _begin(IMPORTS)


@functools.cache
def _parent(imports: tuple[str, ...] = IMPORTS) -> str:
    """Return the path of the socket of the process that is copied. Starts that process if none is shared."""
    shared = os.environ.get(SHARED, "") if imports == IMPORTS else ""
    path, deadline = shared or _begin(imports), time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < deadline, "the process that is copied did not start"
        time.sleep(0.01)
    return path


def _begin(imports: tuple[str, ...]) -> str:
    """Start a process that is copied, which ends with this process. Returns the path at which its socket will be."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    path = f"{folder.name}/socket"
    command = [sys.executable, "-m", "tests.warm", path, *imports]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()  # ``sys.stdout`` of the copies is that of a pipe

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return path


def serve(path: str, imports: list[str]) -> list[str]:
    """Make a copy for each order. A copy ends with the process that ordered it. Returns, in a copy alone, the words of
    its order."""
    for name in imports:
        with contextlib.suppress(ImportError):  # an extra
            __import__(name)
    gc.freeze()
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(f"{path}.new")
    door.listen(64)
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)  # becomes descriptor 1
    Path(f"{path}.new").rename(path)
    copies: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, door, woken, *copies.values()], [], [])
        if 0 in ready:  # the tests have ended
            for pid in copies:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if woken in ready:
            woken.recv(LONGEST)
            while copies:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with copies.pop(pid) as connection, contextlib.suppress(ConnectionError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        for pid, connection in copies.items():
            if connection in ready:
                os.kill(pid, signal.SIGKILL)
        if door in ready:
            connection = door.accept()[0]
            text, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 3)
            if pid := os.fork():
                copies[pid] = connection
                connection.send(str(pid).encode())
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (connection, door, woken, wakes, *copies.values()):
                one.close()
            order = json.loads(text)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(order["cwd"])
            os.environ.clear()
            os.environ.update(order["env"])
            return list(order["words"])


def become(words: list[str]) -> None:
    """Run what ``python WORDS`` runs. The memory is not taken apart at the end: it is that of the process that was
    copied, so each page of it would be copied first."""
    try:
        run(words)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        status = error.code or 0
    else:
        status = 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # Python has a message and a status for a stream that is closed
        sys.exit(status)
    os._exit(status & 0xFF)


def run(words: list[str]) -> None:
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        sys.modules["__main__"] = module = type(sys)("__main__")
        exec(words[1], module.__dict__)
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    become(serve(sys.argv[1], sys.argv[2:]))
