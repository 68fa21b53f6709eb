"""Which fields have the same value in every row, and moving the long ones of them to where they are shared.

An engine's prefix cache ends at the first token that differs between two rows. A long value that all rows share but
that stands behind one that varies would be computed for each row again, so it moves to the end of the system prompt,
under its name, and the message says where it is. A value in front of all that varies is shared already and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batch_agent.compiler.budget import estimate_tokens
from batch_agent.compiler.fields import fields_of, text_of
from batch_agent.compiler.template import Template
from batch_agent.errors import InputError

LONG_TOKENS = 300  # below this the reference and the break with the text as written cost more than they save


def constant_texts(rows: Sequence[object], names: Sequence[str]) -> dict[str, str]:
    """The named fields whose text is the same in all rows, with that text.

    A single row shares nothing, so it has none. A row that cannot be rendered fails as a result of its own and
    does not count. A field is not looked at again after its first difference.
    """
    if len(rows) < 2:
        return {}
    seen: dict[str, tuple[object, str]] = {}
    undecided = list(dict.fromkeys(names))
    for row in rows:
        if not undecided:
            break
        try:
            _compare(fields_of(row), undecided, seen)
        except InputError:
            continue
    return {name: seen[name][1] for name in undecided if name in seen}


def _compare(fields: Mapping[str, object], undecided: list[str], seen: dict[str, tuple[object, str]]) -> None:
    for name in tuple(undecided):
        if name not in fields:
            continue
        value = fields[name]
        if name not in seen:
            seen[name] = value, text_of(name, value)
            continue
        first, text = seen[name]
        if value is not first and text_of(name, value) != text:
            undecided.remove(name)


def hoistable(template: Template, constants: Mapping[str, str]) -> tuple[str, ...]:
    """The long constant fields that stand, at least once, behind a field that varies."""
    first_varying = next((at for at, name in enumerate(template.names) if name not in constants), len(template.names))
    behind = dict.fromkeys(template.names[first_varying:])
    return tuple(name for name in behind if name in constants and estimate_tokens(constants[name]) >= LONG_TOKENS)


def section(name: str, text: str) -> str:
    """The value as it stands in the system prompt."""
    return f'<input name="{name}">\n{text}\n</input>'


def reference(name: str) -> str:
    """What stands in the message instead."""
    return f'[{name}: given once, in the system prompt, as <input name="{name}">]'
