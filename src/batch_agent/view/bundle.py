"""The files of a page. Its JavaScript modules are one script, so that the page needs one request and a report one
script."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from aiohttp import web

from batch_agent.door import RequestRefused

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
# In the order of their imports.
SCRIPTS = ("dom", "source", "charts", "overview", "rows", "row", "timeline", "compare", "control", "main")
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
