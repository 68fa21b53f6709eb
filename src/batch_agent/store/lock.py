"""One process at a time on a run directory. The lock is the operating system's: a killed process leaves none behind."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from batch_agent.errors import StoreError

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        # Beyond the text, which others read to say who holds the lock.
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Lock:
    def __init__(self, path: Path) -> None:
        """Raises StoreError when another process, or another run of this one, holds it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(self._descriptor)
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

    def release(self) -> None:
        os.close(self._descriptor)


def is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        _take(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
