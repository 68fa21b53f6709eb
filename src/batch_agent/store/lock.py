"""One process at a time on a run directory. The lock is the operating system's: a killed process leaves none behind.

A process that is forked off shares its parent's lock, and would keep it after the parent's death. So the descriptor is
closed in the child at once, and the parent unlocks before it closes its own.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from pathlib import Path
from weakref import WeakSet

from batch_agent.errors import StoreError
from batch_agent.store.private import private

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        # Beyond the text, which others read to say who holds the lock.
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    _look = _take

    def _free(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _look(descriptor: int) -> None:
        """As many as like may look at the same time; not while somebody holds the lock."""
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _free(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


LOOKS = 50  # how often whoever is only looking is waited for, some milliseconds each time


class Lock:
    def __init__(self, path: Path) -> None:
        """Raises StoreError when another process, or another run of this one, holds it."""
        self._descriptor = private(path, os.O_RDWR | os.O_CREAT)
        try:
            _take_patiently(self._descriptor)
        except OSError:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StoreError(
                f"{path.parent} is in use by {holder or 'another process'}; wait for it, stop it, or give another "
                "run directory"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        _held.add(self)

    def release(self) -> None:
        if self in _held:  # else this is a process that was forked off, and it is closed
            _held.discard(self)
            _free(self._descriptor)
            os.close(self._descriptor)

    def leave(self) -> None:
        """Close the descriptor in a process that was forked off. Unlocking it would unlock the parent's."""
        _held.discard(self)
        os.close(self._descriptor)


_held: WeakSet[Lock] = WeakSet()  # of this process


def _leave_all() -> None:
    for lock in tuple(_held):
        lock.leave()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_all)


def _take_patiently(descriptor: int) -> None:
    """A process that looks whether somebody is here is in the way for a moment, and is no reason to give up."""
    for _ in range(LOOKS):
        try:
            return _take(descriptor)
        except OSError:
            _look(descriptor)  # raises when it is held in earnest
        time.sleep(random.uniform(0.001, 0.01))
    _take(descriptor)


def is_locked(path: Path) -> bool | None:
    """Whether a process is working here; None when that cannot be told."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        _look(descriptor)
    except BlockingIOError:
        return True
    except OSError:
        return True if sys.platform == "win32" else None
    finally:
        os.close(descriptor)
    return False
