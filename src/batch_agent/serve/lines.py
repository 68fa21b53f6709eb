"""The lines of one batch on disk: their check and index, the files of their outcomes, and how a server shows them.

    input.jsonl     the lines as they were sent
    lines.db        where each line is, its custom_id, and what it shares with others; complete once it is renamed
    output.jsonl    lines that succeeded; errors.jsonl: the others. ``.part`` until the batch has ended

Memory does not grow with the number of lines, except for one bit for each. All functions block.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import orjson
from pydantic import JsonValue

from batch_agent.errors import StoreError
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import mended_all, read_json
from batch_agent.record.private import private
from batch_agent.record.rundir import RESULTS
from batch_agent.serve.catalog import ServedBatch, StoredFile, Wire
from batch_agent.serve.directory import ERRORS, INDEX, INPUT, OUTPUT, PART, RUN, sync

logger = logging.getLogger("batch_agent")

MOST_LINE_BYTES = 64 * 1024 * 1024
MOST_ERRORS = 100  # that a failed batch lists
MOST_ID_CHARACTERS = 512
ANTHROPIC_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
QUICK_BYTES = 64 * 1024 * 1024  # an index that is larger is checked as a whole only after a failure
LONG_PREFIX_BYTES = 2048
AT_ONCE = 512  # lines per query
BUFFER_BYTES = 64 * 1024  # of outcomes that are written at once
DONE_BY = {
    "cancelled": "This request was cancelled before it was executed.",
    "expired": "This request could not be executed before the completion window expired.",
    "failed": "This request was not executed: the batch failed.",
    "unreadable": "This request was not executed: its line in the input cannot be read any more.",
}
STOPS = {f"batch_{stop}": stop for stop in DONE_BY} | {"canceled": "cancelled", "expired": "expired"}
OWN_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
MOST_UNREADABLE = 20  # numbers of lines in a message
# Line ends of Unicode beside \n. Many programs split the files at these too, inside of texts.
_LINE_ENDS = re.compile("\x85|\u2028|\u2029".encode())


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. ``number`` counts from 0. Lines with the same ``group`` share a long prefix."""

    number: int
    offset: int
    size: int
    group: bytes

    @property
    def has_long_prefix(self) -> bool:
        return self.group.startswith(b"\x01")


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of the check. ``errors`` is empty if the batch may run. ``model``: the model, if all lines have the
    same one."""

    total: int
    errors: list[JsonObject]
    model: str | None


@dataclass(slots=True)
class Tallied:
    """The totals of the outcomes on disk."""

    completed: int = 0
    failed: int = 0
    not_done: dict[str, int] = field(default_factory=dict)  # part of ``failed``, by what ended the batch before them
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, usage: JsonValue) -> None:
        """Add the usage of a document as input and output tokens. The usage may have the form of any wire."""
        if not isinstance(usage, dict):
            return
        for name, count in usage.items():
            for total in COUNTS.get(name, ()):
                self._add(total, count)
            if name in DETAILS and isinstance(count, dict):
                self._add(DETAILS[name], count.get(DETAILS[name]))

    def count(self, *, ok: bool, stop: str = "") -> None:
        """Count the outcome of a line."""
        self.completed += ok
        self.failed += not ok
        if stop:
            self.not_done[stop] = self.not_done.get(stop, 0) + 1

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


class LineCheck:
    """Checks the lines of an input and writes their index."""

    def __init__(self, endpoint: str, knows: Callable[[str], bool], max_lines: int, index: sqlite3.Connection) -> None:
        self._endpoint = endpoint
        self._knows = knows
        self._max_lines = max_lines
        self._index = index
        self._known: dict[str, bool] = {}
        self.errors: list[JsonObject] = []
        self.models: set[str] = set()
        self.total = 0

    def refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})

    def take(self, raw: bytes, place: int, offset: int) -> None:
        """Check one line. ``place`` is its number in the file, counted from 1."""
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
    """Check the input of a batch of OpenAI's API, and write its index. ``knows`` returns whether a model is served."""
    with closing(connect(folder / (INDEX + PART), new=True)) as index, (folder / INPUT).open("rb") as file:
        check = LineCheck(endpoint, knows, max_lines, index)
        offset = 0
        for place, raw in enumerate(raw_lines(file), start=1):
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
            finish_index(folder, index)
    return Checked(check.total, check.errors, check.model)


def raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines. Of a line that is too long only the first part is yielded, which the check refuses."""
    while raw := file.readline(MOST_LINE_BYTES + 2):
        if len(raw) > MOST_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield raw


class MessageBatchLines:
    """Writes the requests of a Message Batch as the lines of a batch. ``wrong`` has the errors in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = connect(folder / (INDEX + PART), new=True)
        self._file = open(folder / INPUT, "xb", opener=private)  # noqa: SIM115
        self._check = LineCheck("", lambda model: True, 2**63, self._index)
        self._offset = 0

    def add(self, request: object) -> str:
        """Add a request. Returns the error in it, or ""."""
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
        finish_index(self._folder, self._index)
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


def connect(path: Path, *, new: bool = False) -> sqlite3.Connection:
    if new:
        path.unlink(missing_ok=True)
        path.touch(0o600)
    try:
        place = f"{path.absolute().as_uri()}?mode=rw"  # it does not make a new one
        index = sqlite3.connect(place, uri=True, isolation_level=None, check_same_thread=False)
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


def finish_index(folder: Path, index: sqlite3.Connection) -> None:
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


def index_damage(folder: Path, total: int | None = None, *, thorough: bool = False) -> str:
    """Return the damage of the index of a batch with ``total`` lines (None: unknown number), or ""."""
    path = folder / INDEX
    if not path.exists():
        return "was missing"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as index:
            if thorough or (total is not None and path.stat().st_size <= QUICK_BYTES):
                (told,) = index.execute("PRAGMA quick_check(1)").fetchone()
                if told != "ok":
                    return "was damaged"
            count, last = index.execute("SELECT count(*), max(number) FROM line").fetchone()
    except sqlite3.Error:
        return "was damaged"
    return "" if total is None or (0 < count <= total and last < total) else "did not fit the batch"


def with_files(folder: Path, batch: ServedBatch, keep: float) -> tuple[ServedBatch, list[StoredFile]]:
    """Return a batch that has ended, with the ids of its files, and the files themselves: those that exist on disk."""
    files = list[StoredFile]()
    now = batch.ended or batch.created
    since = now if batch.output_expires is None else None
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
                    now + (keep if batch.output_expires is None else batch.output_expires),
                    batch.id,
                    since,
                )
            )
    return replace(batch, output_file=ids["output"], error_file=ids["error"]), files


# While it runs


class UnreadableLine(Exception):
    """A line of the input can no longer be read, although the file can."""


def open_outcomes(folder: Path, name: str) -> Path | None:
    """Return the file to which outcomes of a batch are appended until it ends; None if there are no outcomes. After a
    kill, outcomes may be in the completed file, or in both."""
    final, part = folder / name, folder / (name + PART)
    if final.exists():
        if part.exists():
            with final.open("ab") as file, part.open("rb") as rest:
                shutil.copyfileobj(rest, file)
        final.replace(part)
    return part if part.exists() else None


