"""The type of a row, and conversion of JSON values to rows."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pydantic_core import from_json

from batch_agent.files.compression import GZIP, ZSTD
from batch_agent.job import UnreadableRow

GUESSED = "WINDOWS-1252"  # the most common encoding of text that is not UTF-8
BOM = b"\xef\xbb\xbf"

Row: TypeAlias = "dict[str, object] | str | UnreadableRow"

KEYS = frozenset({"custom_id", "method", "url", "body"})
INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Reading:
    """What opening a file of any format returns: its rows one at a time, and an estimate of their number."""

    rows: Iterator[Row]
    close: Callable[[], None]
    expected: Callable[[int], int]  # estimated total, from the number of rows read so far
    memory_bytes: int  # estimated memory of all rows together


def as_row(value: object, where: str) -> Row:
    """Return ``value`` as a row. ``where`` starts the error message if it is not a row."""
    if isinstance(value, dict):
        if "custom_id" not in value or "body" not in value or not value.keys() <= KEYS:
            return value
        try:
            return _of_batch_line(value)
        except _Unusable as error:
            return UnreadableRow(f"{where} is an OpenAI batch line that cannot be used: {error}")
    if isinstance(value, str):
        return value
    kinds = {bool: "true or false", type(None): "null", list: "a list", int: "a number", float: "a number"}
    name = kinds.get(type(value), type(value).__name__)
    return UnreadableRow(f"{where} is {name}; a row must be an object or a string")


def parse_jsonl(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        row = parse_line(line, f"{name} line {number}")
        if row is not None:
            yield row


def parse_text(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Yield each line as a row, without blank lines."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError:
                yield UnreadableRow(f"{name} line {number} is not UTF-8; convert the file{converted(name, GUESSED)}")


def parse_line(line: bytes, where: str) -> Row | None:
    """Return the row of a line; None for a blank line."""
    if not line.strip():
        return None
    try:
        value = from_json(line, allow_inf_nan=False)  # exact, also for integers beyond 64 bits
    except ValueError as error:
        return UnreadableRow(f"{where} is not JSON: {str(error).replace(' at line 1 column', ' at column')}")
    return as_row(value, where)


def converted(name: str, encoding: str) -> str:
    """Return the command that converts a file to UTF-8, for a message; "" for a compressed file."""
    path = Path(name)
    if path.suffix in (GZIP, ZSTD):
        return ""
    there = shlex.quote(str(path.with_suffix(f".utf8{path.suffix}")))
    return f": iconv -f {encoding} -t UTF-8 {shlex.quote(name)} > {there}"


def is_utf8(text: str) -> bool:
    """Return whether text decoded with ``surrogateescape`` was valid UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Unusable(Exception):
    """The reason why a line cannot be a row."""


# Lines of OpenAI's batch files as rows: ``id`` (the custom_id), ``system``, ``prompt`` (the last message, of the user),
# ``messages`` (all of them) and ``body`` (the other options). The run sends the task of the spec with these fields.
def _of_batch_line(line: Mapping[str, object]) -> dict[str, object]:
    body = line["body"]
    if not isinstance(body, dict):
        raise _Unusable("its body is not an object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _Unusable(f"its body has no messages (url {line.get('url')!r}); only chat completions can be run")
    texts = [_role_and_text(number, message) for number, message in enumerate(messages, start=1)]
    role, prompt = texts[-1]
    if role != "user":
        raise _Unusable(f"its last message is the {role}'s, not the user's")
    return {
        "id": line["custom_id"],
        "system": "\n\n".join(text for role, text in texts if role in INSTRUCTIONS),
        "prompt": prompt,
        "messages": messages,
        "body": {name: option for name, option in body.items() if name != "messages"},
    }


def _role_and_text(number: int, message: object) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Unusable(f"message {number} has no role")
    if message.get("tool_calls") or message["role"] in ("tool", "function"):
        raise _Unusable(f"message {number} belongs to a tool call; a run uses only the tools of its spec")
    return message["role"], _text(number, message.get("content"))


def _text(number: int, content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise _Unusable(f"message {number} has content other than text")
    return "".join(map(str, texts))
