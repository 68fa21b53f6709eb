"""Lines of a batch as a server shows them to people: pages of lines by state, and a single line by its custom_id, read
from the files of the batch. All functions block."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import orjson
from pydantic import JsonValue

from batch_agent.door import RequestRefused
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import read_json
from batch_agent.serve.directory import ERRORS, INDEX, INPUT, OUTPUT, PART
from batch_agent.serve.lines import digest_of_id, index_damage, stop_in

MOST_SHOWN = 50_000  # bytes of an input or of an output; more is cut
FILES = {"succeeded": OUTPUT, "failed": ERRORS}


def rows_of(
    folder: Path, state: str, after: int, limit: int, state_of: Callable[[int], str] | None
) -> tuple[list[JsonObject], int | None]:
    """Return lines of a batch, and the position where the next page begins, or None. ``after`` is a position in the
    file of outcomes; for lines that are not done, a line number. ``state_of`` returns the state of a line that is not
    done, or "" for a line that is done. Blocks."""
    index = _index(folder)
    if index is None:
        return [], None
    with closing(index), _input(folder) as asked:
        if state not in FILES:
            return _not_done(index, asked, after, limit, state_of) if state_of is not None else ([], None)
        rows: list[JsonObject] = []
        path = _file_of(folder, FILES[state])
        if path is None:
            return [], None
        with path.open("rb") as file:
            file.seek(after)
            for _ in range(limit):
                raw = file.readline()
                if not raw.endswith(b"\n"):
                    break
                rows.append(_with_outcome(index, asked, raw))
            return rows, file.tell() if len(rows) == limit else None


def row_of(folder: Path, custom_id: str, state_of: Callable[[int], str] | None) -> JsonObject | None:
    """Return the line with a custom_id; None if there is none. Blocks while the files of outcomes are searched."""
    index = _index(folder)
    if index is None:
        return None
    with closing(index), _input(folder) as asked:
        found = _place(index, custom_id)
        if found is None:
            return None
        needle = b'"custom_id":' + orjson.dumps(custom_id)
        for name in (OUTPUT, ERRORS):
            path = _file_of(folder, name)
            if path is not None:
                with path.open("rb") as file:
                    for raw in file:
                        if needle in raw and raw.endswith(b"\n") and orjson.loads(raw)["custom_id"] == custom_id:
                            return _with_outcome(index, asked, raw)
        return _row(asked, found, (state_of(found[0]) if state_of is not None else "") or "waiting")


def _input(folder: Path) -> BinaryIO:
    """Open the input. If it is missing, lines are shown without their requests."""
    try:
        return (folder / INPUT).open("rb")
    except FileNotFoundError:
        return io.BytesIO()


def _index(folder: Path) -> sqlite3.Connection | None:
    if index_damage(folder):
        return None
    return sqlite3.connect(f"{(folder / INDEX).absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)


def _file_of(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / (name + PART)) if path.exists()), None)


def _place(index: sqlite3.Connection, custom_id: str) -> tuple[int, int, int] | None:
    query = "SELECT number, offset, size FROM line WHERE id = ?"
    found: tuple[int, int, int] | None = index.execute(query, (digest_of_id(custom_id),)).fetchone()
    return found


def _not_done(
    index: sqlite3.Connection, asked: BinaryIO, after: int, limit: int, state_of: Callable[[int], str]
) -> tuple[list[JsonObject], int | None]:
    rows: list[JsonObject] = []
    for found in index.execute("SELECT number, offset, size FROM line WHERE number >= ? ORDER BY number", (after,)):
        if state := state_of(found[0]):
            if len(rows) == limit:
                return rows, found[0]
            rows.append(_row(asked, found, state))
    return rows, None


def _row(asked: BinaryIO, place: tuple[int, int, int], state: str) -> JsonObject:
    number, offset, size = place
    asked.seek(offset)
    try:
        line = read_json(asked.read(size))
    except ValueError:  # it is damaged
        line = None
    found = line if isinstance(line, dict) else {}
    told: JsonObject = {"line": number + 1, "custom_id": found.get("custom_id"), "state": state}
    return {**told, "input": _cut(found.get("body")), "output": None, "error": None}


def _with_outcome(index: sqlite3.Connection, asked: BinaryIO, raw: bytes) -> JsonObject:
    try:
        outcome: JsonValue = orjson.loads(raw)
    except ValueError:
        outcome = None
    own = outcome.get("custom_id") if isinstance(outcome, dict) else None
    found = _place(index, own) if isinstance(own, str) else None
    if found is None or not isinstance(outcome, dict):
        raise RequestRefused(400, "after is not the next of a page", param="after")
    result = outcome.get("result")  # of a Message Batch
    if isinstance(result, dict):
        state = str(result["type"])
        answer = result.get("message")
        problem = result.get("error")
    else:
        response, problem = outcome.get("response"), outcome.get("error")
        response = response if isinstance(response, dict) else {}
        answer = response.get("body")
        if answer is not None and response.get("status_code") != 200:
            answer, problem = None, answer
        state = "succeeded" if problem is None else stop_in(outcome) or "failed"
    error = None if problem is None and answer is not None else _message(problem) or state
    return {**_row(asked, found, state), "output": _cut(answer), "error": error}


def _message(problem: JsonValue) -> str:
    while isinstance(problem, dict) and isinstance(problem.get("error"), dict):
        problem = problem["error"]
    return str(problem.get("message") or "") if isinstance(problem, dict) else ""


def _cut(document: JsonValue) -> JsonValue:
    """Return a document, or the beginning of its text if it is long."""
    text = orjson.dumps(document)
    return document if len(text) <= MOST_SHOWN else text[:MOST_SHOWN].decode("utf-8", "ignore") + "…"
