"""Answers and inputs are nobody else's business: what a run directory holds is for its owner to read."""

from __future__ import annotations

import os

DIRECTORY = 0o700


def private(path: str | os.PathLike[str], flags: int) -> int:
    """An ``opener`` for ``open``: a file that is made is its owner's alone. One that is there stays as it is."""
    return os.open(path, flags, 0o600)
