"""Where a connection goes: a server, and the proxy in between."""

from __future__ import annotations

from base64 import b64encode
from typing import NamedTuple

from yarl import URL


class Origin(NamedTuple):
    """What all requests on one connection have in common."""

    tls: bool
    host: str
    port: int
    proxy: URL | None = None

    @classmethod
    def of(cls, url: URL, proxy: URL | None = None) -> Origin:
        return cls(url.scheme == "https", url.raw_host or "", url.port or 80, proxy)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def basic_authorization(url: URL) -> str:
    """Return the login in a URL as the value of an Authorization header, or ""."""
    if url.user is None:
        return ""
    return "Basic " + b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
