"""Runs one program in a child process, and leaves none of its processes behind.

For ``python_eval`` the child sets limits, runs a Python program and prints the value of its last expression. After
``EXEC`` it becomes the command that follows, such as an MCP server. This process watches the child. On Linux, orphans
of the program become its children, even in another session. It kills them when the program has ended, when it gets
SIGTERM, and when its parent process has died.

It is run by path with ``-I`` and imports nothing of this package.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

NAME = "<program>"
EXEC = "--exec"
# prctl(2)
_SIGNAL_WHEN_PARENT_DIES = 1
_ADOPT_ORPHANS = 36


def limit(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    for what, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def run(source: str) -> None:
    tree = ast.parse(source, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(tree, NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    sys.stdout.flush()


def explain(error: BaseException) -> str:
    """Return the exception with the line of the program that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{''.join(traceback.format_exception_only(error)).strip()}\n"


def program(path: str, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> int:
    limit(memory_bytes, cpu_seconds, file_bytes)
    try:
        run(Path(path).read_text(encoding="utf-8"))
    except Exception as error:
        sys.stdout.flush()
        sys.stderr.write(explain(error))
        return 1
    return 0


def become(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    return 127


def watch(child: int) -> int:
    """Wait until the child and its processes have ended. Returns its exit status, negative for a signal."""

    def stop(*_: object) -> None:
        end_all(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _, status = os.waitpid(child, 0)
    end_all(child)
    return os.waitstatus_to_exitcode(status)


def end_all(child: int) -> None:
    """Kill the child's session, then all children of this process until none is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                for pid in children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)


def children() -> list[int]:
    """Return the children of this process, including zombies; an empty list without /proc."""
    me = str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may contain any character; the state and the parent follow it.
            if entry.read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                found.append(int(entry.parent.name))
    return found


def main() -> int:
    core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_ADOPT_ORPHANS, 1)
        libc.prctl(_SIGNAL_WHEN_PARENT_DIES, signal.SIGTERM)
    # A SIGTERM between here and ``watch`` would leave the child behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        os.setsid()  # a signal of the program to its group must not reach this process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if sys.argv[1] == EXEC:
            resource.setrlimit(resource.RLIMIT_CORE, core)
            return become(sys.argv[2:])
        return program(sys.argv[1], *map(int, sys.argv[2:5]))
    status = watch(child)
    if status < 0:  # end with the same signal as the program
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
