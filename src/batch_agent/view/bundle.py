"""The JavaScript modules of the page as one script, so that the page needs one request and a report one script."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
# In the order of their imports.
SCRIPTS = ("dom", "source", "charts", "overview", "rows", "row", "timeline", "compare", "control", "main")
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
EXPORT = re.compile(r"^export ", re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)


@cache
def bundle() -> str:
    return "".join(_plain((STATIC / f"{name}.js").read_text(), name) for name in SCRIPTS)


def _plain(script: str, name: str) -> str:
    """Return a module as part of one script. Its imports come before it, and its own names are in their own scope."""
    exported = ", ".join(EXPORTED.findall(script))
    body = EXPORT.sub("", IMPORT.sub("", script))
    if not exported:
        return f"// {name}\n(() => {{\n{body}\n}})();\n"
    return f"// {name}\nconst {{ {exported} }} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n"
