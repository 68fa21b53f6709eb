"""The files of a user's worker: a directory for each row, and the artifacts named in its result.

In a run directory they are at ``rows/N/work`` and ``rows/N/artifacts``; N is the row's number in the journal, which
does not change when it is resumed. Without a run directory they are temporary: artifacts stay until the process ends,
all other files until their row ends.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from batch_agent.errors import InputError, WorkerFailed
from batch_agent.record.private import private

ROWS = "rows"
WORK = "work"
ARTIFACTS = "artifacts"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,199}")
NONE: Mapping[str, Path] = {}


class Workplace:
    """The files of one row. ``directory`` is created, empty, at first use."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made = False
        self.artifacts: dict[str, Path] = {}

    @property
    def directory(self) -> Path:
        path = self._base / WORK
        if not self._made:
            path.mkdir(0o700, parents=True, exist_ok=True)
            self._made = True
        return path

    def save(self, name: str, content: str | bytes | Path) -> Path:
        """Save text, bytes or a copy of a file as an artifact. Returns its path."""
        if not NAME.fullmatch(str(name)):
            raise InputError(
                f"{name!r} is no valid artifact name: use letters, digits, spaces, '.', '_' and '-', and no directory"
            )
        path = self._base / ARTIFACTS / name
        draft = path.with_name(f".{name}")  # never the name of an artifact
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            if isinstance(content, str | bytes):
                with open(draft, "wb", opener=private) as file:
                    file.write(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
            elif isinstance(content, os.PathLike):
                shutil.copyfile(content, draft)
            else:
                raise InputError(f"the artifact {name} is {type(content).__name__}: give text, bytes or a Path")
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise WorkerFailed(f"the artifact {name} cannot be saved: {error.strerror or error}") from None
        self.artifacts[name] = path
        return path

    def leave(self) -> None:
        """Remove everything except the artifacts. Blocks."""
        shutil.rmtree(self._base / WORK if self.artifacts else self._base, ignore_errors=True)


class Workplaces:
    """The files of all rows. ``run_dir`` is None for a run without a record."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._temporary: Path | None = None
        self._count = 0

    @property
    def keeps(self) -> bool:
        """Whether a row's directory is kept after the row's end."""
        return self._run_dir is not None

    def open(self, agent: int) -> Workplace:
        if self._run_dir is not None and agent:
            return Workplace(self._run_dir / ROWS / str(agent))
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="batch-agent-"))
            atexit.register(shutil.rmtree, self._temporary, ignore_errors=True)  # artifacts are read after the run
        self._count += 1
        return Workplace(self._temporary / str(self._count))

    def clear(self, agent: int) -> None:
        """Remove the files of an interrupted worker. Blocks."""
        if self._run_dir is not None and agent:
            shutil.rmtree(self._run_dir / ROWS / str(agent), ignore_errors=True)

    def artifacts(self, agent: int) -> Mapping[str, Path]:
        """Return the artifacts of a row from an earlier session."""
        if self._run_dir is None or not agent:
            return NONE
        try:
            found = sorted((self._run_dir / ROWS / str(agent) / ARTIFACTS).iterdir())
        except OSError:
            return NONE
        return {path.name: path for path in found if NAME.fullmatch(path.name)}
