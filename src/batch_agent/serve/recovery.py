"""What a start finds in a data directory, and what it does about it.

A catalog that is missing, damaged or older is completed from the descriptions beside batches, uploads and tenants.
Files with neither an entry nor a description are moved to ``lost/``. Nothing is deleted because the catalog does not
know it. Only three things are removed: what was already being removed, and uploads and batches that a client had not
sent completely. ``serve check`` finds the same things and changes nothing.
"""

from __future__ import annotations

import logging
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Self

import orjson

from batch_agent.errors import SpecError
from batch_agent.record.lock import is_locked
from batch_agent.serve.catalog import (
    FINAL,
    SCHEMA,
    Catalog,
    ServedBatch,
    StoredFile,
    add_batch,
    insert_file,
    put_batch,
    value_of,
)
from batch_agent.serve.descriptions import REVISION, TENANT_TABLES, Descriptions
from batch_agent.serve.directory import (
    BATCHES,
    CATALOG,
    DELETED,
    DESCRIPTION,
    ERRORS,
    FILES,
    INDEX,
    INPUT,
    JSON,
    LOCK_FILE,
    LOST,
    OUTPUT,
    PART,
    TABLES,
    TENANTS,
    claim,
    is_marked,
    move_to_lost,
    read_json_file,
)
from batch_agent.serve.lines import index_damage, outcomes_in, with_files

logger = logging.getLogger("batch_agent")

OLD_SECONDS = 86400.0  # after which no process is still about to enter something in a shared catalog
ORDER = ("validating", "in_progress", "finalizing", "cancelling")  # of the states of a batch; final ones come last
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"(msg)?batch_[0-9a-f]{32}")
DRAFT = re.compile(rf"({FILE_ID.pattern}|{BATCH_ID.pattern})(\.json\.[0-9a-f-]+)?\.part")
DOCUMENTS = {"file": StoredFile, "batch": ServedBatch}


@dataclass(frozen=True, slots=True)
class Recovered:
    """A finding in a data directory. ``done`` is what a start does about it."""

    part: str
    problem: str
    done: str

    def __str__(self) -> str:
        return f"{self.part}: {self.problem}; {self.done}"


def open_catalog(data: Path, *, shared: bool, clock: Callable[[], float]) -> RecoveredCatalog:
    """Return the catalog of a server that starts, completed from what is on disk. The caller holds the lock of the
    data. Raises SpecError if the directory is not ours."""
    claim(data)
    for name in (FILES, BATCHES):
        (data / name).mkdir(mode=0o700, exist_ok=True)
    path = data / CATALOG
    aside = None
    why = ""
    is_missing = not path.exists() or not path.stat().st_size
    if not shared and not is_missing and (why := damage(path)):
        aside = _set_aside(data)
    catalog = RecoveredCatalog(data, shared=shared, clock=clock)
    recovery = Recovery(catalog, acts=True, is_shared=shared)
    if aside is not None:
        rows = _salvage(aside, catalog)
        done = f"it is now {aside.relative_to(data)}, and a new one has the {rows} rows of it that could be read"
        recovery.find(CATALOG, f"it is damaged ({why})", done)
    elif is_missing:
        recovery.find_missing()
    recovery.look()
    return catalog


def check(data: Path, clock: Callable[[], float] = time.time) -> tuple[RecoveredCatalog, list[Recovered]]:
    """Return a copy of the catalog, and what a start would find. Nothing is changed. Raises SpecError if the directory
    is not ours."""
    if not data.is_dir():
        raise SpecError(f"there is no directory {data}")
    is_marked(data)
    path, runs = data / CATALOG, is_locked(data / LOCK_FILE) is True
    with tempfile.TemporaryDirectory(prefix="batch-agent-check-") as place:
        copy = Path(place) / CATALOG
        why = ""
        rows = 0
        is_missing = not path.exists() or not path.stat().st_size
        if is_missing:
            catalog = RecoveredCatalog.copy_of(None, data, clock)
        elif runs:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
                catalog = RecoveredCatalog.copy_of(source, data, clock)
        else:
            for part in data.glob(f"{CATALOG}*"):
                shutil.copyfile(part, copy.with_name(part.name))
            why = damage(copy)
            with closing(sqlite3.connect(copy)) as source:
                catalog = RecoveredCatalog.copy_of(None if why else source, data, clock)
            rows = _salvage(copy, catalog) if why else 0
    recovery = Recovery(catalog, acts=False, is_shared=runs)
    if is_missing:
        recovery.find_missing()
    elif why:
        done = f"it is moved to {LOST}/, and a new one has the {rows} rows of it that can be read"
        recovery.find(CATALOG, f"it is damaged ({why})", done)
    recovery.look()
    recovery.verify()
    return catalog, recovery.findings


