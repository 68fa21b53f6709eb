"""Descriptions of batches, uploads and tenants, in files beside them. If the catalog is lost or older, a start
completes it from them (``recovery``).

A description is written after the transaction that changed its subject.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import orjson
from pydantic import JsonValue

from batch_agent.messages import JsonObject
from batch_agent.serve.directory import BATCHES, DESCRIPTION, FILES, FORMAT, JSON, TENANTS, write_json

logger = logging.getLogger("batch_agent")

TENANT_TABLES = ("tenant", "former_key")
# Counts the changes of tenants by any process, so that a start knows whether the description is newer.
REVISION = "CREATE TABLE IF NOT EXISTS revision (one INTEGER PRIMARY KEY CHECK (one = 1), tenants INTEGER NOT NULL);\n"
REVISION += "INSERT OR IGNORE INTO revision VALUES (1, 0);\n" + "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_{event.lower()} AFTER {event} ON {table} "
    "BEGIN UPDATE revision SET tenants = tenants + 1; END;\n"
    for table in TENANT_TABLES
    for event in ("INSERT", "UPDATE", "DELETE")
)


class Descriptions:
    """Writes descriptions. ``due``: kind and id of what has changed since it was described. Not safe for several
    threads at once."""

    def __init__(self, data: Path) -> None:
        self._data, self._revision = data, -1
        self.due: set[tuple[str, str]] = set()

    def add(self, kind: str, ids: Iterable[str]) -> None:
        """Note that a ``batch`` or a ``file`` has changed and must be described."""
        self.due |= {(kind, id) for id in ids}

    def write(self, db: sqlite3.Connection) -> None:
        """Write the descriptions that are due. Those that cannot be written stay due."""
        try:
            (revision,) = db.execute("SELECT tenants FROM revision").fetchone()
            if revision != self._revision:
                self._write_tenants(db, revision)
                self._revision = revision
            for kind, id in tuple(self.due):
                self._write_one(db, kind, id)
                self.due.discard((kind, id))
        except (OSError, sqlite3.Error) as error:
            logger.debug("a description cannot be written: %s", error)

    def _write_tenants(self, db: sqlite3.Connection, revision: int) -> None:
        document: JsonObject = {"format": FORMAT, "revision": revision}
        for table in TENANT_TABLES:
            found = db.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in found.description]
            rows: list[JsonValue] = [dict(zip(names, row, strict=True)) for row in found]
            document[table] = rows
        write_json(self._data / TENANTS, document)

    def _write_one(self, db: sqlite3.Connection, kind: str, id: str) -> None:
        found = db.execute(f"SELECT document FROM {kind} WHERE id = ?", (id,)).fetchone()
        if found is None:
            return
        document: JsonObject = {"format": FORMAT, kind: orjson.loads(found[0])}
        if kind == "file":
            if (self._data / FILES / id).exists():
                write_json(self._data / FILES / f"{id}{JSON}", document)
        elif (self._data / BATCHES / id).exists():
            key = db.execute("SELECT key FROM idempotency WHERE batch = ?", (id,)).fetchone()
            write_json(self._data / BATCHES / id / DESCRIPTION, document | {"idempotency_key": key and key[0]})
