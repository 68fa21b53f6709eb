"""Permissions of a run directory: only its owner may read answers and inputs."""

from __future__ import annotations

import os

DIRECTORY = 0o700


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file; an ``opener`` for ``open``. A new file is readable by its owner only; an existing one keeps its
    mode."""
    return os.open(path, flags, 0o600)
