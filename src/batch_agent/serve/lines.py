"""The lines of one batch on disk: their check and index, the files of their outcomes, and how a server shows them.

    input.jsonl     the lines as they were sent
    lines.db        where each line is, its custom_id, and what it shares with others; complete once it is renamed
    output.jsonl    lines that succeeded; errors.jsonl: the others. ``.part`` until the batch has ended

Memory does not grow with the number of lines, except for one bit for each. All functions block.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import orjson
from pydantic import JsonValue

from batch_agent.door import RequestRefused
from batch_agent.errors import StoreError
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import mended_all, read_json
from batch_agent.record.private import private
from batch_agent.serve.catalog import ServedBatch, StoredFile, Wire
from batch_agent.serve.directory import ERRORS, INDEX, INPUT, OUTPUT, PART, sync

MOST_LINE_BYTES = 64 * 1024 * 1024
MOST_ERRORS = 100  # that a failed batch lists
MOST_ID_CHARACTERS = 512
ANTHROPIC_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
LONG_PREFIX_BYTES = 2048
AT_ONCE = 512  # lines per query
BUFFER_BYTES = 64 * 1024  # of outcomes that are written at once
DONE_BY = {
    "cancelled": "This request was cancelled before it was executed.",
    "expired": "This request could not be executed before the completion window expired.",
    "failed": "This request was not executed because the batch failed; the errors of the batch say why.",
}
STOPS = {**{f"batch_{stop}": stop for stop in DONE_BY}, "canceled": "cancelled", "expired": "expired"}
# Line ends of Unicode beside \n. Many programs split the files at these too, inside of texts.
_LINE_ENDS = re.compile("\x85|\u2028|\u2029".encode())


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. ``number`` is counted from 0. ``group``: lines with the same one share a long prefix."""

    number: int
    offset: int
    size: int
    group: bytes

    @property
    def has_long_prefix(self) -> bool:
        return self.group.startswith(b"\x01")


@dataclass(frozen=True, slots=True)
class Checked:
    """``errors`` are empty if the batch may run. ``model``: if all lines have the same one."""

    total: int
    errors: list[JsonObject]
    model: str | None


@dataclass(slots=True)
class Tallied:
    """What the outcomes on disk add up to."""

    completed: int = 0
    failed: int = 0
    not_done: dict[str, int] = field(default_factory=dict)  # part of ``failed``, by what ended the batch before them
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, usage: JsonValue) -> None:
        """Add the usage of a document, in the form of any wire, as input and output tokens."""
        if not isinstance(usage, dict):
            return
        for name, count in usage.items():
            for total in COUNTS.get(name, ()):
                self._add(total, count)
            if name in DETAILS and isinstance(count, dict):
                self._add(DETAILS[name], count.get(DETAILS[name]))

    def _add(self, total: str, count: JsonValue) -> None:
        if type(count) is int and count > 0:
            self.usage[total] = self.usage.get(total, 0) + count


# What the fields of each wire's usage count as.
COUNTS = {
    "prompt_tokens": ("input_tokens",),
    "input_tokens": ("input_tokens",),
    "cache_read_input_tokens": ("input_tokens", "cached_tokens"),
    "cache_creation_input_tokens": ("input_tokens",),
    "completion_tokens": ("output_tokens",),
    "output_tokens": ("output_tokens",),
}
DETAILS = {
    "prompt_tokens_details": "cached_tokens",
    "input_tokens_details": "cached_tokens",
    "completion_tokens_details": "reasoning_tokens",
    "output_tokens_details": "reasoning_tokens",
}


# The check


