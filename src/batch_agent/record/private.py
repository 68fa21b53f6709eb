"""Files that only their owner can read: those of a run directory, and directories of sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from glob import escape, glob
from pathlib import Path

DIRECTORY = 0o700
SOCKETS = "batch-agent-socket-"  # begin of the names of their temporary directories
YOUNG = 60.0  # seconds; a socket that is younger may not accept connections yet


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file; an ``opener`` for ``open``. A new file is readable by its owner only; an existing one keeps its
    mode."""
    return os.open(path, flags, 0o600)


def socket_folder() -> Path:
    """Return a new temporary directory for a socket. Directories of killed processes are removed. Blocks."""
    # Another process may remove its own meanwhile, which ``Path.glob`` does not take.
    for path in map(Path, glob(f"{escape(tempfile.gettempdir())}/{SOCKETS}*/*")):  # noqa: PTH207
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            made = path.lstat()
            if path.is_socket() and made.st_uid == os.getuid() and time.time() - made.st_mtime > YOUNG:
                probe.setblocking(False)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    shutil.rmtree(path.parent, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=SOCKETS))
