"""A model hub on two real sockets: the hub itself, and the host that it sends downloads to."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "9217f5db79a29953eb74d5343926648285ec7e67"
REPO = "acme/tiny-GGUF"
FILE = "tiny.gguf"


@dataclass
class Hub:
    data: bytes
    sent: bytes | None = None  # what is really sent, where that is something else
    token: str = ""  # without it, the repository is not shown
    cuts: list[int] = field(default_factory=list)  # bytes after which each of the next answers breaks off
    refusals: list[int] = field(default_factory=list)  # statuses of the next answers of the other host
    ranges: bool = True
    stated: str | None = None  # the hash, where it is another one
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # host, "METHOD path", headers
    url: str = ""
    other_url: str = ""

    @property
    def downloads(self) -> list[str]:
        """The ranges that were asked of the other host."""
        return [headers.get("range", "all") for host, _, headers in self.requests if host == "other"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    host: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append((self.host, f"{self.command} {self.path}", headers))
        if self.host == "hub":
            self._redirect(headers)
        else:
            self._send_file(headers)

    def _redirect(self, headers: dict[str, str]) -> None:
        hub = self.hub
        if self.path.startswith("/old/name/"):  # a repository that moved
            return self._say(307, {"Location": self.path.replace("/old/name/", f"/{REPO}/")})
        if hub.token and headers.get("authorization") != f"Bearer {hub.token}":
            return self._say(401, {"X-Error-Code": "GatedRepo"})
        if not self.path.startswith(f"/{REPO}/resolve/"):
            return self._say(404, {"X-Error-Code": "RepoNotFound"})
        if self.path not in (f"/{REPO}/resolve/main/{FILE}", f"/{REPO}/resolve/{COMMIT}/{FILE}"):
            return self._say(404, {"X-Error-Code": "EntryNotFound"})
        stated = hub.stated or f'"{hashlib.sha256(hub.data).hexdigest()}"'
        self._say(
            302,
            {
                "Location": f"{hub.other_url}/signed?file={FILE}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": stated,
                "X-Linked-Size": str(len(hub.data)),
            },
        )

    def _send_file(self, headers: dict[str, str]) -> None:
        hub = self.hub
        if hub.refusals:
            return self._say(hub.refusals.pop(0), {})
        body = hub.data if hub.sent is None else hub.sent
        start = int(headers["range"].removeprefix("bytes=").rstrip("-")) if hub.ranges and "range" in headers else 0
        said = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        cut = hub.cuts.pop(0) if hub.cuts else None
        self._say(206 if start else 200, said, body[start:], cut)

    def _say(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    servers = []
    for host in ("hub", "other"):
        handler = type("Handler", (_Handler,), {"hub": hub, "host": host})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
    hub.url, hub.other_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
