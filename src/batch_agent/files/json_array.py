"""A JSON file that holds one list of rows, read item by item.

Only the current item is in memory. After a syntax error the next item cannot be found, so the whole file fails, with
the line in the error. An item that is not a row fails alone.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator

from batch_agent.errors import SpecError
from batch_agent.files.rows import Row, as_row, is_utf8
from batch_agent.job import UnreadableRow

ITEM_CHARACTERS = 2**26  # longest item: up to here, a syntax error may be an incomplete item
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse_json(chunks: Iterable[bytes], name: str) -> Iterator[Row]:
    text = _Text(chunks, name)
    if text.peek() != "[":
        raise SpecError(f"{name} must hold a list of rows")
    for number, (value, is_text) in enumerate(text.items(), start=1):
        where = f"{name} item {number}"
        yield as_row(value, where) if is_text else UnreadableRow(f"{where} is not UTF-8")
    if text.peek():
        raise text.error("text after the end of the list")


def parse_field(chunks: Iterable[bytes], name: str, field: str) -> Iterator[object]:
    """Yield the items of the list ``field`` of a JSON object, one at a time. Raises SpecError if the object has another
    field, or none of that name."""
    text = _Text(chunks, name)
    if text.peek() != "{":
        raise SpecError(f"{name} must be a JSON object")
    text.skip()
    if text.peek() != '"' or text.value()[0] != field or text.peek() != ":":
        raise SpecError(f"{name} must have the field {field!r} and no other")
    text.skip()
    if text.peek() != "[":
        raise SpecError(f"{field}: a list is required")
    for value, is_text in text.items():
        if not is_text:
            raise text.error("not UTF-8")
        yield value
    for end in ("}", ""):
        if text.peek() != end:
            raise text.error(f"expecting {end or 'the end'!r}")
        text.skip()


class _Text:
    """The part of the file that is in memory. Text before it was discarded; text after it is not read yet."""

    def __init__(self, chunks: Iterable[bytes], name: str) -> None:
        self._chunks = iter(chunks)
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._name = name
        self._buffer = ""
        self._at = 0
        self._line = 1
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is not space; "" at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._read(1)

    def skip(self) -> None:
        self._at += 1

    def items(self) -> Iterator[tuple[object, bool]]:
        """Yield the values of a list from its opening bracket to its end. Each comes with a flag that says whether its
        text is valid UTF-8."""
        self.skip()
        more = self.peek() != "]"
        while more:
            yield self.value()
            more = self.peek() == ","
            if more:
                self.skip()
        if self.peek() != "]":
            raise self.error("expecting ',' or ']'")
        self.skip()

    def value(self) -> tuple[object, bool]:
        """Return the next value, and whether its text is valid UTF-8."""
        self.peek()
        value: object = None
        end = self._at
        while True:
            wanted = 2 * (len(self._buffer) - self._at)
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
                if end < len(self._buffer) or self._ended:  # otherwise a number may continue
                    break
            except json.JSONDecodeError as error:
                if self._ended or wanted > ITEM_CHARACTERS:
                    self._at = error.pos
                    raise self.error(error.msg) from None
            except RecursionError:
                raise self.error("nested too deeply") from None
            except ValueError as error:  # a number of thousands of digits
                raise self.error(str(error)) from None
            self._read(wanted)
        text = self._buffer[self._at : end]
        self._at = end
        return value, is_utf8(text)

    def error(self, reason: str) -> SpecError:
        line = self._line + self._buffer.count("\n", 0, self._at)
        return SpecError(f"{self._name} line {line}: not JSON: {reason}")

    def _read(self, characters: int) -> None:
        """Discard the text before the position, and read until ``characters`` are ahead or the file ends."""
        self._line += self._buffer.count("\n", 0, self._at)
        parts = [self._buffer[self._at :]]
        ahead = len(parts[0])
        while ahead < max(characters, 1) and not self._ended:
            chunk = next(self._chunks, None)
            parts.append(self._decode(chunk or b"", final=chunk is None))
            ahead += len(parts[-1])
            self._ended = chunk is None
        self._buffer = "".join(parts)
        self._at = 0
