"""Cached model answers in one SQLite file, keyed by request and shared by all runs and processes of a user.

The size is bounded; the least recently used answers are deleted first. Losing the file costs money, but never fails a
run: a damaged file is renamed and a new one is created, an unreadable answer is deleted, and a disk error during a run
only means that requests are sent again. A file of another release is left unchanged and refused. All methods block, and
must be called from one thread, which the owner chooses.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from batch_agent.errors import SpecError
from batch_agent.messages import Reply, Sealed, TokenChance, ToolCall, Usage

VARIABLE = "BATCH_AGENT_CACHE"
FILE = "responses.db"
VERSION = 1
MAX_BYTES = 1024**3
KEPT = 0.9  # of the size limit, kept after it was exceeded
BUSY_SECONDS = 2.0  # wait for another process that writes
USED_SECONDS = 3600.0  # precision of the last-used time; saves a write on every hit

logger = logging.getLogger("batch_agent")

SCHEMA = """
CREATE TABLE responses (
    key BLOB PRIMARY KEY, backend TEXT NOT NULL, model TEXT NOT NULL,
    used REAL NOT NULL, bytes INTEGER NOT NULL, reply TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX responses_used ON responses (used, bytes);
"""
COUNT = "SELECT count(*) FROM responses"
MEASURE = "SELECT coalesce(sum(bytes), 0) FROM responses"
# Deletes everything beyond the size limit, counted from the most recently used.
SHRINK = """
DELETE FROM responses WHERE key IN (
    SELECT key FROM (SELECT key, sum(bytes) OVER (ORDER BY used DESC, key) AS filled FROM responses) WHERE filled > ?
)
"""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """What is cached for one model at one backend. ``used``: last use of one of its answers, Unix time."""

    backend: str
    model: str
    answers: int
    size_bytes: int
    used: float


def cache_file(where: bool | str | Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache file in the given directory, in ``BATCH_AGENT_CACHE``, or in the user's cache directory."""
    if isinstance(where, str) and not where.strip():
        raise SpecError("cache is empty: name a directory, or give True for your cache directory")
    if not isinstance(where, bool):
        return Path(where).expanduser() / FILE
    return cache_dir(environ) / FILE


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of answers and models: ``BATCH_AGENT_CACHE``, or one in the user's cache directory."""
    if named := environ.get(VARIABLE):
        return Path(named).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "batch-agent"


class ResponseStore:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._connection: sqlite3.Connection | None = None
        self._size_bytes = 0
        self._warned = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the file. Raises SpecError if the location is unusable."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._connect()
            except sqlite3.DatabaseError as error:
                if not _damaged(error):
                    raise
                self._begin_anew(error)
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise SpecError(f"cache: {self.path} cannot be used ({error}); name another directory") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, key: bytes) -> Reply | None:
        row = self._try("SELECT reply, used FROM responses WHERE key = ?", key)
        if not row:
            return None
        try:
            reply = decode_reply(row[0][0])
        except ValueError:
            self._try("DELETE FROM responses WHERE key = ?", key)
            return None
        now = time.time()
        if abs(now - row[0][1]) > USED_SECONDS:
            self._try("UPDATE responses SET used = ? WHERE key = ?", now, key)
        return reply

    def put(self, key: bytes, backend: str, model: str, reply: Reply) -> None:
        text = encode_reply(reply)
        size = len(text.encode()) + len(key)
        values = (key, backend, model, time.time(), size, text)
        self._try("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", *values)
        self._size_bytes += size
        if self._size_bytes > self._max_bytes:
            self._try(SHRINK, int(self._max_bytes * KEPT))
            self._size_bytes = self._number(MEASURE)

    # For people

    def models(self) -> list[CachedModel]:
        rows = self._try(
            "SELECT backend, model, count(*), sum(bytes), max(used) FROM responses GROUP BY 1, 2 ORDER BY 4 DESC"
        )
        return [CachedModel(*row) for row in rows]

    def prune(self, *, max_bytes: int | None = None, unused_seconds: float | None = None) -> int:
        """Delete answers that were not used for ``unused_seconds``, then the least recently used ones until the file
        has at most ``max_bytes``. Returns how many were deleted."""
        before = self._number(COUNT)
        if unused_seconds is not None:
            self._try("DELETE FROM responses WHERE used < ?", time.time() - unused_seconds)
        if max_bytes is not None:
            self._try(SHRINK, max_bytes)
        self._try("VACUUM")
        return before - self._number(COUNT)

    def clear(self) -> int:
        return self.prune(max_bytes=-1)

    def _number(self, statement: str) -> int:
        rows = self._try(statement)
        return int(rows[0][0]) if rows else 0

    # SQLite

    def _connect(self) -> None:
        self._make_private()
        self._connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        with suppress(sqlite3.OperationalError):  # another process sets it now; the file keeps it
            self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("BEGIN IMMEDIATE")
        with self._connection:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in SCHEMA.split(";"):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:  # of another release, and valid for it
                raise sqlite3.NotSupportedError(f"its version is {version}, and this release reads {VERSION}")
            self._size_bytes = int(self._connection.execute(MEASURE).fetchone()[0])

    def _make_private(self) -> None:
        """Make the file private: answers may quote prompts. SQLite gives its side files the same permissions."""
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if self.path.stat().st_mode & 0o077:
            with suppress(PermissionError):  # owned by another user who shares it
                self.path.chmod(0o600)

    def _begin_anew(self, error: sqlite3.Error) -> None:
        self.close()
        aside = self.path.with_name(f"{FILE}.damaged-{time.time_ns()}")
        logger.warning("the response cache %s cannot be read (%s): renamed to %s", self.path, error, aside.name)
        self.path.rename(aside)
        for ending in ("-wal", "-shm"):
            self.path.with_name(FILE + ending).unlink(missing_ok=True)
        self._connect()

    def _try(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. Returns [] if the disk or the file fails, which is logged once."""
        if self._connection is None:
            return []
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            try:
                if _damaged(error):
                    self._begin_anew(error)
                    return []
            except (OSError, sqlite3.Error):
                self.close()
            if not self._warned:
                self._warned = True
                logger.warning("the response cache %s fails (%s): requests are sent again", self.path, error)
            return []


def _damaged(error: sqlite3.DatabaseError) -> bool:
    """Return whether the file is damaged. A lock, a full disk or missing permissions are OperationalErrors."""
    return type(error) is sqlite3.DatabaseError


def encode_reply(reply: Reply) -> str:
    return json.dumps(
        {
            "text": reply.text,
            "tool_calls": [[call.id, call.name, call.arguments] for call in reply.tool_calls],
            "usage": astuple(reply.usage),
            "reasoning": reply.reasoning,
            "finish_reason": reply.finish_reason,
            "sealed": None if reply.sealed is None else [reply.sealed.wire, reply.sealed.value],
            **({} if reply.tokens is None else {"tokens": [_from_token(token) for token in reply.tokens]}),
        }
    )


def _from_token(token: TokenChance) -> list[object]:
    return [token.text.hex(), token.logprob, [(text.hex(), logprob) for text, logprob in token.others]]


def _to_token(text: str, logprob: float | None, others: list[tuple[str, float]]) -> TokenChance:
    return TokenChance(bytes.fromhex(text), logprob, tuple((bytes.fromhex(said), of) for said, of in others))


def decode_reply(text: str) -> Reply:
    """Return a cached answer: without usage, and with the original usage as ``saved``. Raises ValueError for text that
    ``encode_reply`` did not write."""
    try:
        record = json.loads(text)
        sealed = record.get("sealed")  # answers cached by an earlier version have none
        return Reply(
            text=record["text"],
            tool_calls=tuple(ToolCall(*call) for call in record["tool_calls"]),
            reasoning=record["reasoning"],
            finish_reason=record["finish_reason"],
            saved=Usage(*record["usage"]),
            sealed=None if sealed is None else Sealed(*sealed),
            tokens=tuple(_to_token(*token) for token in record["tokens"]) if "tokens" in record else None,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("a cached answer has an unknown format") from error