class _Check:
    """Checks the lines of an input and writes their index."""

    def __init__(self, endpoint: str, knows: Callable[[str], bool], max_lines: int, index: sqlite3.Connection) -> None:
        self._endpoint, self._knows, self._max_lines, self._index = endpoint, knows, max_lines, index
        self._known: dict[str, bool] = {}
        self.errors: list[JsonObject] = []
        self.models: set[str] = set()
        self.total = 0

    def refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})

    def take(self, raw: bytes, place: int, offset: int) -> None:
        """Check one line. ``place`` is its number in the file, from 1."""
        self.total += 1
        if self.total > self._max_lines:
            self.refuse(None, "too_many_lines", f"The file has more than {self._max_lines} lines.")
            return
        if len(raw) > MOST_LINE_BYTES:
            self.refuse(place, "line_too_large", f"The line has more than {MOST_LINE_BYTES // 1024**2} MiB.")
            return
        try:
            line = read_json(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            self.refuse(place, "invalid_json_line", "This line is not parseable as valid JSON: it must be an object.")
            return
        own, body = line.get("custom_id"), line.get("body")
        if not isinstance(own, str) or not own:
            self.refuse(place, "missing_required_parameter", "Missing required parameter: 'custom_id'.", "custom_id")
            return
        if len(own) > MOST_ID_CHARACTERS:
            self.refuse(place, "invalid_custom_id", "The custom_id is too long.", "custom_id")
            return
        if line.get("method") != "POST":
            code = "invalid_method" if line.get("method") else "missing_required_parameter"
            self.refuse(place, code, "Invalid method: it must be 'POST'.", "method")
            return
        if line.get("url") != self._endpoint:
            told = f"The URL of this request must be the endpoint of the batch, {self._endpoint!r}."
            self.refuse(place, "invalid_url" if line.get("url") else "missing_required_parameter", told, "url")
            return
        if not isinstance(body, dict):
            self.refuse(place, "missing_required_parameter", "Missing required parameter: 'body'.", "body")
            return
        if self._takes(body.get("model"), place):
            self.add(own, body, place, offset, len(raw))

    def _takes(self, model: JsonValue, place: int) -> bool:
        if not isinstance(model, str) or not model:
            self.refuse(place, "missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model")
            return False
        known = self._known.get(model)
        if known is None:
            known = self._knows(model)
            if len(self._known) < 1000:
                self._known[model] = known
        if not known:
            told = f"The model '{model}' does not exist or you do not have access to it."
            self.refuse(place, "model_not_found", told, "body.model")
            return False
        if len(self.models) < 2:
            self.models.add(model)
        return True

    def add(self, own: str, body: JsonObject, place: int, offset: int, size: int) -> None:
        try:
            group, digest = group_of(body), _digest(orjson.dumps(body))
        except TypeError:  # JSON that could not be written again
            self.refuse(place, "invalid_json_line", "This line is nested too deeply, or has too large a number.")
            return
        added = self._index.execute(
            "INSERT OR IGNORE INTO line VALUES (?, ?, ?, ?, ?, ?)",
            (self.total - 1, offset, size, digest_of_id(own), group, digest),
        )
        if not added.rowcount:
            told = f"The custom_id '{own}' is used by another line of this file: each must be unique."
            self.refuse(place, "duplicate_custom_id", told, "custom_id")

    @property
    def model(self) -> str | None:
        return next(iter(self.models)) if len(self.models) == 1 else None


def check_lines(folder: Path, endpoint: str, knows: Callable[[str], bool], max_lines: int) -> Checked:
    """Check the input of a batch of OpenAI's API, and write its index. ``knows``: whether a model is served."""
    with closing(_connect(folder / (INDEX + PART), new=True)) as index, (folder / INPUT).open("rb") as file:
        check = _Check(endpoint, knows, max_lines, index)
        offset = 0
        for place, raw in enumerate(_raw_lines(file), start=1):
            start = 3 if not offset and raw.startswith(b"\xef\xbb\xbf") else 0
            text = raw[start:].rstrip(b"\r\n")
            if text.strip():
                check.take(text, place, offset + start)
            offset += len(raw)
            if len(check.errors) >= MOST_ERRORS or check.total > max_lines:
                break
        if not check.total and not check.errors:
            check.refuse(None, "empty_file", "The input file is empty.")
        if not check.errors:
            _finish_index(folder, index)
    return Checked(check.total, check.errors, check.model)


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines. Of one that is too long, only the first part: the check refuses it."""
    while raw := file.readline(MOST_LINE_BYTES + 2):
        if len(raw) > MOST_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield raw


class MessageBatchLines:
    """Writes the requests of a Message Batch as the lines of a batch. ``wrong`` says what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, _connect(folder / (INDEX + PART), new=True)
        self._file = open(folder / INPUT, "xb", opener=private)  # noqa: SIM115
        self._check = _Check("", lambda model: True, 2**63, self._index)
        self._offset = 0

    def add(self, request: object) -> str:
        """Add a request. Returns what is wrong with it, or ""."""
        place = self._check.total
        where = f"requests.{place}"
        if not isinstance(request, dict):
            return f"{where}: Input should be an object"
        own, params = request.get("custom_id"), request.get("params")
        if not isinstance(own, str) or not ANTHROPIC_ID.fullmatch(own):
            return f"{where}.custom_id: 1 to 64 letters, digits, '-' or '_' are required"
        if not isinstance(params, dict):
            return f"{where}.params: an object is required"
        if extra := request.keys() - {"custom_id", "params"}:
            return f"{where}.{min(extra)}: Extra inputs are not permitted"
        try:
            raw = orjson.dumps(mended_all({"custom_id": own, "body": params}))
        except TypeError:
            return f"{where}: it is nested too deeply, or has too large a number"
        self._check.total += 1
        self._check.add(own, params, place, self._offset, len(raw))
        if self._check.errors:
            return f"{where}.custom_id: {own!r} is used by another request: each must be unique"
        model = params.get("model")
        if isinstance(model, str) and len(self._check.models) < 2:
            self._check.models.add(model)
        self._file.write(raw + b"\n")
        self._offset += len(raw) + 1
        return ""

    def finish(self) -> Checked:
        """Complete the files."""
        self._file.flush()
        os.fsync(self._file.fileno())
        _finish_index(self._folder, self._index)
        self.close()
        return Checked(self._check.total, [], self._check.model)

    def close(self) -> None:
        self._file.close()
        self._index.close()


def group_of(body: JsonObject) -> bytes:
    """Return the digest of the system prompt and the tools of a request; b"" if it has neither. It begins with 1 if
    they are so long that an engine should compute them once."""
    parts: list[JsonValue] = [body.get("system"), body.get("instructions"), body.get("tools")]
    messages = body.get("messages")
    if isinstance(messages, list):
        first = messages[0] if messages else None
        if isinstance(first, dict) and first.get("role") in ("system", "developer"):
            parts.append(first.get("content"))
    if not any(parts):
        return b""
    text = orjson.dumps(parts)
    return (b"\x01" if len(text) >= LONG_PREFIX_BYTES else b"\x00") + _digest(text)[:8]


def digest_of_id(own: str) -> bytes:
    return _digest(own.encode("utf-8", "surrogatepass"))


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


# The index


def _connect(path: Path, *, new: bool = False) -> sqlite3.Connection:
    if new:
        path.unlink(missing_ok=True)
        path.touch(0o600)
    try:
        index = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        index.execute("PRAGMA cache_size=-8192")
        if new:  # it is written again if this process is killed
            index.execute("PRAGMA journal_mode=OFF")
            index.execute("PRAGMA synchronous=OFF")
            index.execute(
                "CREATE TABLE line (number INTEGER PRIMARY KEY, offset INTEGER, size INTEGER, id BLOB UNIQUE, "
                "prefix BLOB, digest BLOB)"
            )
            index.execute("BEGIN")
    except sqlite3.Error as error:
        raise StoreError(f"the index {path}: {error}") from error
    return index


def _finish_index(folder: Path, index: sqlite3.Connection) -> None:
    try:
        index.execute("CREATE INDEX by_prefix ON line (prefix, number)")
        index.execute("CREATE INDEX by_digest ON line (digest, number)")
        index.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"the index of {folder}: {error}") from error
    part = folder / (INDEX + PART)
    sync(part)
    part.replace(folder / INDEX)
    sync(folder)


