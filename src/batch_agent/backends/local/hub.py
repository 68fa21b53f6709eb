"""Downloads one file from a model hub (huggingface.co, or ``HF_ENDPOINT``), resumes after a break, and checks its hash.

The hub reports the hash. The incomplete file is in the target directory under a name that contains the hash, so that a
later download can continue it. It gets its final name when it is complete. Proxies are those of the environment.
Blocks.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.parse import quote, urljoin, urlsplit

from batch_agent.errors import SpecError

HUB = "https://huggingface.co"
CHUNK_BYTES = 1 << 20
SILENCE = 30.0  # seconds without a byte
ATTEMPTS = 5  # in sequence without progress
PAUSE = 1.0  # seconds before the second attempt; doubled for each further attempt
SPARE_BYTES = 64 << 20  # left free on the disk
REDIRECTS = 5
_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')

Report = Callable[[int, int | None], None]  # bytes done, total bytes


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
    """Download the file to ``target`` and return its SHA-256. Raises SpecError, and OSError for disk errors."""
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
        """Return the response at the end of redirects. One that describes the file is also an end for HEAD."""
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
