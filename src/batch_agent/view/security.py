"""The files of the page, and access to it: only with its token, and only from the page itself.

The token is first in the URL, then in a cookie. The door checks ``Host`` and ``Origin``. A cookie is sent with every
request, so here ``Origin`` must also be there for requests that act, and the port must be the page's.

A link for reviewers has a token of its own, which is made from the key of one run and reaches the review of that run
alone.

The JavaScript modules of a page are one script, so that the page needs one request and a report one script.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
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
    """Checks each request before ``handler`` gets it. ``door`` is set when the server listens. ``open_to_reviewers``
    says whether a path belongs to the review, or to the files of its page."""

    door: Door

    def __init__(self, handler: Handler, open_to_reviewers: Callable[[str], bool] = lambda path: False) -> None:
        self.token = secrets.token_urlsafe(24)
        self._secret = secrets.token_bytes(32)
        self._handler, self._open_to_reviewers = handler, open_to_reviewers

    @property
    def cookie(self) -> str:
        """The name of the cookie. It has the port, because cookies are per host and several pages may be open."""
        return f"batch-agent-{self.door.port}"

    def review_token(self, key: str) -> str:
        """Return the token that reaches the review of this run."""
        return hmac.new(self._secret, key.encode("utf-8", "surrogatepass"), "sha256").hexdigest()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Host", "").rpartition(":")[2] != str(self.door.port):
            raise RequestRefused(403, "the page is not served at this port")
        if "Origin" not in request.headers and request.method not in ("GET", "HEAD"):
            raise RequestRefused(403, "requests from other pages are refused")
        given = request.query.get("token", "")
        name = self.cookie
        token = self.token
        if not same_secret(given, token) and not same_secret(request.cookies.get(name, ""), token):
            name, token = self._reviewer(request, given)
        response = await self._handler(request)
        if same_secret(given, token) and not response.prepared:
            response.set_cookie(name, given, httponly=True, samesite="Strict", path="/")
        return response

    def _reviewer(self, request: web.BaseRequest, given: str) -> tuple[str, str]:
        """Return the name of the cookie of a reviewer, and the token in it. Raises RequestRefused unless the request is
        one that reviewers of this run may make."""
        refused = RequestRefused(403, "open the address that batch-agent view printed, with its token")
        key, start = request.query.get("run"), f"{self.cookie}-review-"
        if key is None:  # a file of the page, which has nothing of a run
            known = any(name.startswith(start) for name in request.cookies)
            if known and self._open_to_reviewers(request.path) and request.path.startswith("/static/"):
                return start, self.token
            raise refused
        name = start + blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
        token = self.review_token(key)
        if not same_secret(given, token) and not same_secret(request.cookies.get(name, ""), token):
            raise refused
        if not self._open_to_reviewers(request.path):
            raise RequestRefused(403, "the link for reviewers reaches the review alone")
        return name, token


def add_headers(response: web.StreamResponse) -> web.StreamResponse:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
# In the order of their imports.
SCRIPTS = ("dom", "source", "charts", "score", "overview", "rows", "row", "timeline", "compare", "control", "main")
REVIEW_SCRIPTS = ("dom", "review")
BUNDLES = {"review-page.js": REVIEW_SCRIPTS}
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
EXPORT = re.compile(r"^export ", re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)


@cache
def bundle(scripts: tuple[str, ...] = SCRIPTS) -> str:
    """Return these JavaScript modules as one script, so that the page needs one request and a report one script."""
    return "".join(_plain((STATIC / f"{name}.js").read_text(), name) for name in scripts)


def static_file(name: str, scripts: tuple[str, ...] = SCRIPTS) -> web.Response:
    """Return a file of a page that has these scripts. Raises RequestRefused."""
    if name == "app.js" or name in BUNDLES:
        return web.Response(text=bundle(BUNDLES.get(name, scripts)), content_type=TYPES[".js"])
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
