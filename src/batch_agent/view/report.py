"""A run, or two with their comparison, as one HTML file: the page, its script and style, and its data.

It has no external references. Its content security policy allows only the script inside, by its hash, and no requests.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Literal, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import counted
from batch_agent.record.certificate import certificate_of
from batch_agent.record.reader import RunReader
from batch_agent.view.compare import compare_now
from batch_agent.view.record import Query, RunRecord
from batch_agent.view.security import STATIC, bundle

Which: TypeAlias = Literal["failed", "all"] | int | str

MOST_SPANS = 20_000
MOST_DIFFERENCES = 1000

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


def report_html(runs: Sequence[RunReader], which: Which) -> tuple[bytes, int]:
    """Return the file, and the number of rows in it with their conversations; for a pipeline, of all its stages. Two
    runs are compared. Their readers are closed."""
    rows, data = 0, list[JsonValue]()
    with ExitStack() as stack:
        records = [stack.enter_context(_indexed(key, run)) for key, run in zip(_keys(runs), runs, strict=True)]
        for record in records:
            whole, count = _data(record, which)
            data.append(whole)
            stages = record.run.begun_stages()
            for name in stages:
                with record.run.stage(name) as stage, _indexed(f"{record.key}/{name}", stage) as part:
                    own, of_stage = _data(part, which)
                    data.append(own)
                    rows += of_stage
            rows += 0 if stages else count  # the pipeline's own row stands for the whole pipeline
        compared = compare_now(records[0], records[1], MOST_DIFFERENCES) if len(records) > 1 else None
    style = (STATIC / "app.css").read_text()
    script = bundle()
    content: JsonObject = {"runs": data, "named": [record.key for record in records], "compare": compared}
    parts = {
        "style": style,
        "script": script,
        "script_hash": _hash(script),
        "style_hash": _hash(style),
        # The data cannot contain a tag.
        "data": to_json(content).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    }
    page = re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], PAGE)
    return page.encode("utf-8", "backslashreplace"), rows


def _keys(runs: Sequence[RunReader]) -> list[str]:
    first, *others = [run.title for run in runs]
    return [first, *(f"{other}-2" if other == first else other for other in others)]


@contextmanager
def _indexed(key: str, run: RunReader) -> Iterator[RunRecord]:
    record = RunRecord(key, run)
    try:
        while record.index_more():
            pass
        yield record
    finally:
        record.close()


def _data(record: RunRecord, which: Which) -> tuple[JsonObject, int]:
    overview = record.overview()
    promise = overview["promise"]
    if isinstance(promise, dict) and promise["state"] == "kept":
        overview["promise"] = {**promise, "certificate": certificate_of(record.run.whole)[0]}
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
