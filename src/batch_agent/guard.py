"""The parent process of one foreign program, run as a separate program with only the standard library.

    python guard.py FD COMMAND...

It starts the command in a new session, and ends with its status or by the same signal. When the other end of the pipe
FD is closed (``children.open_guarded`` closes it, or its process died), or when the command ends, everything that the
command started is killed. On Linux no process can escape: a detached process becomes a child of this one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND = 127


def main(fd: int, command: list[str]) -> int:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def die_with_guard() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    os.set_inheritable(fd, False)
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_guard)  # noqa: PLW1509
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_FOUND
    for stream in (0, 1):  # so that they are closed when the command closes them
        os.close(stream)
    threading.Thread(target=watch, args=(fd, child.pid), daemon=True).start()
    status = child.wait()
    kill_all(child.pid)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def watch(fd: int, child: int) -> None:
    with suppress(OSError):
        os.read(fd, 1)  # returns when every copy of the other end is closed
    kill_all(child)
    os._exit(128 + signal.SIGKILL)


def kill_all(child: int) -> None:
    """Kill the command's process group, then all present and future children of this process, until none is left."""
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for pid in children():
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)


def children() -> list[int]:
    """Return the children of this process; empty without /proc."""
    me, found = str(os.getpid()), []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            if place.read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                found.append(int(place.parent.name))
    return found


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
