"""Columns of a table of results: their names and types, and the cells of a row.

The columns of the input come first and keep their names, or become ``input.field`` if a name is taken. The fields of
the output follow as ``output.field`` (an output without fields: ``output``). The columns of the result come last; their
names are fixed. All fields are known only after the last result, so a table needs two passes: first ``see`` each
record, then read the cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from batch_agent.files.results import to_json

Record = dict[str, object]  # a result line, parsed
Type = Literal["bool", "int", "float", "text"]
_Path = tuple[str, ...]

_EXACT_IN_FLOAT = 2**53
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Column:
    """A column. ``path`` is the path of its cells in a record. A column with cells of several types has type text."""

    name: str
    path: _Path
    type: Type

    def cell(self, record: Record, *, nested: bool = False) -> object:
        """Return the cell of a record, a value of the column's type, or None. With ``nested``, a list or a dict is
        returned unchanged, and not as JSON."""
        value: object = record
        for name in self.path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None or (len(self.path) == 1 and isinstance(value, dict)):  # its fields have their own columns
            return None
        if self.type == "text":
            return value if nested and isinstance(value, list | dict) else as_text(value)
        return float(value) if self.type == "float" and isinstance(value, int) else value


OWN = (
    Column("ok", ("ok",), "bool"),
    Column("error_type", ("error", "type"), "text"),
    Column("error_message", ("error", "message"), "text"),
    Column("index", ("index",), "int"),
    Column("job_id", ("job_id",), "text"),
    Column("attempts", ("attempts",), "int"),
    Column("turns", ("turns",), "int"),
    Column("prompt_tokens", ("usage", "prompt_tokens"), "int"),
    Column("cached_tokens", ("usage", "cached_tokens"), "int"),
    Column("cache_write_tokens", ("usage", "cache_write_tokens"), "int"),
    Column("completion_tokens", ("usage", "completion_tokens"), "int"),
    Column("reasoning_tokens", ("usage", "reasoning_tokens"), "int"),
    Column("cost", ("cost",), "float"),
    Column("seconds", ("timings", "total"), "float"),
)


class Fields:
    """The fields of outputs and inputs, in the order of their first appearance."""

    def __init__(self) -> None:
        self._kinds: dict[_Path, set[str]] = {}

    def see(self, record: Record) -> None:
        for part in ("output", "input"):
            value = record.get(part)
            if isinstance(value, dict):
                for name, item in value.items():
                    self._note((part, name), item)
            elif value is not None:
                self._note((part,), value)

    def columns(self) -> list[Column]:
        results = [*self._of_outputs(), *OWN]
        return [*self._of_inputs({column.name for column in results}), *results]

    def _of_inputs(self, taken: set[str]) -> Iterator[Column]:
        for path, kinds in self._kinds.items():
            if path[0] == "input":
                name = path[-1]
                while name in taken:
                    name = f"input.{name}"
                taken.add(name)
                yield Column(name, path, _type(kinds))

    def _of_outputs(self) -> Iterator[Column]:
        outputs = {path: kinds for path, kinds in self._kinds.items() if path[0] == "output"}
        for path, kinds in (outputs or {("output",): set()}).items():
            yield Column(".".join(path), path, _type(kinds))

    def _note(self, path: _Path, value: object) -> None:
        kinds = self._kinds.setdefault(path, set())
        if value is not None:
            kinds.add(_kind(value))


def _kind(value: object) -> str:
    match value:
        case bool():
            return "bool"
        case int() if abs(value) <= _EXACT_IN_FLOAT:
            return "int"
        case int() if -_INT64 <= value < _INT64:
            return "large int"
        case float():
            return "float"
        case _:
            return "text"


def _type(kinds: set[str]) -> Type:
    if not kinds:
        return "text"
    if kinds == {"bool"}:
        return "bool"
    if kinds <= {"int", "large int"}:
        return "int"
    return "float" if kinds <= {"int", "float"} else "text"


def as_text(value: object) -> str:
    """Return text unchanged, and other values as JSON."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return to_json(value).decode()
