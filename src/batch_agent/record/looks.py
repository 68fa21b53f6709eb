"""Counts how often gold was looked at: one ledger per user, in the state directory.

A look is the first score of a prompt, model, examples and schema on some gold. Gold is identified by a digest of its
ids and values, so that a copy of a file, or another order of its rows, is the same gold. The ledger is a file of lines
that only its user may read; a lock prevents two processes from writing at once.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from batch_agent.errors import StoreError
from batch_agent.record.lock import exclusively
from batch_agent.record.private import DIRECTORY, private

logger = logging.getLogger("batch_agent")

LEDGER = "looks.jsonl"  # in the state directory, and the copy of a run's own gold in its record
STATE_VARIABLE = "XDG_STATE_HOME"
Line = dict[str, str]


def state_directory() -> Path:
    """Return the directory in which this package stores data of its user."""
    given = os.environ.get(STATE_VARIABLE)
    return (Path(given) if given and Path(given).is_absolute() else Path.home() / ".local" / "state") / "batch-agent"


def looks_before(digests: Mapping[str, str], asked: str, *, run: str = "", count: bool = True) -> int | None:
    """Return how many other prompts were scored on this gold before ``asked``, which identifies prompt, model, examples
    and schema. The result is the largest number over the fields; None if the ledger cannot be used. ``digests`` are
    those of the gold, by field. ``count``: if this is the first score of ``asked``, it is recorded."""
    try:
        with _opened() as path:
            lines = _of_gold(path, digests)
            most, new = 0, []
            for field, digest in digests.items():
                known = list(
                    dict.fromkeys(line["asked"] for line in lines if (line["field"], line["gold"]) == (field, digest))
                )
                most = max(most, known.index(asked) if asked in known else len(known))
                if asked not in known:
                    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    new.append({"gold": digest, "field": field, "asked": asked, "at": at, "run": run})
            if new and count:
                _append(path, new)
            return most
    except (OSError, StoreError, RuntimeError) as error:
        logger.warning("how often this gold was looked at is unknown: %s cannot be used: %s", LEDGER, error)
        return None


def looks_of(digests: Mapping[str, str]) -> list[Line]:
    """Return the lines of the ledger about this gold, for the record of a run."""
    try:
        with _opened() as path:
            return _of_gold(path, digests)
    except (OSError, StoreError, RuntimeError):
        return []


@contextmanager
def _opened() -> Iterator[Path]:
    """Hold the lock of the ledger, and yield its path."""
    directory = state_directory()
    directory.mkdir(DIRECTORY, parents=True, exist_ok=True)
    path = directory / LEDGER
    with exclusively(directory / f"{LEDGER}.lock"):
        yield path


def _of_gold(path: Path, digests: Mapping[str, str]) -> list[Line]:
    wanted, found = {*digests.values()}, []
    if not path.exists():
        return []
    with path.open("rb") as file:
        for line in file:
            try:
                read = json.loads(line)
                if read["gold"] in wanted and isinstance(read["field"], str) and isinstance(read["asked"], str):
                    found.append(read)
            except (ValueError, KeyError, TypeError):  # a line that a full disk has cut
                continue
    return found


def _append(path: Path, lines: list[Line]) -> None:
    with open(path, "ab", buffering=0, opener=private) as file:
        whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        torn = file.tell() and not _ends_with_newline(path)
        file.write(b"\n" * bool(torn) + whole)
        os.fsync(file.fileno())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
