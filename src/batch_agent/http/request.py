"""Writes the head of a request as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from yarl import URL

from batch_agent.errors import SpecError
from batch_agent.http.origin import basic_authorization

_OWN = frozenset({"content-length", "host", "transfer-encoding"})  # these decide where a request goes and ends
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_TARGET = re.compile(r"[!-~]+")
_LINE_END = re.compile(r"[\r\n\0]")


def write_head(method: str, url: URL, headers: Mapping[str, str], proxy: URL | None) -> bytes:
    """Return everything except the length of the body and the empty line, which ``with_length`` adds. ``proxy`` is the
    one in between; inside a tunnel (https) it sees nothing of this."""
    to_proxy = proxy is not None and url.scheme == "http"
    target = str(url.with_user(None).with_fragment(None)) if to_proxy else url.raw_path_qs or "/"
    if not _TARGET.fullmatch(target):
        raise SpecError(f"{target!r} is not a valid request target: it has characters not allowed in a URL")
    start = f"{method} {target} HTTP/1.1\r\nHost: {headers.get('Host') or url.host_port_subcomponent}\r\n"
    login = basic_authorization(proxy) if to_proxy and proxy is not None else ""
    more = [("Proxy-Authorization", login)] if login else []
    return start.encode() + write_lines([*headers.items(), *more])


def write_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return header lines, without those that ``write_head`` and ``with_length`` write."""
    lines = []
    for name, value in headers:
        if _LINE_END.search(name) or _LINE_END.search(value):
            raise SpecError(f"the header {name!r} has a line break in it")
        if name.lower() not in _OWN:
            lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def with_length(head: bytes, method: str, body: bytes | None) -> bytes:
    """Return a complete head for this body."""
    if not body and method in _WITHOUT_BODY:
        return head + b"\r\n"
    return b"%bContent-Length: %d\r\n\r\n" % (head, len(body or b""))
