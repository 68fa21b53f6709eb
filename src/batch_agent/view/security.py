"""The files of the page, and access to it: only with its token, and only from the page itself.

The token is first in the URL, then in a cookie. The door checks ``Host`` and ``Origin``. A cookie is sent with every
request, so here ``Origin`` must also be there for requests that act, and the port must be the page's.

The JavaScript modules of a page are one script, so that the page needs one request and a report one script.
"""

from __future__ import annotations

import re
import secrets
from functools import cache
from pathlib import Path

from aiohttp import web

from batch_agent.door import Door, Handler, RequestRefused, same_secret

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


class Guard:
    """Checks each request before ``handler`` gets it. ``door`` is set when the server listens."""

    door: Door

    def __init__(self, handler: Handler) -> None:
        self.token = secrets.token_urlsafe(24)
        self._handler = handler

    @property
    def cookie(self) -> str:
        """The name of the cookie. It has the port, because cookies are per host and several pages may be open."""
        return f"batch-agent-{self.door.port}"

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Host", "").rpartition(":")[2] != str(self.door.port):
            raise RequestRefused(403, "the page is not served at this port")
        if "Origin" not in request.headers and request.method not in ("GET", "HEAD"):
            raise RequestRefused(403, "requests from other pages are refused")
        given = request.query.get("token", "")
        if not same_secret(given, self.token) and not same_secret(request.cookies.get(self.cookie, ""), self.token):
            raise RequestRefused(403, "open the address that batch-agent view printed, with its token")
        response = await self._handler(request)
        if given and not response.prepared:
            response.set_cookie(self.cookie, given, httponly=True, samesite="Strict", path="/")
        return response


def add_headers(response: web.StreamResponse) -> web.StreamResponse:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


# The files of a page. Its JavaScript modules are one script, so that the page needs one request and a report one
# script.

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
# In the order of their imports.
SCRIPTS = ("dom", "source", "charts", "score", "overview", "rows", "row", "timeline", "compare", "control", "main")
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
EXPORT = re.compile(r"^export ", re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)


@cache
def bundle(scripts: tuple[str, ...] = SCRIPTS) -> str:
    return "".join(_plain((STATIC / f"{name}.js").read_text(), name) for name in scripts)


def static_file(name: str, scripts: tuple[str, ...] = SCRIPTS) -> web.Response:
    """Return a file of a page that has these scripts. Raises RequestRefused."""
    if name == "app.js":
        return web.Response(text=bundle(scripts), content_type=TYPES[".js"])
    path = STATIC / name
    if path.parent != STATIC or path.suffix not in TYPES or not path.is_file():
        raise RequestRefused(404, "there is no such file")
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


def _plain(script: str, name: str) -> str:
    """Return a module as part of one script. Its imports come before it, and its own names are in their own scope."""
    exported = ", ".join(EXPORTED.findall(script))
    body = EXPORT.sub("", IMPORT.sub("", script))
    if not exported:
        return f"// {name}\n(() => {{\n{body}\n}})();\n"
    return f"// {name}\nconst {{ {exported} }} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n"
