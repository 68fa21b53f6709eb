"""The system prompt: the long fields with the same value in every row, which move into it, and its text as it is sent.

A server's prefix cache ends at the first token that differs between two rows. A long value that all rows share, but
that follows a varying one, would be computed again for each row. So it moves to the end of the system prompt, under its
name, and the message refers to it. A value before all varying ones is already shared and stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from batch_agent.compiler.fields import fields_of, text_of, value_of
from batch_agent.compiler.template import Template
from batch_agent.compiler.tokens import estimate_tokens
from batch_agent.errors import InputError
from batch_agent.messages import JsonObject

LONG_TOKENS = 300  # below this the reference costs more than it saves


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that all rows share: as it is in the first row, and as text."""

    value: object
    text: str

    def is_that_of(self, name: str, value: object) -> bool:
        """Return whether this value of the field has the same text. Raises InputError if it has none."""
        if value is self.value or (type(value) is str and value == self.text):
            return True
        return text_of(name, value) == self.text


def constants_of(rows: Sequence[object], names: Sequence[str]) -> dict[str, Constant]:
    """Return the named fields whose text is the same in all rows that have the field; {} for a single row. A row or a
    field that cannot be rendered is ignored here and fails as its own result. After its first difference, a field is
    not read again."""
    if len(rows) < 2:
        return {}
    seen: dict[str, Constant] = {}
    undecided = list(dict.fromkeys(names))
    for row in rows:
        if not undecided:
            break
        with suppress(InputError):
            _compare(fields_of(row), undecided, seen)
    return {name: seen[name] for name in undecided if name in seen}


def _compare(fields: Mapping[str, object], undecided: list[str], seen: dict[str, Constant]) -> None:
    for name in tuple(undecided):
        with suppress(InputError):
            value = value_of(fields, name)
            if name not in seen:
                seen[name] = Constant(value, text_of(name, value))
            elif not seen[name].is_that_of(name, value):
                undecided.remove(name)


def check_same(hoisted: Mapping[str, Constant], fields: Mapping[str, object]) -> None:
    """Raise InputError for a row whose values differ from the hoisted ones: it would be sent with the values of other
    rows."""
    for name, constant in hoisted.items():
        if not constant.is_that_of(name, value_of(fields, name)):
            raise InputError(
                f"the field {name!r} is another one than when the run was planned, where it was the same in every row; "
                "give no_hoist=True for inputs that change while they are read"
            )


def hoistable(template: Template, constants: Mapping[str, Constant]) -> tuple[str, ...]:
    """Return the long constant fields that occur at least once after a varying field."""
    first_varying = next((at for at, name in enumerate(template.names) if name not in constants), len(template.names))
    behind = dict.fromkeys(template.names[first_varying:])
    return tuple(name for name in behind if name in constants and estimate_tokens(constants[name].text) >= LONG_TOKENS)


def section(name: str, text: str) -> str:
    """Return the value as it appears in the system prompt."""
    return f'<input name="{name}">\n{text}\n</input>'


def reference(name: str) -> str:
    """Return what replaces the value in the message."""
    return f'[{name}: given once, in the system prompt, as <input name="{name}">]'


_PREAMBLE = re.compile(
    r"\A(?:[ \t]*\r?\n)*(?:[ \t]*x-(?:anthropic|amz)-[\w-]*:[^\n]*(?:\n|\Z)(?:[ \t]*\r?\n)*)+", re.IGNORECASE
)
_DECODER = json.JSONDecoder()


def strip_preamble(system: str) -> str:
    """Return the text without leading ``x-anthropic-*:`` and ``x-amz-*:`` lines and the blank lines after them. Some
    clients put such lines, which change with every session, before their system prompt; they would give each run
    another prefix. The same lines further down are content and stay."""
    return _PREAMBLE.sub("", system)


def schema_instruction(json_text: str) -> str:
    return (
        "Your final answer must be JSON that is valid against this JSON schema. "
        f"Answer with the JSON alone: no code fence, no text around it.\n{json_text}"
    )


def carries_schema(text: str, schema: JsonObject) -> bool:
    """Return whether the text already contains the schema, as JSON in any layout."""
    return any(value == schema for value in _objects(text))


def _objects(text: str) -> Iterator[object]:
    """Yield the outermost JSON objects in a text."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)
