"""A run as one HTML file: the page, its script and style, and its data.

It has no external references. Its content security policy allows only the script inside, by its hash, and no requests.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import counted
from batch_agent.view.bundle import STATIC, bundle
from batch_agent.view.query import Query
from batch_agent.view.record import RunRecord

Which: TypeAlias = Literal["failed", "all"] | int | str

MOST_SPANS = 20_000

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{script_hash}'; \
style-src 'sha256-{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Batch Agent</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header id="bar"></header>
<main id="page"></main>
<script type="application/json" id="report">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def report_html(run_dir: Path, which: Which) -> tuple[bytes, int]:
    """Return the file, and the number of rows in it with their conversations; for a pipeline, of all its stages."""
    name = run_dir.resolve().name
    whole, rows = _indexed(name, run_dir, which)
    stages = [_indexed(f"{name}/{stage}", run_dir / stage, which) for stage in RunRecord(name, run_dir).stages()]
    if stages:
        rows = sum(count for _, count in stages)  # the pipeline's own row stands for the whole pipeline
    data: list[JsonValue] = [whole, *(stage for stage, _ in stages)]
    style = (STATIC / "app.css").read_text()
    script = bundle()
    parts = {
        "style": style,
        "script": script,
        "script_hash": _hash(script),
        "style_hash": _hash(style),
        # The data cannot contain a tag.
        "data": to_json(data).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    }
    page = re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], PAGE)
    return page.encode("utf-8", "backslashreplace"), rows


def _indexed(key: str, path: Path, which: Which) -> tuple[JsonObject, int]:
    record = RunRecord(key, path)
    try:
        while record.index.step():
            pass
        return _data(record, which)
    finally:
        record.close()


def _data(record: RunRecord, which: Which) -> tuple[JsonObject, int]:
    overview = record.overview()
    total = cast(int, cast(JsonObject, overview["counts"])["rows"])
    limit = which if isinstance(which, int) else total
    query = Query(state="failed") if which == "failed" else Query()
    by_failure = isinstance(which, int)  # failed rows come first
    page = record.index.page(query, "state" if by_failure else "index", False, 0, max(1, limit))
    rows = sorted(cast("list[JsonObject]", page["rows"]), key=lambda row: cast(int, row["index"]))
    details: JsonObject = {str(row["index"]): record.row(str(row["index"])) for row in rows}
    note = f"It has {counted(len(rows), 'row')} of {total:,} with their conversations."
    data: JsonObject = {
        "overview": {**overview, "report_note": note},
        "timeline": record.timeline(None, None, MOST_SPANS),
        "rows": cast(JsonValue, rows),
        "details": details,
    }
    return data, len(rows)


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()
