"""The catalog: tenants, files, batches and what is due to be sent, in one SQLite file below ``--data``.

It knows nothing of HTTP or of runs. Every method is one transaction, blocks, and may be called from any thread. What it
returns are values; changing them changes nothing here. Several processes may use one catalog.

Each batch and each upload has its description in a file beside it, and the tenants have theirs, written after each
change: if the catalog is lost or older, ``recovery`` reads them.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self, TypeVar

import orjson

from batch_agent.errors import SpecError, StoreError
from batch_agent.messages import JsonObject
from batch_agent.serve import GB
from batch_agent.serve.descriptions import REVISION, Descriptions
from batch_agent.serve.directory import (
    BATCHES,
    CATALOG,
    DELETED,
    ERRORS,
    FILES,
    JSON,
    KEY_FILE,
    OUTPUT,
    TENANTS,
    claim,
)

OPERATOR = "operator"  # the tenant of the generated key
ACTIVE, REVOKED, AWAY = 0, 1, 2  # a tenant; AWAY: one of a configuration, and the server was started without one
AGAIN = "~"  # in the name of a tenant, before a number: a name that was given again after it was revoked
FINAL = frozenset({"failed", "completed", "expired", "cancelled"})
BUSY_SECONDS = 30.0
WITHOUT_END = 1e12  # a time that never comes; descriptions are JSON, which has no infinity
SCHEMA = """
CREATE TABLE IF NOT EXISTS tenant (
    name TEXT PRIMARY KEY, hash TEXT UNIQUE NOT NULL, revoked INTEGER NOT NULL DEFAULT 0, terms TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS former_key (hash TEXT PRIMARY KEY, tenant TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS file (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, expires REAL,
    document TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS file_tenant ON file (tenant, seq);
CREATE TABLE IF NOT EXISTS batch (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, wire TEXT NOT NULL,
    status TEXT NOT NULL, ended REAL, document TEXT NOT NULL, owner TEXT NOT NULL DEFAULT '', lease REAL NOT NULL
    DEFAULT 0);
CREATE INDEX IF NOT EXISTS batch_tenant ON batch (tenant, wire, seq);
CREATE INDEX IF NOT EXISTS batch_status ON batch (status);
CREATE TABLE IF NOT EXISTS idempotency (
    tenant TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, batch TEXT NOT NULL, PRIMARY KEY (tenant, key));
CREATE INDEX IF NOT EXISTS idempotency_batch ON idempotency (batch);
CREATE TABLE IF NOT EXISTS usage (
    tenant TEXT NOT NULL, day INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (tenant, day));
CREATE TABLE IF NOT EXISTS hold (
    tenant TEXT NOT NULL, day INTEGER NOT NULL, owner TEXT NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant, day, owner));
CREATE TABLE IF NOT EXISTS notice (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, body TEXT NOT NULL, due REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0);
"""
MOST_NOTICES = 1000  # that wait for the webhook of a tenant; the oldest are dropped
USED = (  # tokens of a day
    "SELECT tenant, tokens, ' ' AS owner FROM usage WHERE day = ? "
    "UNION ALL SELECT tenant, tokens, owner FROM hold WHERE day = ?"
)
TERMS = "json_set(terms, '$.name', name)"  # the document of a tenant; that of an operator may lack the name

Wire = Literal["openai", "anthropic"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class KeyReused(Exception):
    """The Idempotency-Key was used before with another body."""


class CatalogError(StoreError):
    """The catalog cannot be read or written now."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. ``name`` is never used twice: if a name is given again after it was revoked, the new tenant has the
    name "alice~2" and the ``label`` "alice". ``share``: its weight beside other tenants. ``max_queued``: largest number
    of lines that may wait. ``tokens_per_day``: None for no limit. ``configured``: its key is in the configuration."""

    name: str
    share: float = 1.0
    max_queued: int = 1_000_000
    tokens_per_day: int | None = None
    max_file: int = 2 * GB
    max_files: int | None = None  # that it may have; None: any number
    max_bytes: int | None = None  # of all its files together
    webhook: str = ""
    secret: str = ""  # signs what is sent to the webhook
    created: float = 0.0
    configured: bool = False

    @property
    def label(self) -> str:
        return label_of(self.name)

    @property
    def is_operator(self) -> bool:
        return self.name == OPERATOR


@dataclass(frozen=True, slots=True)
class Hold:
    """Tokens of a tenant that a process holds for its requests in flight, between ``least`` and ``most``. ``limit``:
    the tenant's limit of the day; None for none."""

    tenant: str
    least: int
    most: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class DayTokens:
    """Tokens by tenant. ``used``: of today, with the holds of other processes. ``held``: by this process."""

    used: Mapping[str, int]
    held: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    tenant: str
    filename: str
    bytes: int
    purpose: str
    created: float
    expires: float | None = None
    batch: str = ""  # the batch whose directory has the content, for an output file
    kept_since: float | None = None  # from when ``--keep`` counts; None if the client has said when it expires


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """A batch as the catalog stores it. Times are in Unix seconds. ``counts``: how many lines succeeded and failed.
    ``stop`` is the reason why no further line starts: "cancelled", "expired" or "failed"."""

    id: str
    tenant: str
    wire: Wire
    endpoint: str
    window: str
    created: float
    deadline: float
    status: Status = "validating"
    input_file: str = ""
    metadata: Mapping[str, str] | None = None
    output_expires: float | None = None  # seconds from the creation of an output file
    times: Mapping[str, float] = field(default_factory=dict)  # when it entered each status
    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0  # part of ``failed``: lines that were not done when it was cancelled
    expired: int = 0  # part of ``failed``: lines that were not done at its deadline
    model: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    errors: Sequence[JsonObject] = ()
    output_file: str = ""
    error_file: str = ""
    stop: str = ""
    digest: str = ""  # of the body that created it
    bytes: int = 0  # of a Message Batch: of that body

    @property
    def is_over(self) -> bool:
        return self.status in FINAL

    @property
    def ended(self) -> float | None:
        return self.times.get(self.status) if self.is_over else None

    def at(self, status: Status, now: float, **changes: object) -> ServedBatch:
        """Return the batch with another status."""
        return replace(self, status=status, times={**self.times, status: now}, **changes)  # type: ignore[arg-type]

    def cancelled_at(self, now: float) -> ServedBatch | None:
        """Return the batch while it is being cancelled; None if it has ended or is being finalized."""
        is_open = self.status in ("validating", "in_progress")
        return self.at("cancelling", now, stop="cancelled") if is_open else None


Stored = TypeVar("Stored", Tenant, StoredFile, ServedBatch)


@dataclass(frozen=True, slots=True)
class ConfiguredTenant:
    """A tenant of the configuration. ``old_key`` is accepted in addition to ``key``; "" for none."""

    tenant: Tenant
    key: str
    old_key: str = ""


def label_of(name: str) -> str:
    """Return the name of a tenant as its operator gave it."""
    return name.partition(AGAIN)[0]


def check_tenant_name(name: str) -> None:
    """Raise SpecError for an invalid name of a tenant."""
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or len(name) > 64:
        raise SpecError("the name of a tenant has letters, digits, '-', '_' and '.', and at most 64 of them")
    if name == OPERATOR:
        raise SpecError(f"{OPERATOR!r} is the name of the generated key: choose another name")


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def new_key() -> str:
    return f"sk-serve-{secrets.token_urlsafe(32)}"


def hashed(key: str) -> str:
    """Return the digest of a key. Keys are random, so that a plain hash cannot be reversed by guessing."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Catalog:
    makes_again = False  # it may be lost, and is made again; else a lost one is refused

    def __init__(
        self,
        data: Path,
        *,
        shared: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``shared``: processes on several machines use it; None: as the servers before have set it."""
        self.data = data
        self._clock = clock
        self._lock = RLock()
        self._shared = shared
        self._descriptions = Descriptions(data)
        claim(data)
        self._db = self._opened()

    def _opened(self) -> sqlite3.Connection:
        path = self.data / CATALOG
        is_lost = (self.data / TENANTS).exists() and not (path.exists() and path.stat().st_size)
        if is_lost and not self.makes_again:
            raise SpecError(f"{path} is missing or empty: the next start of the server makes it again")
        try:
            path.touch(0o600)
            db = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
            )
            # A write-ahead log needs memory that the processes share, which two machines do not have.
            if self._shared is not None:
                db.execute(f"PRAGMA journal_mode={'DELETE' if self._shared else 'WAL'}")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(SCHEMA + REVISION)
        except (sqlite3.Error, OSError) as error:
            what = "; the next start of the server makes it again" if "not a database" in str(error) else ""
            raise SpecError(f"cannot open {path}: {error}{what}") from None
        return db

    def reopen(self) -> None:
        """Open the file again: the directory was away, and the open file may belong to an earlier one."""
        with self._lock:
            fresh = self._opened()
            self._db.close()
            self._db = fresh

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise CatalogError(f"the catalog {self.data / CATALOG}: {error}") from error
            self._descriptions.write(self._db)

    def describe(self, kind: str, ids: Iterable[str]) -> None:
        """Write the descriptions of batches or files."""
        with self._lock:
            self._descriptions.add(kind, ids)
            self._descriptions.write(self._db)

    def _rows(self, query: str, *values: object) -> list[tuple[str, ...]]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise CatalogError(f"the catalog {self.data / CATALOG}: {error}") from error

    def _all(self, kind: type[Stored], query: str, *values: object) -> list[Stored]:
        """Return the values whose documents a query finds."""
        return [_read(kind, row[0]) for row in self._rows(query, *values)]

    # Tenants

    def operator_key(self) -> str:
        """Return the generated key. It is created at the first call, and survives restarts."""
        path = self.data / KEY_FILE
        with self._lock:
            try:
                key = path.read_text().strip()
            except FileNotFoundError:
                key = ""
            if not key:
                key = new_key()
                self._write_operator_key(key)
            if self.tenant_of(key) is None:
                with self._writing() as db:
                    self._put_tenant(db, Tenant(OPERATOR), key)
            return key

    def _write_operator_key(self, key: str) -> None:
        path = self.data / KEY_FILE
        part = path.with_suffix(".part")
        part.touch(0o600)
        part.write_text(key + "\n")
        part.replace(path)

    def add_tenant(self, tenant: Tenant) -> str:
        """Add a tenant, and return its new key. What belongs to an earlier tenant of this name stays separate. Raises
        SpecError if the name is in use."""
        key = new_key()
        with self._writing() as db:
            rows = _tenants_named(db, tenant.name)
            if any(state != REVOKED for _, state in rows):
                raise SpecError(f"there is a tenant {tenant.name!r} already: revoke it first, or choose another name")
            self._put_tenant(db, replace(tenant, name=_next_name(tenant.name, rows)), key)
        return key

    def rotate_key(self, label: str, overlap: float) -> str:
        """Give a tenant a new key, and return it. The former key is accepted for ``overlap`` seconds. Raises SpecError
        if there is no such tenant, or if its key is in the configuration."""
        key = new_key()
        with self._writing() as db:
            name = next((name for name, state in _tenants_named(db, label) if state == ACTIVE), None)
            if name is None:
                raise SpecError(f"there is no tenant {label!r}")
            former, terms = db.execute("SELECT hash, terms FROM tenant WHERE name = ?", (name,)).fetchone()
            if _read(Tenant, terms).configured:
                told = f"the key of {label!r} is in the configuration: change it there, and keep the former as old_key"
                raise SpecError(told)
            now = self._clock()
            db.execute("DELETE FROM former_key WHERE until <= ?", (now,))
            db.execute("INSERT OR REPLACE INTO former_key VALUES (?, ?, ?)", (former, name, now + overlap))
            db.execute("UPDATE tenant SET hash = ? WHERE name = ?", (hashed(key), name))
            if name == OPERATOR:
                self._write_operator_key(key)
        return key

    def configure(self, given: Sequence[ConfiguredTenant]) -> list[str]:
        """Make ``given`` the configured tenants. Returns the labels of those that are revoked because they are not
        given any more. A tenant that comes back with its former key is the same tenant. Raises SpecError if two have
        the same key."""
        with self._writing() as db:
            found = db.execute(f"SELECT {TERMS} FROM tenant WHERE revoked != ?", (REVOKED,)).fetchall()
            before = [tenant for tenant in (_read(Tenant, row[0]) for row in found) if tenant.configured]
            kept = {each.tenant.name for each in given}
            gone = [tenant for tenant in before if tenant.label not in kept]
            for tenant in gone:
                db.execute("UPDATE tenant SET revoked = ? WHERE name = ?", (REVOKED, tenant.name))
            for tenant in before:
                db.execute("DELETE FROM former_key WHERE tenant = ?", (tenant.name,))
                if tenant.label in kept:  # two tenants may exchange their keys
                    db.execute("UPDATE tenant SET hash = name || ' is configured now' WHERE name = ?", (tenant.name,))
            for each in given:
                rows = _tenants_named(db, each.tenant.name)
                name = next((name for name, state in rows if state != REVOKED), "") or _holder(db, rows, each.key)
                name = name or _next_name(each.tenant.name, rows)
                self._put_tenant(db, replace(each.tenant, name=name, configured=True), each.key)
                if each.old_key:
                    row = (hashed(each.old_key), name, WITHOUT_END)
                    db.execute("INSERT OR REPLACE INTO former_key VALUES (?, ?, ?)", row)
        return [tenant.label for tenant in gone]

    def set_configured_away(self) -> list[str]:
        """Refuse the keys of all configured tenants until there is a configuration again; return their labels. Their
        batches continue."""
        found = [tenant for tenant in self.tenants() if tenant.configured]
        with self._writing() as db:
            for tenant in found:
                db.execute("UPDATE tenant SET revoked = ? WHERE name = ?", (AWAY, tenant.name))
        return [tenant.label for tenant in found]

    def _put_tenant(self, db: sqlite3.Connection, tenant: Tenant, key: str) -> None:
        digest = hashed(key)
        terms = orjson.dumps({**asdict(tenant), "created": self._clock()}).decode()
        other = db.execute("SELECT name FROM tenant WHERE hash = ? AND name != ?", (digest, tenant.name)).fetchone()
        if other is not None:
            state = db.execute("SELECT revoked FROM tenant WHERE name = ?", other).fetchone()[0]
            if state != REVOKED:
                raise SpecError(f"{tenant.label} and {label_of(other[0])} have the same key: give each its own")
            db.execute("UPDATE tenant SET hash = hash || name WHERE name = ?", other)
        db.execute(
            "INSERT INTO tenant VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "hash = excluded.hash, revoked = excluded.revoked, terms = excluded.terms",
            (tenant.name, digest, ACTIVE, terms),
        )

    def revoke(self, label: str) -> Tenant:
        """Revoke the keys of a tenant, and return it. Raises SpecError if there is no such tenant."""
        with self._writing() as db:
            name = next((name for name, state in _tenants_named(db, label) if state != REVOKED), None)
            if name is None:
                raise SpecError(f"there is no tenant {label!r}")
            db.execute("UPDATE tenant SET revoked = ? WHERE name = ?", (REVOKED, name))
            db.execute("DELETE FROM former_key WHERE tenant = ?", (name,))
            return _read(Tenant, db.execute(f"SELECT {TERMS} FROM tenant WHERE name = ?", (name,)).fetchone()[0])

    def tenants(self) -> list[Tenant]:
        """Return the tenants whose keys are accepted."""
        return self._all(Tenant, f"SELECT {TERMS} FROM tenant WHERE revoked = ? ORDER BY name", ACTIVE)

    def revoked(self) -> set[str]:
        """Return the names of the tenants that were revoked."""
        return {row[0] for row in self._rows("SELECT name FROM tenant WHERE revoked = ?", REVOKED)}

    def tenant_of(self, key: str) -> Tenant | None:
        """Return the tenant to whom a key belongs, or None."""
        digest = hashed(key)
        query = f"SELECT {TERMS} FROM tenant WHERE revoked = ? AND (hash = ? OR name = (SELECT tenant FROM former_key "
        query += "WHERE hash = ? AND until > ?))"
        return next(iter(self._all(Tenant, query, ACTIVE, digest, digest, self._clock())), None)

    # Files

    def stored(self, tenant: str | None = None) -> dict[str, tuple[int, int]]:
        """Return number and bytes of the files of each tenant, or of one. Requests of Message Batches are files too."""
        query = (
            "SELECT tenant, COUNT(*), SUM(json_extract(document, '$.bytes')) FROM (SELECT tenant, document FROM file "
            "UNION ALL SELECT tenant, document FROM batch WHERE wire = 'anthropic') WHERE ? IN (tenant, '') "
            "GROUP BY tenant"
        )
        return {name: (int(files), int(size or 0)) for name, files, size in self._rows(query, tenant or "")}

    def add_file(self, file: StoredFile, admit: Callable[[], None] = lambda: None) -> None:
        """Add a file. ``admit`` is called in the same transaction; if it raises, nothing is added."""
        with self._writing() as db:
            admit()
            insert_file(db, file)
            self._descriptions.due.add(("file", file.id))

    def file(self, id: str, tenant: str) -> StoredFile | None:
        query = "SELECT document FROM file WHERE id = ? AND tenant = ? AND (expires IS NULL OR expires > ?)"
        return next(iter(self._all(StoredFile, query, id, tenant, self._clock())), None)

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        """Return a page of files. ``after`` is the last id of the previous page."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        query = "SELECT document FROM file WHERE tenant = ? AND (expires IS NULL OR expires > ?)"
        more: list[object] = [tenant, self._clock()]
        if purpose is not None:
            query += " AND json_extract(document, '$.purpose') = ?"
            more.append(purpose)
        if after is not None:
            query += f" AND seq {sign} (SELECT seq FROM file WHERE id = ? AND tenant = ?)"
            more += [after, tenant]
        return self._all(StoredFile, f"{query} ORDER BY seq {order} LIMIT ?", *more, limit)

    def remove_file(self, file: StoredFile) -> None:
        """Remove a file and its content. The content gets another name first: a start completes a removal that a kill
        has interrupted."""
        content = self.content_of(file)
        going = content.with_name(content.name + DELETED)
        with suppress(FileNotFoundError):
            content.rename(going)
        with self._writing() as db:
            db.execute("DELETE FROM file WHERE id = ?", (file.id,))
        if not file.batch:
            content.with_name(file.id + JSON).unlink(missing_ok=True)
        going.unlink(missing_ok=True)

    def content_of(self, file: StoredFile) -> Path:
        if not file.batch:
            return self.data / FILES / file.id
        return self.data / BATCHES / file.batch / (ERRORS if file.id.endswith("-error") else OUTPUT)

    def set_keep(self, keep: float) -> None:
        """Set how long files are kept if their clients have not set an expiry."""
        with self._writing() as db:
            for (document,) in db.execute("SELECT document FROM file").fetchall():
                file = _read(StoredFile, document)
                since = file.kept_since
                if since is None and file.expires is None:  # of an earlier version: it counts from now
                    since = self._clock()
                if since is not None and (file.kept_since, file.expires) != (since, since + keep):
                    _change_file(db, replace(file, kept_since=since, expires=since + keep))

    def expired_files(self) -> list[StoredFile]:
        return self._all(StoredFile, "SELECT document FROM file WHERE expires <= ?", self._clock())

    # Batches

    def add_batch(
        self, batch: ServedBatch, key: str | None = None, admit: Callable[[], None] = lambda: None
    ) -> ServedBatch:
        """Add a batch and return it, or the batch that was created before with the Idempotency-Key ``key``. Raises
        KeyReused if that request had another body. ``admit`` is called in the same transaction; if it raises, nothing
        is added."""
        with self._writing() as db:
            if key is not None:
                known = db.execute(
                    "SELECT i.digest, b.document FROM idempotency i LEFT JOIN batch b ON b.id = i.batch "
                    "WHERE i.tenant = ? AND i.key = ?",
                    (batch.tenant, key),
                ).fetchone()
                if known is not None and known[1] is not None:
                    if known[0] != batch.digest:
                        raise KeyReused
                    return _read(ServedBatch, known[1])
            admit()
            if key is not None:
                db.execute(
                    "INSERT OR REPLACE INTO idempotency VALUES (?, ?, ?, ?)",
                    (batch.tenant, key, batch.digest, batch.id),
                )
            add_batch(db, batch)
            _keep_input(db, batch, batch.deadline)
            self._descriptions.due.add(("batch", batch.id))
        return batch

    def batch_under(self, tenant: str, key: str) -> ServedBatch | None:
        """Return the batch that was created with an Idempotency-Key; None if there is none."""
        query = "SELECT b.document FROM idempotency i JOIN batch b ON b.id = i.batch WHERE i.tenant = ? AND i.key = ?"
        return next(iter(self._all(ServedBatch, query, tenant, key)), None)

    def put_batch(self, batch: ServedBatch, files: Sequence[StoredFile] = (), notice: JsonObject | None = None) -> None:
        """Write a batch, its files, and the notice about its new status, in one transaction."""
        with self._writing() as db:
            put_batch(db, batch)
            for file in files:
                insert_file(db, file)
            self._put_notice(db, batch, notice)
            self._descriptions.due.add(("batch", batch.id))

    def _put_notice(self, db: sqlite3.Connection, batch: ServedBatch, notice: JsonObject | None) -> None:
        if notice is not None:
            db.execute(
                "INSERT OR REPLACE INTO notice (id, tenant, body, due) VALUES (?, ?, ?, ?)",
                (notice["id"], batch.tenant, orjson.dumps(notice).decode(), self._clock()),
            )
            db.execute(
                "DELETE FROM notice WHERE rowid IN "
                "(SELECT rowid FROM notice WHERE tenant = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                (batch.tenant, MOST_NOTICES),
            )

    def change_batch(
        self,
        id: str,
        change: Callable[[ServedBatch], ServedBatch | None],
        notice: Callable[[ServedBatch], JsonObject | None] = lambda changed: None,
    ) -> ServedBatch | None:
        """Apply ``change`` to the newest version of a batch, in one transaction with the notice about its new state. If
        ``change`` returns None, the batch stays unchanged. Returns the batch afterwards; None if it does not exist."""
        with self._writing() as db:
            found = db.execute("SELECT document FROM batch WHERE id = ?", (id,)).fetchone()
            if found is None:
                return None
            batch = _read(ServedBatch, found[0])
            changed = change(batch)
            if changed is not None:
                put_batch(db, changed)
                self._put_notice(db, changed, notice(changed))
                if (changed.status, changed.stop) != (batch.status, batch.stop):
                    self._descriptions.due.add(("batch", id))
            return changed or batch

    def batch(self, id: str, tenant: str | None = None, wire: Wire | None = None) -> ServedBatch | None:
        for batch in self._all(ServedBatch, "SELECT document FROM batch WHERE id = ?", id):
            if tenant in (None, batch.tenant) and wire in (None, batch.wire):
                return batch
        return None

    def batches(
        self,
        tenant: str | None,
        wire: Wire | None = None,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
    ) -> list[ServedBatch]:
        """Return a page of batches, newest first. ``tenant`` None: batches of all tenants. ``after`` and ``before`` are
        ids: the page begins behind ``after``, or ends in front of ``before``."""
        query, values = "SELECT document FROM batch WHERE TRUE", list[object]()
        if tenant is not None:
            query, values = f"{query} AND tenant = ?", [tenant]
        if wire is not None:
            query += " AND wire = ?"
            values.append(wire)
        order = "DESC"
        for other, sign in ((after, "<"), (before, ">")):
            if other is not None:
                query += f" AND seq {sign} (SELECT seq FROM batch WHERE id = ?)"
                values.append(other)
                order = "ASC" if sign == ">" else "DESC"
        found = self._all(ServedBatch, f"{query} ORDER BY seq {order} LIMIT ?", *values, limit)
        return found if order == "DESC" else found[::-1]

    def unfinished(self) -> list[ServedBatch]:
        """Return the batches that have not ended, oldest first."""
        marks = ", ".join("?" * len(FINAL))
        query = f"SELECT document FROM batch WHERE status NOT IN ({marks}) ORDER BY seq"
        return self._all(ServedBatch, query, *FINAL)

    def claim(self, id: str, owner: str, seconds: float | None) -> bool:
        """Make a process the owner of a batch for some time, unless another one is. ``seconds`` None: there is no other
        process. Returns whether it is the owner."""
        now = self._clock()
        with self._writing() as db:
            if seconds is None:
                return bool(db.execute("UPDATE batch SET owner = ? WHERE id = ?", (owner, id)).rowcount)
            changed = db.execute(
                # A lease that is too far away is that of a process whose clock was wrong.
                "UPDATE batch SET owner = ?, lease = ? WHERE id = ? AND (owner IN ('', ?) OR lease < ? OR lease > ?)",
                (owner, now + seconds, id, owner, now, now + 2 * seconds),
            )
            return bool(changed.rowcount)

    def ended_before(self, time: float) -> list[ServedBatch]:
        return self._all(ServedBatch, "SELECT document FROM batch WHERE ended <= ? LIMIT 100", time)

    def remove_batch(self, id: str) -> None:
        """Remove a batch with its folder and the files that belong to it."""
        folder = self.data / BATCHES / id
        going = folder.with_name(id + DELETED)
        with suppress(FileNotFoundError):
            folder.rename(going)
        with self._writing() as db:
            db.execute("DELETE FROM file WHERE json_extract(document, '$.batch') = ?", (id,))
            db.execute("DELETE FROM idempotency WHERE batch = ?", (id,))
            db.execute("DELETE FROM batch WHERE id = ?", (id,))
        shutil.rmtree(going, ignore_errors=True)

    # Tokens by day

    def count_tokens(self, owner: str, used: Mapping[str, int], holds: Sequence[Hold]) -> DayTokens:
        """Count tokens that tenants used, and set what a process holds within the limit of the day. For other processes
        a hold counts as used; after a kill, until its day ends."""
        day, held = self._today(), dict[str, int]()
        if used or holds:
            with self._writing() as db:
                for tenant, count in used.items():
                    db.execute(
                        "INSERT INTO usage VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
                        "tokens = tokens + excluded.tokens",
                        (tenant, day, count),
                    )
                db.execute("DELETE FROM hold WHERE day < ?", (day - 1,))
                for hold in holds:
                    db.execute("DELETE FROM hold WHERE tenant = ? AND owner = ?", (hold.tenant, owner))
                    (counted,) = db.execute(
                        f"SELECT SUM(tokens) FROM ({USED}) WHERE tenant = ?", (day, day, hold.tenant)
                    )
                    most = hold.most if hold.limit is None else min(hold.most, hold.limit - (counted[0] or 0))
                    tokens = held[hold.tenant] = max(hold.least, most)
                    if tokens:
                        db.execute("INSERT INTO hold VALUES (?, ?, ?, ?)", (hold.tenant, day, owner, tokens))
        return DayTokens(self.used_today(owner), held)

    def used_today(self, owner: str = "") -> dict[str, int]:
        """Return the tokens that each tenant used today, together with the holds of all processes except ``owner``."""
        day = self._today()
        query = f"SELECT tenant, SUM(tokens) FROM ({USED}) WHERE owner != ? GROUP BY tenant"
        return {tenant: int(tokens) for tenant, tokens in self._rows(query, day, day, owner)}

    def _today(self) -> int:
        return int(self._clock() // 86400)

    # Notices to webhooks

    def due_notices(self, tenant: str) -> list[tuple[str, str, int]]:
        """Return id, body and number of failed attempts of the due notices to a tenant."""
        query = "SELECT id, body, tries FROM notice WHERE tenant = ? AND due <= ? ORDER BY due LIMIT 100"
        return [(id, body, int(tries)) for id, body, tries in self._rows(query, tenant, self._clock())]

    def next_notices(self) -> dict[str, float]:
        """Return when the next notice to each tenant is due."""
        return {tenant: float(due) for tenant, due in self._rows("SELECT tenant, min(due) FROM notice GROUP BY tenant")}

    def postpone_notice(self, id: str, seconds: float) -> None:
        with self._writing() as db:
            due = self._clock() + seconds
            db.execute("UPDATE notice SET tries = tries + 1, due = ? WHERE id = ?", (due, id))

    def remove_notice(self, id: str) -> None:
        with self._writing() as db:
            db.execute("DELETE FROM notice WHERE id = ?", (id,))


def _read(kind: type[Stored], document: str) -> Stored:
    return value_of(kind, orjson.loads(document))


def value_of(kind: type[Stored], document: Mapping[str, Any]) -> Stored:
    """Return a value from its document. Fields of other releases are ignored."""
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in document.items() if name in known})


def _json(value: ServedBatch | StoredFile) -> str:
    return orjson.dumps(asdict(value)).decode()


def _tenants_named(db: sqlite3.Connection, label: str) -> list[tuple[str, int]]:
    """Return name and state of the tenants that have or had a name, the latest first."""
    query = "SELECT name, revoked FROM tenant WHERE name = ? OR substr(name, 1, ?) = ? ORDER BY rowid DESC"
    start = label + AGAIN
    return [(name, state) for name, state in db.execute(query, (label, len(start), start))]


def _next_name(label: str, rows: Sequence[tuple[str, int]]) -> str:
    return f"{label}{AGAIN}{len(rows) + 1}" if rows else label


def _holder(db: sqlite3.Connection, rows: Sequence[tuple[str, int]], key: str) -> str:
    """Return the name of the tenant among ``rows`` that has this key, or ""."""
    for name, _ in rows:
        if db.execute("SELECT 1 FROM tenant WHERE name = ? AND hash = ?", (name, hashed(key))).fetchone():
            return name
    return ""


def insert_file(db: sqlite3.Connection, file: StoredFile) -> None:
    db.execute(
        "INSERT OR REPLACE INTO file (id, tenant, expires, document) VALUES (?, ?, ?, ?)",
        (file.id, file.tenant, file.expires, _json(file)),
    )


def add_batch(db: sqlite3.Connection, batch: ServedBatch) -> None:
    db.execute(
        "INSERT OR IGNORE INTO batch (id, tenant, wire, status, document) VALUES (?, ?, ?, ?, ?)",
        (batch.id, batch.tenant, batch.wire, batch.status, _json(batch)),
    )


def _keep_input(db: sqlite3.Connection, batch: ServedBatch, since: float) -> None:
    """Keep the input of a batch from ``since``, or from the deadline of another batch that still uses it."""
    query = "SELECT document FROM file WHERE id = ? AND json_extract(document, '$.kept_since') IS NOT NULL"
    found = db.execute(query, (batch.input_file,)).fetchone()
    if found is None:
        return
    query = "SELECT max(json_extract(document, '$.deadline')) FROM batch WHERE ended IS NULL AND id != ? AND "
    (other,) = db.execute(
        f"{query} json_extract(document, '$.input_file') = ?", (batch.id, batch.input_file)
    ).fetchone()
    file = _read(StoredFile, found[0])
    assert file.kept_since is not None and file.expires is not None
    keep = file.expires - file.kept_since
    since = max(since, other or since)
    _change_file(db, replace(file, kept_since=since, expires=since + keep))


def _change_file(db: sqlite3.Connection, file: StoredFile) -> None:
    db.execute("UPDATE file SET expires = ?, document = ? WHERE id = ?", (file.expires, _json(file), file.id))


def put_batch(db: sqlite3.Connection, batch: ServedBatch) -> None:
    if batch.ended is not None and batch.input_file:
        _keep_input(db, batch, batch.ended)
    db.execute(
        "UPDATE batch SET status = ?, ended = ?, document = ? WHERE id = ?",
        (batch.status, batch.ended, _json(batch), batch.id),
    )