def has_index(folder: Path) -> bool:
    return (folder / INDEX).exists()


def with_files(folder: Path, batch: ServedBatch) -> tuple[ServedBatch, list[StoredFile]]:
    """Return a batch that has ended with the ids of its files, and these files: those that are on disk."""
    files, now = list[StoredFile](), batch.ended or batch.created
    ids = {"output": "", "error": ""}
    for name, kind in ((OUTPUT, "output"), (ERRORS, "error")):
        path = folder / name
        if path.exists() and batch.wire == "openai":
            ids[kind] = f"file-{batch.id.rpartition('_')[2]}-{kind}"
            files.append(
                StoredFile(
                    ids[kind],
                    batch.tenant,
                    f"{batch.id}_{kind}.jsonl",
                    path.stat().st_size,
                    "batch_output",
                    now,
                    None if batch.output_expires is None else now + batch.output_expires,
                    batch.id,
                )
            )
    return replace(batch, output_file=ids["output"], error_file=ids["error"]), files


# While it runs


class BatchLines:
    """The lines of a batch that has been checked. ``dedupes``: of identical lines only the first is asked, and the
    others get its answer."""

    def __init__(self, folder: Path, batch: ServedBatch) -> None:
        self.folder, self._wire = folder, batch.wire
        self.dedupes = (batch.metadata or {}).get("x_dedupe") == "true"
        self.total = batch.total
        self.tallied = Tallied()
        self._id_head = f"batch_req_{batch.id.rpartition('_')[2]}"
        self._index = _connect(folder / INDEX)
        self._input = (folder / INPUT).open("rb")
        self._done = bytearray(batch.total // 8 + 1)
        self._files: dict[bool, BinaryIO] = {}
        try:
            for ok, name in ((True, OUTPUT), (False, ERRORS)):
                self._recover(ok, folder / name)
                self._recover(ok, folder / (name + PART))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # the record has what could not be written
                file.close()
        self._files.clear()
        self._input.close()
        self._index.close()

    @property
    def left(self) -> int:
        return self.total - self.tallied.completed - self.tallied.failed

    def is_done(self, number: int) -> bool:
        return bool(self._done[number >> 3] >> (number & 7) & 1)

    def _recover(self, ok: bool, path: Path) -> None:
        """Count the outcomes that are on disk. A line that was torn by a kill is cut off."""
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            return
        with file:
            whole = 0
            for raw in file:
                try:
                    outcome = orjson.loads(raw) if raw.endswith(b"\n") else None
                except ValueError:
                    outcome = None
                if outcome is None:
                    break
                whole += len(raw)
                query = "SELECT number, digest FROM line WHERE id = ?"
                for number, digest in self._index.execute(query, (digest_of_id(outcome["custom_id"]),)).fetchall():
                    self._count(number, ok=ok, stop=_stop_in(outcome))
                    if not self.dedupes or self._first_same(digest) == number:
                        self.tallied.add(_usage_in(outcome))
            if whole != os.fstat(file.fileno()).st_size:
                file.truncate(whole)

    def _count(self, number: int, *, ok: bool, stop: str = "") -> None:
        self._done[number >> 3] |= 1 << (number & 7)
        self.tallied.completed += ok
        self.tallied.failed += not ok
        if stop:
            self.tallied.not_done[stop] = self.tallied.not_done.get(stop, 0) + 1

    def left_in_order(self) -> Iterator[BatchLine]:
        """Yield the lines that are not done, those with the same system prompt and tools one after another."""
        group, number = b"", -1
        query = "SELECT number, offset, size, prefix, digest FROM line WHERE (prefix, number) > (?, ?) "
        query += f"ORDER BY prefix, number LIMIT {AT_ONCE}"
        while found := self._index.execute(query, (group, number)).fetchall():
            for number, offset, size, group, digest in found:
                if self.is_done(number):
                    continue
                first = self._first_same(digest) if self.dedupes else number  # its answer is also that of the others
                if first == number or self.is_done(first):
                    yield BatchLine(number, offset, size, group)

    def _first_same(self, digest: bytes) -> int:
        """Return the number of the first line that asks the same."""
        return int(self._index.execute("SELECT min(number) FROM line WHERE digest = ?", (digest,)).fetchone()[0])

    def read(self, line: BatchLine) -> tuple[str, JsonObject]:
        """Return the custom_id of a line, and what it asks for."""
        found = read_json(os.pread(self._input.fileno(), line.size, line.offset))
        assert isinstance(found, dict) and isinstance(found["body"], dict)
        return str(found["custom_id"]), found["body"]

    def at(self, number: int) -> BatchLine:
        row = self._index.execute("SELECT offset, size, prefix FROM line WHERE number = ?", (number,)).fetchone()
        return BatchLine(number, *row)

    # Outcomes

    def put(self, number: int, custom_id: str, outcome: JsonObject, *, ok: bool) -> None:
        """Write the outcome of a line: a response, or an error. It is in the file after ``flush``. A second outcome of
        a line is ignored."""
        if self.is_done(number):
            return
        self._write(number, custom_id, outcome, ok=ok)
        self.tallied.add(_usage_in(outcome))
        if self.dedupes:
            query = "SELECT number, offset, size, prefix FROM line WHERE number > ? AND digest = "
            query += "(SELECT digest FROM line WHERE number = ?)"
            for copy in self._index.execute(query, (number, number)).fetchall():
                same = BatchLine(*copy)
                if not self.is_done(same.number):
                    self._write(same.number, self.read(same)[0], outcome, ok=ok)

    def _write(
        self, number: int, custom_id: str, outcome: Mapping[str, JsonValue], *, ok: bool, stop: str = ""
    ) -> None:
        head: JsonObject = {"custom_id": custom_id}
        if self._wire == "openai":
            head = {"id": f"{self._id_head}{number:08x}", **head}
        file = self._files.get(ok)
        if file is None:
            path = self.folder / ((OUTPUT if ok else ERRORS) + PART)
            file = self._files[ok] = open(path, "ab", BUFFER_BYTES, opener=private)  # noqa: SIM115
        line = orjson.dumps({**head, **outcome}, option=orjson.OPT_APPEND_NEWLINE)
        file.write(_LINE_ENDS.sub(_escaped, line) if b"\xc2\x85" in line or b"\xe2\x80" in line else line)
        self._count(number, ok=ok, stop=stop)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def finish(self, stop: str) -> None:
        """Write the outcome of lines that were not done, and complete the files. ``stop``: why they were not, as a
        batch calls it. May be repeated, also by another process: the files say what an earlier one has written."""
        for line in self._unfinished():
            self._write(line.number, self.read(line)[0], not_done(self._wire, stop), ok=False, stop=stop)
        for name, ok in ((OUTPUT, True), (ERRORS, False)):
            file = self._files.pop(ok, None)
            if file is not None:
                file.close()
            part = self.folder / (name + PART)
            if part.exists():
                sync(part)
                part.replace(self.folder / name)
        sync(self.folder)

    def _unfinished(self) -> Iterator[BatchLine]:
        number = -1
        query = f"SELECT number, offset, size, prefix FROM line WHERE number > ? ORDER BY number LIMIT {AT_ONCE}"
        while found := self._index.execute(query, (number,)).fetchall():
            for row in found:
                number = row[0]
                if not self.is_done(number):
                    yield BatchLine(*row)


def not_done(wire: Wire, stop: str) -> JsonObject:
    if wire == "anthropic" and stop != "failed":
        return {"result": {"type": "canceled" if stop == "cancelled" else "expired"}}
    if wire == "anthropic":
        error: JsonObject = {"type": "api_error", "message": DONE_BY[stop]}
        return {"result": {"type": "errored", "error": {"type": "error", "error": error}}}
    return {"response": None, "error": {"code": f"batch_{stop}", "message": DONE_BY[stop]}}


def _stop_in(outcome: JsonValue) -> str:
    """Return why a line was not done, if its outcome is one of ``not_done``; else ""."""
    if not isinstance(outcome, dict):
        return ""
    found = outcome.get("error") or outcome.get("result")
    told = (found.get("code") or found.get("type")) if isinstance(found, dict) else None
    return STOPS.get(told, "") if isinstance(told, str) else ""


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def _usage_in(outcome: JsonValue) -> JsonValue:
    """Return the usage of an outcome in the form of any wire."""
    if not isinstance(outcome, dict):
        return None
    response, result = outcome.get("response"), outcome.get("result")
    document = response.get("body") if isinstance(response, dict) else None
    if isinstance(result, dict):
        document = result.get("message")
    return document.get("usage") if isinstance(document, dict) else None


# As a server shows them to people

MOST_SHOWN = 50_000  # bytes of an input or of an output; more is cut
FILES = {"succeeded": OUTPUT, "failed": ERRORS}


def rows_of(
    folder: Path, state: str, after: int, limit: int, state_of: Callable[[int], str] | None
) -> tuple[list[JsonObject], int | None]:
    """Return lines of a batch, and where the next page begins, or None. ``after`` is a place in the file of outcomes,
    or for lines that are not done a line number. ``state_of`` returns the state of these, or "" for one that is done.
    Blocks."""
    index = _index(folder)
    if index is None:
        return [], None
    with closing(index), (folder / INPUT).open("rb") as asked:
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
    """Return the line with a custom_id. Blocks, while the files of outcomes are searched for it."""
    index = _index(folder)
    if index is None:
        return None
    with closing(index), (folder / INPUT).open("rb") as asked:
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


def _index(folder: Path) -> sqlite3.Connection | None:
    if not has_index(folder):
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
    line = read_json(asked.read(size))
    assert isinstance(line, dict)
    told: JsonObject = {"line": number + 1, "custom_id": line["custom_id"], "state": state}
    return {**told, "input": _cut(line.get("body")), "output": None, "error": None}


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
        state, answer, problem = str(result["type"]), result.get("message"), result.get("error")
    else:
        response, problem = outcome.get("response"), outcome.get("error")
        response = response if isinstance(response, dict) else {}
        answer = response.get("body")
        if answer is not None and response.get("status_code") != 200:
            answer, problem = None, answer
        state = "succeeded" if problem is None else _stop_in(outcome) or "failed"
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
