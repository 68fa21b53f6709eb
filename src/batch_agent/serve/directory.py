"""The data directory of a server: whether it is ours, whether it is present, and the descriptions beside its content.

A marker file makes a directory ours. A directory that holds anything else is refused and not touched. The marker has a
random id, so that a running server notices if the directory is away or was replaced.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

import orjson

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.record.private import private

MARKER = "batch-agent-serve.json"
CATALOG = "serve.db"
KEY_FILE = "key"
LOCK_FILE = "serve.lock"
TENANTS = "tenants.json"
FILES = "files"
BATCHES = "batches"
LOST = "lost"
# Files in the folder of a batch.
INPUT = "input.jsonl"
INDEX = "lines.db"
OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
ADDRESS_FILE = "serve.address"  # where the server of the data listens, while it does
RUN = "run"  # there, the directory of its run
DESCRIPTION = "batch.json"  # of a batch, in its folder; that of an upload is beside it and ends with ``JSON``
# Endings of names. ``DELETED``: the removal has begun, and is completed.
JSON = ".json"
PART = ".part"
DELETED = ".deleted"
KIND, FORMAT = "data of batch-agent serve", 1
NOT_OURS = frozenset({"lost+found", LOCK_FILE})  # names that an unused directory may have
TABLES = {"tenant", "file", "batch", "idempotency"}  # of a catalog


def claim(data: Path) -> None:
    """Make a new or empty directory ours. Raises SpecError for a foreign directory, which stays unchanged."""
    try:
        if not is_marked(data):
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(data / MARKER, {"kind": KIND, "format": FORMAT, "id": secrets.token_hex(16)})
    except OSError as error:
        raise SpecError(f"cannot open {data}: {error.strerror}") from None


def is_marked(data: Path) -> bool:
    """Return whether a directory has our marker. False: it is new or empty, or is that of an earlier version, so that a
    start would write a marker. Raises SpecError for any other directory."""
    if _marked(data) or not data.is_dir():
        return _marked(data)
    names = {path.name for path in data.iterdir() if not path.name.startswith(MARKER)} - NOT_OURS
    if names and not _is_earlier(data):
        some = ", ".join(sorted(names)[:3])
        raise SpecError(
            f"--data {data} is not the data directory of a server, and not empty (it has {some}): nothing in it was "
            "changed. Give a new or an empty directory"
        )
    return False


def _marked(data: Path) -> bool:
    """Return whether a directory has our marker. Raises SpecError for the marker of a later version."""
    found = read_json_file(data / MARKER)
    if found is None or found.get("kind") != KIND:
        return False
    if found.get("format") != FORMAT:
        raise SpecError(f"{data} was written by another version of batch-agent: use that one, or another --data")
    return True


def _is_earlier(data: Path) -> bool:
    """Return whether a directory without a marker was made by an earlier version."""
    try:
        if (data / KEY_FILE).read_text().startswith("sk-serve-") and (data / LOCK_FILE).exists():
            return True
    except (OSError, ValueError):
        pass
    return _tables(data / CATALOG) >= TABLES


def _tables(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return set()


class Presence:
    """Checks that a data directory is still the one that was there when this object was made."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._id = self._now()

    def _now(self) -> object:
        found = orjson.loads((self._data / MARKER).read_bytes())
        return found.get("id") if isinstance(found, dict) else None

    def away(self) -> str:
        """Return the reason why the directory cannot be used now, or "". Blocks."""
        try:
            is_same = self._now() == self._id
        except FileNotFoundError:
            return f"the data directory {self._data} is not there"
        except OSError as error:
            return f"the data directory {self._data} cannot be read: {error.strerror}"
        except ValueError:
            is_same = False
        return "" if is_same else f"another directory is in the place of the data directory {self._data}"


# Descriptions


def write_json(path: Path, document: JsonObject) -> None:
    """Write a small file atomically, so that it survives a loss of power. Its folder must exist."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PART}")
    try:
        with open(draft, "wb", opener=private) as file:
            file.write(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_json_file(path: Path) -> JsonObject | None:
    """Return the object in a file; None if it is missing or damaged. Raises OSError if it cannot be read."""
    try:
        found = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def move_to_lost(data: Path, path: Path) -> Path:
    """Move a file or folder of the data to ``lost/``. Returns its new path."""
    target = data / LOST / path.relative_to(data)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    free, number = target, 0
    while free.exists() or free.is_symlink():
        number += 1
        free = target.with_name(f"{target.name}.{number}")
    path.rename(free)
    return free


def is_full(error: BaseException | None) -> bool:
    """Return whether a full disk is the cause of an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if "disk is full" in str(error) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