def damage(path: Path) -> str:
    """Return the damage of a catalog, or "". No process may have it open."""
    try:
        with closing(sqlite3.connect(path)) as db:
            (told,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if told != "ok":
                return str(told)
            if not _tables(db) >= TABLES:
                return "tables are missing"
            for table, kind in DOCUMENTS.items():
                for id, document in db.execute(f"SELECT id, document FROM {table}"):
                    if not _is_document(kind, document):
                        return f"the entry of {id} cannot be read"
    except sqlite3.Error as error:
        return str(error)
    return ""


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _is_document(kind: type[StoredFile] | type[ServedBatch], document: object) -> bool:
    try:
        value_of(kind, orjson.loads(document))  # type: ignore[arg-type,type-var]
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def _set_aside(data: Path) -> Path:
    """Move a damaged catalog to ``lost/``, with its log. Returns its new path."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    aside = data / LOST / f"{stamp}-{CATALOG}"
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    for end in ("-wal", "-shm", "-journal", ""):
        if (part := data / f"{CATALOG}{end}").exists():
            part.rename(aside.with_name(aside.name + end))
    return aside


def _salvage(path: Path, catalog: RecoveredCatalog) -> int:
    """Add to a catalog all rows that can be read in a damaged one. Returns their number."""
    rows = 0
    for table in ("tenant", "file", "batch", "idempotency", "usage", "notice"):
        kind = DOCUMENTS.get(table)
        for order in ("ASC", "DESC"):  # from both sides of what is damaged
            good = [row for row in _readable(path, table, order) if not kind or _is_document(kind, row["document"])]
            rows += catalog.insert(table, good)
    return rows


def _readable(path: Path, table: str, order: str) -> Iterator[dict[str, Any]]:
    try:
        with closing(sqlite3.connect(path)) as db:
            found = db.execute(f"SELECT * FROM {table} ORDER BY rowid {order}")
            names = [column[0] for column in found.description]
            for row in found:
                yield dict(zip(names, row, strict=True))
    except sqlite3.Error:
        return


class RecoveredCatalog(Catalog):
    """A catalog that a start completes."""

    makes_again = True

    @classmethod
    def copy_of(cls, source: sqlite3.Connection | None, data: Path, clock: Callable[[], float]) -> Self:
        """Return a copy in memory, for reading; an empty one if there is no source."""
        copy = cls.__new__(cls)
        copy.data = data
        copy._clock = clock
        copy._lock = RLock()
        copy._shared = None
        copy._descriptions = Descriptions(data)
        copy._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if source is not None:
            source.backup(copy._db)
        copy._db.executescript(SCHEMA + REVISION)
        return copy

    def ids(self, kind: str) -> set[str]:
        """Return the ids of all batches, or of all files, with those that have expired."""
        return {id for (id,) in self._rows(f"SELECT id FROM {kind}")}

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Return the documents of all batches, or of all files."""
        return [orjson.loads(document) for (document,) in self._rows(f"SELECT document FROM {kind} ORDER BY seq")]

    def known_file(self, id: str) -> StoredFile | None:
        """Return a file of any tenant, even if it has expired; None if there is none."""
        return next(iter(self._all(StoredFile, "SELECT document FROM file WHERE id = ?", id)), None)

    def insert(self, table: str, rows: Iterable[Mapping[str, object]]) -> int:
        """Add the rows of another catalog that this one does not have, and return their number. Columns of other
        releases are ignored."""
        with self._lock:
            return self._insert(table, rows)

    def _insert(self, table: str, rows: Iterable[Mapping[str, object]]) -> int:
        added = 0
        known = {column[1] for column in self._db.execute(f"PRAGMA table_info({table})")}
        for row in rows:
            names = [name for name in row if name in known and name != "seq" and row[name] is not None]
            marks = ", ".join("?" * len(names))
            query = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({marks})"
            added += self._db.execute(query, [row[name] for name in names]).rowcount
        return added

    def revision(self) -> int:
        """Return how many times tenants were changed."""
        return int(self._rows("SELECT tenants FROM revision")[0][0])

    def take_back_tenants(self, document: Mapping[str, Any]) -> None:
        """Replace the tenants by those of their description."""
        with self._writing() as db:
            for table in TENANT_TABLES:
                db.execute(f"DELETE FROM {table}")
                self._insert(table, document[table])
            db.execute("UPDATE revision SET tenants = ?", (document["revision"],))

    def take_back_batch(self, batch: ServedBatch, key: str | None, files: Sequence[StoredFile]) -> None:
        """Add or replace a batch according to its description, with the files that it has."""
        with self._writing() as db:
            add_batch(db, batch)
            put_batch(db, batch)
            if key is not None:
                values = (batch.tenant, key, batch.digest, batch.id)
                db.execute("INSERT OR IGNORE INTO idempotency VALUES (?, ?, ?, ?)", values)
            for file in files:
                insert_file(db, file)


class Recovery:
    """Examines what is on disk. ``acts``: it also acts on its findings. ``is_shared``: other processes may be about to
    add something to the catalog."""

    def __init__(self, catalog: RecoveredCatalog, *, acts: bool, is_shared: bool) -> None:
        self._catalog = catalog
        self._data = catalog.data
        self._acts = acts
        self._before = time.time() - (OLD_SECONDS if is_shared else 0.0)
        self.findings: list[Recovered] = []

    def find(self, part: str, problem: str, done: str, act: Callable[[], object] = lambda: None) -> None:
        """Add a finding, and act on it."""
        finding = Recovered(part, problem, done)
        self.findings.append(finding)
        if self._acts:
            try:
                act()
            except OSError as error:  # it stays where it is
                logger.warning("%s: %s; it cannot be dealt with: %s", part, problem, error)
            else:
                logger.warning("%s", finding)

    def find_missing(self) -> None:
        if any(True for name in (FILES, BATCHES) for _ in (self._data / name).glob("*")):
            self.find(CATALOG, "it is missing or empty", "a new one is made from the descriptions of what is there")

    def look(self) -> None:
        self._tenants()
        for folder, look_at in ((FILES, self._file), (BATCHES, self._batch)):
            if (self._data / folder).is_dir():
                for path in sorted((self._data / folder).iterdir()):
                    if path.name.endswith(DELETED):
                        self._complete_removal(path)
                known = self._catalog.ids("file" if folder == FILES else "batch")
                for path in sorted((self._data / folder).iterdir()):
                    if not path.name.endswith(DELETED):
                        look_at(path, known)
        if self._acts:
            self._describe()

    def verify(self) -> None:
        """Search for missing or damaged content. This reads all outcomes."""
        for row in self._catalog.entries("file"):
            file = value_of(StoredFile, row)
            path = self._catalog.content_of(file)
            size = path.stat().st_size if path.exists() else None
            if size != file.bytes:
                told = "its content is missing" if size is None else f"it has {size} bytes instead of {file.bytes}"
                self.find(f"{file.id} ({self._name(path)})", told, "a start leaves it as it is")
        for row in self._catalog.entries("batch"):
            batch = value_of(ServedBatch, row)
            folder = self._data / BATCHES / batch.id
            if batch.is_over:
                self._verify_ended(folder, batch)
            elif not folder.is_dir():
                self.find(self._name(folder), "it is missing", f"the batch, which is {batch.status}, ends as failed")
            elif batch.total:
                self._verify_open(folder, batch)

    def _verify_ended(self, folder: Path, batch: ServedBatch) -> None:
        found = sum(outcomes_in(folder / name)[0] for name in (OUTPUT, ERRORS))
        deleted = batch.wire == "openai" and any(
            id and self._catalog.known_file(id) is None for id in (batch.output_file, batch.error_file)
        )
        if found < batch.completed and not deleted:
            told = f"{found} outcomes can be read, and {batch.completed} lines have an answer"
            self.find(self._name(folder), told, "a start leaves it as it is")

    def _verify_open(self, folder: Path, batch: ServedBatch) -> None:
        if why := index_damage(folder, batch.total, thorough=True):
            done = "it is made again from the input" if (folder / INPUT).exists() else "the batch ends as failed"
            self.find(self._name(folder / INDEX), f"it {why}", done)
        if not (folder / INPUT).exists():
            upload = self._catalog.known_file(batch.input_file)
            is_there = upload is not None and self._catalog.content_of(upload).exists()
            done = "it is made again from the upload" if is_there else "lines without an answer fail"
            self.find(self._name(folder / INPUT), "it is missing", done)
        for name in (OUTPUT, ERRORS, f"{OUTPUT}{PART}", f"{ERRORS}{PART}"):
            found, bad = outcomes_in(folder / name)
            if bad:
                told = f"{bad} of its {found + bad} lines cannot be read"
                self.find(self._name(folder / name), told, "they are answered again, from the record if it has them")

    def _tenants(self) -> None:
        document = read_json_file(self._data / TENANTS) or {}
        revision, known = document.get("revision"), self._catalog.revision()
        tables = [document.get(table) for table in TENANT_TABLES]
        if isinstance(revision, int) and revision > known and all(map(_are_rows, tables)):
            take_back = partial(self._catalog.take_back_tenants, document)
            self.find(TENANTS, "it is newer than the catalog", "the tenants are taken back from it", take_back)

    def _complete_removal(self, path: Path) -> None:
        id = path.name.removesuffix(DELETED)

        def complete() -> None:
            if path.parent.name == BATCHES:
                self._catalog.remove_batch(id)
            elif (file := self._catalog.known_file(id)) is not None:
                self._catalog.remove_file(file)
            else:
                path.unlink()

        if (FILE_ID if path.parent.name == FILES else BATCH_ID).fullmatch(id):
            self.find(self._name(path), "its removal was interrupted", "the removal is completed", complete)

    def _file(self, path: Path, known: set[str]) -> None:
        id = path.name.removesuffix(JSON)
        if path.name in known:
            return
        if DRAFT.fullmatch(path.name):
            self._remove_draft(path, "an upload that was not complete")
        elif path.name != id and FILE_ID.fullmatch(id):  # a description
            if not path.with_name(id).exists() and id not in known:
                self._lose(path, "it describes a file that is not there")
        elif (file := self._described(path, path.with_name(f"{id}{JSON}"), StoredFile)) is not None:
            size = path.stat().st_size
            differs = "" if size == file.bytes else f", and {size} bytes instead of {file.bytes}"
            self.find(
                self._name(path),
                f"it has no entry in the catalog{differs}",
                "it is taken back from its description",
                lambda: self._catalog.add_file(_kept_anew(replace(file, bytes=size))),
            )
        else:
            self._lose(path, "it has no entry in the catalog and no description")

    def _batch(self, path: Path, known: set[str]) -> None:
        batch = None
        if path.name in known:
            entry = self._catalog.batch(path.name)
            if entry is None or entry.is_over:
                return
            batch = self._described(path, path / DESCRIPTION, ServedBatch)
            if batch is None or _rank(batch) <= _rank(entry):
                return
            problem = f"the catalog has it as {entry.status}, and its description as {batch.status}"
        elif DRAFT.fullmatch(path.name):
            return self._remove_draft(path, "a batch that was not sent completely")
        else:
            batch = self._described(path, path / DESCRIPTION, ServedBatch)
            problem = "it has no entry in the catalog"
        if batch is None:
            return self._lose(path, "it has no entry in the catalog and no description")
        key = (read_json_file(path / DESCRIPTION) or {}).get("idempotency_key")
        batch, files = with_files(path, batch, 0.0) if batch.is_over else (batch, [])
        taken = batch, key if isinstance(key, str) else None, files
        done = "it is taken back from its description"
        self.find(self._name(path), problem, done, lambda: self._catalog.take_back_batch(*taken))
        return None

    def _described(self, path: Path, beside: Path, kind: type[Any]) -> Any:
        """Return the content of the description of a file or batch; None if there is none with this id."""
        document = (read_json_file(beside) or {}).get("file" if kind is StoredFile else "batch")
        if not isinstance(document, dict) or document.get("id") != path.name:
            return None
        return value_of(kind, document) if _is_document(kind, orjson.dumps(document)) else None

    def _remove_draft(self, path: Path, what: str) -> None:
        if path.stat().st_mtime <= self._before:
            remove = shutil.rmtree if path.is_dir() else Path.unlink
            self.find(self._name(path), what, "it is removed", lambda: remove(path))

    def _lose(self, path: Path, problem: str) -> None:
        if path.lstat().st_mtime <= self._before:
            move = lambda: move_to_lost(self._data, path)  # noqa: E731
            self.find(self._name(path), problem, f"it is moved to {LOST}/{self._name(path)}", move)

    def _describe(self) -> None:
        """Write missing descriptions: earlier versions wrote none."""
        files, batches = self._data / FILES, self._data / BATCHES
        self._catalog.describe("file", [id for id in self._catalog.ids("file") if not (files / f"{id}{JSON}").exists()])
        missing = [id for id in self._catalog.ids("batch") if not (batches / id / DESCRIPTION).exists()]
        self._catalog.describe("batch", missing)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._data))


def _kept_anew(file: StoredFile) -> StoredFile:
    """Return a file whose time to be kept starts now, because its batches are unknown. If its client has set an expiry,
    that stays."""
    return file if file.kept_since is None else replace(file, kept_since=None, expires=None)


def _rank(batch: ServedBatch) -> int:
    return len(ORDER) if batch.status in FINAL else ORDER.index(batch.status)


def _are_rows(told: object) -> bool:
    return isinstance(told, list) and all(isinstance(row, dict) for row in told)