class BatchLines:
    """The lines of a batch that has been checked. ``dedupes``: only the first of identical lines is asked, and the
    others get its answer. ``unreadable``: lines without an outcome, because even their custom_id cannot be read."""

    def __init__(self, folder: Path, batch: ServedBatch) -> None:
        self.folder, self._wire = folder, batch.wire
        self.dedupes = (batch.metadata or {}).get("x_dedupe") == "true"
        self.total = batch.total
        self.tallied = Tallied()
        self._id_head = f"batch_req_{batch.id.rpartition('_')[2]}"
        self._done = bytearray(batch.total // 8 + 1)
        self._files: dict[bool, BinaryIO] = {}
        self._given_up: list[int] = []
        self._index = connect(folder / INDEX)
        self._input: BinaryIO | None = None
        try:
            with suppress(FileNotFoundError):
                self._input = (folder / INPUT).open("rb")
            self.unreadable = batch.total - int(self._index.execute("SELECT count(*) FROM line").fetchone()[0])
            for ok, name in ((True, OUTPUT), (False, ERRORS)):
                part = open_outcomes(folder, name)
                if part is not None:
                    self._recover(ok, part)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # the record has what could not be written
                file.close()
        self._files.clear()
        if self._input is not None:
            self._input.close()
        self._index.close()

    @property
    def left(self) -> int:
        return self.total - self.tallied.completed - self.tallied.failed - self.unreadable

    @property
    def damage(self) -> str:
        """Return which part of the input could not be read, or ""."""
        count = self.unreadable + self.tallied.not_done.get("unreadable", 0)
        if not count:
            return ""
        some = ", ".join(str(number + 1) for number in sorted(self._given_up)[:MOST_UNREADABLE])
        which = f" (among them {some})" if some else ""
        return f"{count} lines of the input cannot be read any more{which}: they have no answer. All others are done."

    def is_done(self, number: int) -> bool:
        return bool(self._done[number >> 3] >> (number & 7) & 1)

    def _recover(self, ok: bool, path: Path) -> None:
        """Count the outcomes that are on disk. Everything else in the file is removed: a line that a kill has cut, a
        damaged line, a second outcome. Such a line is answered again, from the record if the record has the answer."""
        draft = path.with_name(f"{path.name}.new")
        whole = 0
        kept = None
        with path.open("r+b") as file, ExitStack() as opened:
            size = os.fstat(file.fileno()).st_size
            for raw in file:
                if self._recover_one(ok, raw):
                    whole += len(raw)
                    if kept is not None:
                        kept.write(raw)
                elif kept is None and file.tell() < size:  # there may be good ones behind it
                    kept = opened.enter_context(open(draft, "wb", opener=private))
                    with path.open("rb") as good:
                        copy_bytes(good, kept, whole)
            if kept is None and whole != size:
                file.truncate(whole)
            if kept is not None:
                kept.flush()
                os.fsync(kept.fileno())
        if kept is not None:
            logger.warning("%s was damaged: %d of its %d bytes are outcomes", path, whole, size)
            draft.replace(path)

    def _recover_one(self, ok: bool, raw: bytes) -> bool:
        """Count an outcome. Returns False if the text is no outcome, or a second one of its line."""
        try:
            outcome = orjson.loads(raw if raw.endswith(b"\n") else b"")
            own = digest_of_id(outcome["custom_id"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        found = self._index.execute("SELECT number, digest FROM line WHERE id = ?", (own,)).fetchone()
        if found is None or self.is_done(found[0]):
            return False
        self._count(found[0], ok=ok, stop=stop_in(outcome))
        if not self.dedupes or self._first_same(found[1]) == found[0]:
            self.tallied.add(usage_in(outcome))
        return True

    def _count(self, number: int, *, ok: bool, stop: str = "") -> None:
        self._done[number >> 3] |= 1 << (number & 7)
        self.tallied.count(ok=ok, stop=stop)

    def left_in_order(self) -> Iterator[BatchLine]:
        """Yield the lines that are not done. Lines with the same system prompt and tools come one after another."""
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
        """Return the number of the first line with the same request."""
        return int(self._index.execute("SELECT min(number) FROM line WHERE digest = ?", (digest,)).fetchone()[0])

    def read(self, line: BatchLine) -> tuple[str, JsonObject]:
        """Return the custom_id and the request of a line. Raises UnreadableLine if the line is not as it was when it
        was checked."""
        try:
            found = read_json(self._raw(line))
        except ValueError:
            found = None
        own, body = (found.get("custom_id"), found.get("body")) if isinstance(found, dict) else (None, None)
        if not isinstance(own, str) or not isinstance(body, dict) or not self._is_id(line, own):
            raise UnreadableLine(f"line {line.number + 1}")
        return own, body

    def _raw(self, line: BatchLine) -> bytes:
        return b"" if self._input is None else os.pread(self._input.fileno(), line.size, line.offset)

    def _is_id(self, line: BatchLine, own: str) -> bool:
        (id,) = self._index.execute("SELECT id FROM line WHERE number = ?", (line.number,)).fetchone()
        return bool(id == digest_of_id(own))

    def end_unreadable(self, line: BatchLine) -> None:
        """End a line that cannot be read, with an outcome that says so if the custom_id can be read."""
        if self.is_done(line.number):
            return
        self._given_up.append(line.number)
        found = OWN_ID.search(self._raw(line))
        with suppress(ValueError):
            own = orjson.loads(found[1]) if found is not None else None
            if isinstance(own, str) and self._is_id(line, own):
                self._write(line.number, own, not_done(self._wire, "unreadable"), ok=False, stop="unreadable")
                return
        self._done[line.number >> 3] |= 1 << (line.number & 7)
        self.unreadable += 1

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
        self.tallied.add(usage_in(outcome))
        if self.dedupes:
            query = "SELECT number, offset, size, prefix FROM line WHERE number > ? AND digest = "
            query += "(SELECT digest FROM line WHERE number = ?)"
            for copy in self._index.execute(query, (number, number)).fetchall():
                same = BatchLine(*copy)
                if not self.is_done(same.number):
                    try:
                        self._write(same.number, self.read(same)[0], outcome, ok=ok)
                    except UnreadableLine:
                        self.end_unreadable(same)

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

    def finish(self, stop: str, reason: str = "") -> None:
        """Write an outcome for each line that was not done, and complete the files. ``stop``: the reason why lines were
        not done, as in ``ServedBatch.stop``. It may be called again, also by another process, which reads in the files
        what was written."""
        if self.left:
            self._take_recorded()
        outcome = not_done(self._wire, stop, reason)
        for line in self._unfinished():
            try:
                self._write(line.number, self.read(line)[0], outcome, ok=False, stop=stop)
            except UnreadableLine:
                self.end_unreadable(line)
        for name, ok in ((OUTPUT, True), (ERRORS, False)):
            file = self._files.pop(ok, None)
            if file is not None:
                file.close()
            part = self.folder / (name + PART)
            if part.exists():
                sync(part)
                part.replace(self.folder / name)
        sync(self.folder)

    def _take_recorded(self) -> None:
        """Write the outcomes that the run has delivered and that are missing in the files because a part of these was
        damaged."""
        for _, own, outcome, ok in recorded_outcomes(self.folder):
            found = self._index.execute("SELECT number FROM line WHERE id = ?", (digest_of_id(own),)).fetchone()
            if found is not None:
                self.put(found[0], own, outcome, ok=ok)

    def _unfinished(self) -> Iterator[BatchLine]:
        number = -1
        query = f"SELECT number, offset, size, prefix FROM line WHERE number > ? ORDER BY number LIMIT {AT_ONCE}"
        while found := self._index.execute(query, (number,)).fetchall():
            for row in found:
                number = row[0]
                if not self.is_done(number):
                    yield BatchLine(*row)


def recorded_outcomes(folder: Path) -> Iterator[tuple[int, str, JsonObject, bool]]:
    """Yield the outcome of each line whose result the run of a batch has delivered: number, custom_id, outcome, and
    whether the outcome is an answer."""
    for name in (RESULTS, f"{RESULTS}.new"):
        path = folder / RUN / name
        if not path.exists():
            continue
        with path.open("rb") as file:
            for raw in file:
                with suppress(ValueError, KeyError, TypeError):
                    result = orjson.loads(raw)
                    row, output = result["input"], result["output"]
                    if isinstance(row["id"], str) and isinstance(output["outcome"], dict):
                        yield int(row["line"]), row["id"], output["outcome"], output["ok"] is True


def outcomes_in(path: Path) -> tuple[int, int]:
    """Return how many lines of a file are outcomes, and how many are unreadable. A last line that a kill has cut does
    not count."""
    good = bad = 0
    with suppress(FileNotFoundError), path.open("rb") as file:
        for raw in file:
            try:
                good += isinstance(orjson.loads(raw)["custom_id"], str)
            except (ValueError, KeyError, TypeError):
                bad += raw.endswith(b"\n")
    return good, bad


def not_done(wire: Wire, stop: str, reason: str = "") -> JsonObject:
    """Return the outcome of a line that has no answer."""
    told = f"{DONE_BY[stop]} {reason}".rstrip()
    if wire == "anthropic":
        if stop not in ("cancelled", "expired"):
            error: JsonObject = {"type": "error", "error": {"type": "api_error", "message": told}}
            return {"result": {"type": "errored", "error": error}}
        return {"result": {"type": "canceled" if stop == "cancelled" else "expired"}}
    return {"response": None, "error": {"code": f"batch_{stop}", "message": told}}


def stop_in(outcome: JsonValue) -> str:
    """Return the reason why a line was not done, if its outcome was made by ``not_done``; else ""."""
    if not isinstance(outcome, dict):
        return ""
    found = outcome.get("error") or outcome.get("result")
    told = (found.get("code") or found.get("type")) if isinstance(found, dict) else None
    return STOPS.get(told, "") if isinstance(told, str) else ""


def copy_bytes(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size and (chunk := source.read(min(size, 1024 * 1024))):
        target.write(chunk)
        size -= len(chunk)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def usage_in(outcome: JsonValue) -> JsonValue:
    """Return the usage in an outcome. It may have the form of any wire."""
    if not isinstance(outcome, dict):
        return None
    response, result = outcome.get("response"), outcome.get("result")
    document = response.get("body") if isinstance(response, dict) else None
    if isinstance(result, dict):
        document = result.get("message")
    return document.get("usage") if isinstance(document, dict) else None
