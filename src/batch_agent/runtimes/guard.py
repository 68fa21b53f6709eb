"""The parent of one command-line agent, run as a program of its own with the standard library alone.

    python guard.py FD COMMAND...

It starts the command in a session of its own and ends with its status. When the other end of the pipe FD is closed,
because a run gives the agent up or was killed itself, or when the agent ends, everything that the agent started is
killed. On Linux no process can escape that: whoever detaches itself becomes a child of this one.
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
MOST_ROUNDS = 50  # of killing, against a program that forks without end
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
    for stream in (0, 1):  # so that the agent's own end closes them
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
    """Kill the agent's process group, and whatever descends from this process, until there is nothing left."""
    with suppress(OSError):
        os.killpg(agent, signal.SIGKILL)
    for _ in range(MOST_ROUNDS):
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(OSError):
                os.waitpid(pid, 0)


def descendants(root: int) -> list[int]:
    """Processes below ``root`` that are alive; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == root:
                children.setdefault(int(parent), []).append(int(place.name))
    found: list[int] = []
    todo = [root]
    while todo:
        todo = [child for parent in todo for child in children.get(parent, ())]
        found += todo
    return found


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
