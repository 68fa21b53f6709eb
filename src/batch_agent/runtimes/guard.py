"""The parent process of one command-line agent, run as a separate program with only the standard library.

    python guard.py FD COMMAND...

It starts the command in a new session and exits with its status. When the other end of the pipe FD is closed (because
the run cancelled the agent or was killed itself), or when the agent ends, everything that the agent started is killed.
On Linux no process can escape: a detached process becomes a child of this one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND = 127


def main(fd: int, command: list[str]) -> int:
    on_linux = sys.platform == "linux"
    libc = ctypes.CDLL(None) if on_linux else None
    if libc is not None:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def die_with_guard() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    os.set_inheritable(fd, False)
    try:
        agent = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_guard)  # noqa: PLW1509
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_FOUND
    for stream in (0, 1):  # so that they are closed when the agent closes them
        os.close(stream)
    threading.Thread(target=watch, args=(fd, agent.pid), daemon=True).start()
    status = agent.wait()
    kill_all(agent.pid)
    return status if status >= 0 else 128 - status


def watch(fd: int, agent: int) -> None:
    with suppress(OSError):
        os.read(fd, 1)  # returns when every copy of the other end is closed
    kill_all(agent)
    os._exit(128 + signal.SIGKILL)


def kill_all(agent: int) -> None:
    """Kill the agent's process group, then all present and future children of this process, until none is left."""
    with suppress(OSError):
        os.killpg(agent, signal.SIGKILL)
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
