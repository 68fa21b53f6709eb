"""Copies the data directory of a server while it runs. A server can start from the copy.

The catalog is copied first, and databases are copied through SQLite. Files that change meanwhile are newer in the copy
than its catalog says. The same is true after a kill, and a start handles it. The catalog and the marker get their final
names last, so that an incomplete copy is not taken for a whole one.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from batch_agent.errors import SpecError
from batch_agent.serve.directory import (
    BATCHES,
    CATALOG,
    DELETED,
    FILES,
    JSON,
    KEY_FILE,
    PART,
    TENANTS,
    claim,
    is_marked,
    sync,
)

ATTEMPTS = 5  # at a folder whose files get other names while it is copied
LEFT_OUT = ("lock", "run.lock", "body.json", "control.json")
LEFT_OUT_ENDS = (DELETED, ".new", "-wal", "-shm", "-journal")


@dataclass(slots=True)
class BackedUp:
    """What was copied. ``missing``: entries of the catalog whose files were not in the directory."""

    batches: int = 0
    files: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)


def back_up(data: Path, target: Path) -> BackedUp:
    """Copy the data directory of a server to a new directory. Blocks. Raises SpecError."""
    if not data.is_dir() or not (is_marked(data) or (data / CATALOG).exists()):
        raise SpecError(f"{data} is not the --data of a server: there is no {CATALOG}")
    is_new = not target.exists()
    if not is_new and (not target.is_dir() or any(target.iterdir())):
        raise SpecError(f"{target} is there and not empty: a backup needs a new directory")
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _Copying(data, target).copy()
    except BaseException as error:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError | sqlite3.Error):
            raise SpecError(f"the backup to {target} failed, and is removed: {error}") from None
        raise


class _Copying:
    def __init__(self, data: Path, target: Path) -> None:
        self._data, self._target = data, target
        self._copied: dict[tuple[int, int], Path] = {}  # by device and inode: an input is a link to its upload
        self._done = BackedUp()

    def copy(self) -> BackedUp:
        done, catalog = self._done, self._target / f"{CATALOG}{PART}"
        _copy_database(self._data / CATALOG, catalog)
        for name in (FILES, BATCHES):
            (self._target / name).mkdir(mode=0o700)
        with closing(sqlite3.connect(catalog, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=DELETE")
            for (id,) in db.execute("SELECT id FROM file WHERE json_extract(document, '$.batch') = ''").fetchall():
                if self._copy_file(Path(FILES) / id):
                    self._copy_file(Path(FILES) / f"{id}{JSON}")
                    done.files += 1
                else:
                    done.missing.append(f"{FILES}/{id}")
                    db.execute("DELETE FROM file WHERE id = ?", (id,))
            for id, ended in db.execute("SELECT id, ended FROM batch").fetchall():
                if self._copy_folder(Path(BATCHES) / id):
                    done.batches += 1
                    continue
                done.missing.append(f"{BATCHES}/{id}")
                if ended is not None:  # it was removed meanwhile
                    db.execute("DELETE FROM file WHERE json_extract(document, '$.batch') = ?", (id,))
                    db.execute("DELETE FROM batch WHERE id = ?", (id,))
        for name in (KEY_FILE, TENANTS):
            self._copy_file(Path(name))
        sync(catalog)
        catalog.rename(self._target / CATALOG)
        claim(self._target)
        return done

    def _copy_folder(self, folder: Path) -> bool:
        """Copy a folder with its content. Returns False if the folder does not exist."""
        if not (self._data / folder).is_dir():
            return False
        (self._target / folder).mkdir(mode=0o700)
        for _ in range(ATTEMPTS):
            copied = [self._copy_entry(folder / path.name) for path in self._entries(folder)]
            if all(copied):
                break
        sync(self._target / folder)
        return (self._data / folder).is_dir()

    def _entries(self, folder: Path) -> list[Path]:
        """Return the entries of a folder that are still to be copied."""
        try:
            found = sorted((self._data / folder).iterdir())
        except FileNotFoundError:
            return []
        return [
            path
            for path in found
            if path.name not in LEFT_OUT
            and not path.name.endswith(LEFT_OUT_ENDS)
            and not (self._target / folder / path.name).exists()
        ]

    def _copy_entry(self, path: Path) -> bool:
        source = self._data / path
        if source.is_dir():
            return self._copy_folder(path)
        if source.exists() and not source.is_file():  # a socket
            return True
        if path.name == "journal.db":
            with suppress(sqlite3.Error):  # else it is damaged, and copied as it is
                _copy_database(source, self._target / path)
                return True
            (self._target / path).unlink(missing_ok=True)
        return self._copy_file(path)

    def _copy_file(self, path: Path) -> bool:
        """Copy a file. Returns False if it was removed meanwhile."""
        target = self._target / path
        try:
            with (self._data / path).open("rb") as source:
                found = os.fstat(source.fileno())
                inode = found.st_dev, found.st_ino
                if found.st_nlink > 1 and inode in self._copied:
                    with suppress(OSError):  # of a file system without links
                        os.link(self._copied[inode], target)
                        return True
                with open(target, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as copy:
                    shutil.copyfileobj(source, copy, 1024 * 1024)
                    copy.flush()
                    os.fsync(copy.fileno())
                    self._done.bytes += copy.tell()
        except FileNotFoundError:
            return False
        self._copied[inode] = target
        return True


def _copy_database(source: Path, target: Path) -> None:
    target.touch(0o600)
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        new.commit()
    sync(target)
