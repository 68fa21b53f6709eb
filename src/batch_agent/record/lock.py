"""Lets only one process work in a directory, on a run or a batch. The operating system holds the lock, so it ends with
the process.

A forked child shares its parent's lock, and would keep it after the parent's death. So the child closes the descriptor
at once, and the parent unlocks before it closes its own.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from batch_agent.errors import StoreError
from batch_agent.record.private import private

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        # Locks a byte behind the text: other processes read the text to report the holder.
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    _look = _take

    def _share(descriptor: int) -> None:
        """Do nothing: a lock of this system cannot be shared."""

    def _free(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _look(descriptor: int) -> None:
        """Take a shared lock for a moment. Many processes may do so at once, but not while a process holds the lock."""
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    _share = _look

    def _free(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


PATIENCE = 10.0  # seconds for which a lock is waited for that others hold for a moment
ADVICE = "wait for it, stop it, or use another run directory"
LOOKS = 50  # number of attempts while other processes only look, some milliseconds each


class Lock:
    def __init__(self, path: Path, advice: str = ADVICE, *, shared: bool = False) -> None:
        """Take the lock. Raises StoreError if another process, or another run of this process, holds it; ``advice``
        ends its message. ``shared``: others may hold it at the same time, if they share it too."""
        self._descriptor = private(path, os.O_RDWR | os.O_CREAT)
        try:
            (_share if shared else _take_patiently)(self._descriptor)
        except OSError:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StoreError(f"{path.parent} is in use by {holder or 'another process'}; {advice}") from None
        if not shared:
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        _held.add(self)

    def release(self) -> None:
        if self in _held:  # else this is a forked child, which has closed it
            _held.discard(self)
            _free(self._descriptor)
            os.close(self._descriptor)

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child. Unlocking it would unlock the parent's lock."""
        _held.discard(self)
        os.close(self._descriptor)


_held: WeakSet[Lock] = WeakSet()  # locks of this process


def _close_all_in_child() -> None:
    for lock in tuple(_held):
        lock.close_in_child()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all_in_child)


def _take_patiently(descriptor: int) -> None:
    """Take the lock; wait while other processes only look at it. Raises OSError if it is held."""
    for _ in range(LOOKS):
        try:
            return _take(descriptor)
        except OSError:
            _look(descriptor)  # raises OSError if a process holds the lock
        time.sleep(random.uniform(0.001, 0.01))
    _take(descriptor)


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold a lock that each process holds only for a moment. Raises StoreError if one holds it for longer."""
    descriptor = private(path, os.O_RDWR | os.O_CREAT)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                _take(descriptor)
                break
            except OSError:
                if time.monotonic() >= until:
                    raise StoreError(
                        f"{path} is held by another process for {PATIENCE:.0f} s; stop that process"
                    ) from None
            time.sleep(random.uniform(0.001, 0.01))
        try:
            yield
        finally:
            _free(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool | None:
    """Return whether a process works in this run directory; None if that is unknown."""
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
