"""``python docs/tables.py``: writes the table of backends into the pages that have its marks.

Made of the lines of ``batch_agent.backends.schemes`` and of the Capabilities of each backend, which is opened for it
and asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batch_agent.backends.base import Capabilities
from batch_agent.backends.registry import open_backend
from batch_agent.backends.schemes import SCHEMES, Scheme

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "backends.md")
BEGIN, END = "<!-- backends -->", "<!-- end of backends -->"
HEADER = ("`backend=`", "", "key from", "keeps schemas", "... beside tools", "sees", "tells its load", "options")


def able(scheme: Scheme) -> Capabilities:
    # A fleet can what its servers can.
    url: object = ["vllm://host"] if scheme.name == "fleet" else scheme.form.replace("host:port", "host:1")
    backend, _ = open_backend(url, model=None, api_key=None, environ={}, sends=False)
    return backend.capabilities


def table() -> Iterator[str]:
    yield "| " + " | ".join(HEADER) + " |"
    yield "| --- " * len(HEADER) + "|"
    for scheme in SCHEMES.values():
        can = able(scheme)
        schemas = ("yes" if can.schema_proven else "found out") if can.native_schema else ""
        flags = (can.schema_with_tools, can.images, can.reports_load)
        key = f"`{scheme.key}`" if scheme.key else ""
        options = ", ".join(f"`{name}`" for name in (*scheme.options, *scheme.texts))
        cells = (f"`{scheme.form}`", scheme.what, key, schemas, *("yes" if flag else "" for flag in flags), options)
        yield "| " + " | ".join(cells) + " |"


def filled(page: str) -> str:
    """The page with the table between its marks; without marks, as it is."""
    if BEGIN not in page:
        return page
    before, rest = page.split(BEGIN)
    lines = "\n".join(table())
    return f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}"


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
