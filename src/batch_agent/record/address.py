"""URLs of runs in Redis: ``redis://host:6379/0/NAME``, ``rediss://…``, ``redis-cluster://host:port/NAME``.

The password comes from the URL or from ``BATCH_AGENT_REDIS_PASSWORD``. This module never prints it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from batch_agent.errors import SpecError

PASSWORD_VARIABLE = "BATCH_AGENT_REDIS_PASSWORD"
SCHEMES = ("redis", "rediss", "redis-cluster")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PORT = 6379
FORM = "redis://host:6379/0/NAME, rediss://host:6379/0/NAME or redis-cluster://host:6379/NAME"


def masked(text: str) -> str:
    """Return the text without the users and passwords of its Redis URLs."""
    return re.sub(r"((?:rediss?|redis-cluster)://)[^@/\s]*@", r"\1", text)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A Redis server and a run on it. ``name`` is "" if the address names only the server. ``stage`` is the stage of a
    pipeline, "" for a plain run. The keys of a stage share the hash tag of its run."""

    scheme: str
    host: str
    port: int
    database: int = 0
    name: str = ""
    stage: str = ""
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str | Path, *, environ: Mapping[str, str] = os.environ, named: bool = True) -> Self:
        """Return the address in a URL. ``named``: the URL must name a run. Raises SpecError, with a message that does
        not repeat the URL, because that may contain a password."""
        try:
            parts = urlsplit(str(url))
            host = parts.hostname
            port = parts.port or PORT
        except ValueError:
            raise SpecError(f"run_dir: this is not the URL of a run; write {FORM}") from None
        if parts.scheme not in SCHEMES:
            raise SpecError(f"run_dir: {parts.scheme}:// cannot hold runs; write a directory, or {FORM}")
        if not host:
            raise SpecError(f"run_dir: the URL names no host; write {FORM}")
        if parts.query or parts.fragment:
            raise SpecError(f"run_dir: the URL of a run has no ? and no #; write {FORM}")
        database, names = _path(parts)
        if named and not names:
            raise SpecError(f"run_dir: the URL names no run; write {FORM}")
        password = unquote(parts.password) if parts.password else environ.get(PASSWORD_VARIABLE) or None
        user = unquote(parts.username) if parts.username else None
        name, stage = (*names, "", "")[:2]
        return cls(parts.scheme, host, port, database, name, stage, user, password)

    @property
    def tls(self) -> bool:
        return self.scheme == "rediss"

    @property
    def cluster(self) -> bool:
        return self.scheme == "redis-cluster"

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this run. The braces are the hash tag: they keep all keys on one node of a Redis
        Cluster."""
        return f"batch-agent:{{{self.name}}}:{self.stage}{':' if self.stage else ''}"

    def at(self, name: str, stage: str = "") -> StoreAddress:
        """Return the address of another run on this server, or of a stage of it."""
        return replace(self, name=name, stage=stage)

    def refuse_stage(self) -> None:
        """Raise SpecError if this is a stage of a pipeline, where a whole run is needed."""
        if self.stage:
            raise SpecError(f"{self} is a stage: give its run, {self.at(self.name)}")

    def __str__(self) -> str:
        """Return the URL without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = [*([] if self.cluster else [str(self.database)]), *filter(None, (self.name, self.stage))]
        return f"{self.scheme}://{host}:{self.port}" + "".join(f"/{part}" for part in path)


RunPlace: TypeAlias = Path | StoreAddress


def place_of(run: str | Path, *, named: bool = True) -> RunPlace:
    """Return the place of a run's record: a directory, or an address in Redis. ``named``: a URL must name a run. Raises
    SpecError for an invalid URL."""
    is_url = isinstance(run, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", run)
    return StoreAddress.parse(run, named=named) if is_url else Path(run)


def directory_of(run_dir: str | Path | None) -> Path | None:
    """Return the absolute path of the run directory; None for a run in Redis or without a record. The path is absolute
    because a tool may change the working directory."""
    place = None if run_dir is None else place_of(run_dir)
    return place.absolute() if isinstance(place, Path) else None


def _path(parts: SplitResult) -> tuple[int, list[str]]:
    """Return the database number and the names in the path of a URL."""
    names = [unquote(part) for part in parts.path.split("/") if part]
    database = 0
    if parts.scheme != "redis-cluster" and names and names[0].isdecimal():
        database = int(names.pop(0))
    if len(names) > 2:
        raise SpecError(f"run_dir: {'/'.join(names[:2])} is a stage: give its run, {names[0]}; write {FORM}")
    if not all(NAME.fullmatch(name) for name in names):
        raise SpecError(f"run_dir: the name of a run has only letters, digits, dots, dashes and _; write {FORM}")
    return database, names
