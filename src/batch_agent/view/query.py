"""Filters of rows: a state, a type of error, and the text of the search box.

Words are searched in a row's id, input, output and error. All of them must match; case is ignored. ``"two words"`` is
searched as a phrase. ``name:value`` matches a field of the input or the output. ``turns:>3``, ``seconds:<10``,
``cost:>0.01`` and ``attempts:>1`` compare numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from batch_agent.files.results import to_json
from batch_agent.record.reader import parsed

STATES = {"ok": "ok = 1", "failed": "ok = 0", "repaired": "repaired = 1", "retried": "attempts > 1"}
COMPARED = {"turns": "turns", "seconds": "seconds", "cost": "cost", "attempts": "attempts", "index": "idx"}
COMPARISON = re.compile(r"(>=|<=|>|<|=)?(-?\d+(?:\.\d+)?)")
WORD = re.compile(r'(?:([\w.-]+):)?(?:"([^"]*)"|(\S+))')


@dataclass(frozen=True)
class Query:
    state: str = ""
    error: str = ""
    text: str = ""

    @property
    def searches(self) -> bool:
        """Whether lines must be read to find the matching rows."""
        words, fields, _ = self._parts
        return bool(words or fields)

    def sql(self) -> tuple[list[str], list[int | float | str | bytes | None]]:
        """Return the SQL conditions that the index can answer, and their values."""
        terms = [STATES[self.state]] if self.state in STATES else []
        values: list[int | float | str | bytes | None] = []
        if self.error:
            terms.append("ok = 0 AND error = ?")
            values.append(self.error)
        for column, sign, number in self._parts[2]:
            terms.append(f"{column} {sign} ?")
            values.append(number)
        return terms, values

    def matches(self, line: bytes) -> int | None:
        """Return the index of the row of a result line if the line matches, else None."""
        words, fields, _ = self._parts
        lower = line.decode(errors="replace").lower()
        # Search the raw JSON text first: most lines do not match, and parsing is slower.
        if "\\u" not in lower and not all(written in lower for written in self._written):
            return None
        record = parsed(line)
        if record is None:
            return None
        given, output = record.get("input"), record.get("output")
        said = [_lower(value) for value in (given, output, record.get("error"), record.get("raw_text"))]
        said.append(str(record.get("job_id", "")).lower())
        if not all(any(word in text for text in said) for word in words):
            return None
        for name, wanted in fields.items():
            has = [
                _lower(value)
                for each in (given, output)
                if isinstance(each, dict)
                for own, value in each.items()
                if str(own).lower() == name
            ]
            if not any(wanted in text for text in has):
                return None
        return int(str(record["index"]))

    @cached_property
    def _written(self) -> list[str]:
        words, fields, _ = self._parts
        return [to_json(word).decode()[1:-1] for word in (*words, *fields.values())]

    @cached_property
    def _parts(self) -> tuple[list[str], dict[str, str], list[tuple[str, str, float]]]:
        """The words, fields and comparisons in the text."""
        words: list[str] = []
        fields: dict[str, str] = {}
        compared: list[tuple[str, str, float]] = []
        for name, quoted, plain in WORD.findall(self.text):
            value = quoted or plain
            found = COMPARISON.fullmatch(value)
            if name in COMPARED and found is not None:
                compared.append((COMPARED[name], found[1] or "=", float(found[2])))
            elif name:
                fields[name.lower()] = value.lower()
            elif value:
                words.append(value.lower())
        return words, fields, compared


def _lower(value: object) -> str:
    """Return all texts of a value in lower case, joined by newlines."""
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, dict):
        return "\n".join(_lower(each) for each in value.values())
    if isinstance(value, list):
        return "\n".join(map(_lower, value))
    return "" if value is None else str(value).lower()
