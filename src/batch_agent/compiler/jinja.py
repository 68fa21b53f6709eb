"""Tasks that are Jinja templates (``template="jinja"``), with loops and conditions.

A template sees the row's fields as plain data (their JSON form), and all of them as ``row``, for names that are not
identifiers. It runs in Jinja's sandbox without a loader, so it can reach only the row. Functions with varying results
are removed, because a row is identified by its prompt. Values are written as everywhere: text unchanged, anything else
as JSON. A missing name is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import to_jsonable_python

from batch_agent.compiler.fields import Unfillable, listed, text_of
from batch_agent.compiler.template import Piece
from batch_agent.errors import InputError, SpecError
from batch_agent.foreign import boundary, describe

ROW = "row"
GLOBALS = ("namespace", "range")
OPEN, CLOSE = "\ue000", "\ue001"  # private-use characters that mark filled-in values while they are located


class JinjaTemplate:
    """A TaskTemplate. ``names`` are the variables that the template does not define itself, ``row`` among them."""

    def __init__(self, task: str) -> None:
        self._task = task
        environment = _environment(_text)
        try:
            tree = environment.parse(task)
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise SpecError(f"task is no Jinja template: line {error.lineno}: {error.message}") from None
        self.names = frozenset(meta.find_undeclared_variables(tree))
        _, kind, text = next(iter(environment.lex(task)), (1, "", ""))
        self.head = text if kind == "data" else ""

    def render(self, fields: Mapping[str, object]) -> str:
        return _render(self._template, self._data(fields), fields)

    def pieces(self, fields: Mapping[str, object]) -> Sequence[Piece]:
        plain = self.render(fields)
        try:
            marked = _render(_environment(_marked).from_string(self._task), self._data(fields), fields)
        except InputError:  # the template computes with what it has written
            return [(plain, False)]
        pieces: list[Piece] = []
        depth = 0
        for part in re.split(f"([{OPEN}{CLOSE}])", marked):
            if part in (OPEN, CLOSE):
                depth += 1 if part == OPEN else -1
            else:
                pieces.append((part, depth > 0))
        return pieces if "".join(text for text, _ in pieces) == plain else [(plain, False)]

    def _data(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return only the fields that the template uses. So an unreadable field is an error only in a template that
        uses it."""
        data: dict[str, object] = {}
        if ROW in self.names:
            data[ROW] = {name: _plain(name, value) for name, value in fields.items()}
        return data | {name: _plain(name, fields[name]) for name in self.names if name in fields}


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: object, attribute: str) -> object:
        """Return a key of the row before a method of ``dict``: ``{{ order.items }}`` is the field ``items`` of the
        order."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment(finalize: Callable[[object], object]) -> _Environment:
    environment = _Environment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=finalize
    )
    environment.globals = {name: environment.globals[name] for name in GLOBALS}
    del environment.filters["random"]
    return environment


def _text(value: object) -> object:
    return value if isinstance(value, Undefined) else text_of("an expression", value)


def _marked(value: object) -> object:
    return value if isinstance(value, Undefined) else f"{OPEN}{_text(value)}{CLOSE}"


def _plain(name: str, value: object) -> object:
    with boundary(lambda raised: InputError(f"the field {name!r} cannot be written as text or JSON: {raised}")):
        return to_jsonable_python(value)


def _render(template: Template, data: Mapping[str, object], fields: Mapping[str, object]) -> str:
    try:
        return template.render(data)
    except InputError:
        raise
    except Exception as error:  # anything that the user's expression may raise
        raise Unfillable(f"the template fails: {describe(error)} (the input's fields: {listed(fields)})") from error
