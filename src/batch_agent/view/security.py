"""Access to the page: only with its token, and only from the page itself.

The token is first in the URL, then in a cookie. ``Host`` is checked against DNS rebinding. ``Origin`` is checked, so
that other pages cannot send requests.
"""

from __future__ import annotations

import hmac
import ipaddress
import platform
import secrets

from aiohttp import web
from aiohttp.typedefs import Handler

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """Checks each request. ``host`` is the address that the server listens on; ``port`` is set when it listens."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._host = host

    @property
    def cookie(self) -> str:
        """The name of the cookie. It has the port, because cookies are per host and several pages may be open."""
        return f"batch-agent-{self.port}"

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_known(request.host):
            return _refused("the page is not served under this host name")
        origin = request.headers.get("Origin")
        if origin != f"http://{request.host}" and (origin is not None or request.method != "GET"):
            return _refused("requests from other pages are refused")
        given = request.query.get("token", "")
        if not self._is_token(given) and not self._is_token(request.cookies.get(self.cookie, "")):
            return _refused("open the address that batch-agent view printed, with its token")
        response = await handler(request)
        if given and not response.prepared:
            response.set_cookie(self.cookie, given, httponly=True, samesite="Strict", path="/")
        return response

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _is_known(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        if port != str(self.port):
            return False
        if name in LOOPBACK or name.strip("[]") == self._host:
            return True
        return self._host in ("0.0.0.0", "::") and (name == platform.node() or _is_address(name.strip("[]")))


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(why: str) -> web.Response:
    return web.Response(status=403, text=f"403: {why}\n")
