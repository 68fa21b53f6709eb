"""The options as ``help``, ``inspect`` and editors show them: a signature and a help page, generated from BatchSpec.

They are generated when a method is first accessed, so that a program that only imports the package does not wait for
pydantic.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, ForwardRef, TypeVar

C = TypeVar("C")

WIDTH = 100
OUTPUT_SCHEMA = "type[T] | Mapping[str, JsonValue] | None"  # it has overloads of its own


class _Decided:
    """Represents the default of an option for which a missing value differs from None."""

    def __repr__(self) -> str:
        return "..."


DECIDED: Final = _Decided()
LINK = re.compile(r"\[[^]]*\]\(([^)#]+)[^)]*\)")


def plain(text: str) -> str:
    """Return a description without Markdown: a link becomes the page it points to."""
    return LINK.sub(r"docs/\1", text).replace("`", "")


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, in the style of flag help."""
    first = plain(text).partition(". ")[0].rstrip(".")
    return first[:1].lower() + first[1:]


class _Documented(classmethod):  # type: ignore[type-arg]
    """A class method that takes the options and gets its help on first use."""

    def __init__(self, method: Callable[..., Any], types: Mapping[str, str]) -> None:
        super().__init__(method)
        self._types = types
        self._plain = True

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if self._plain:
            self._plain = False
            _document(self.__func__, self._types)
        return super().__get__(instance, owner)


def documented(options: type, *names: str) -> Callable[[type[C]], type[C]]:
    """Generate the help of these methods. ``options`` is the TypedDict with the type of each option."""
    types = {name: _written(kind) for name, kind in options.__annotations__.items()}

    def decorate(kind: type[C]) -> type[C]:
        for name in names:
            setattr(kind, name, _Documented(vars(kind)[name].__func__, types))
        return kind

    return decorate


def _document(method: Callable[..., Any], types: Mapping[str, str]) -> None:
    options = [*_parameters(types)]
    own = inspect.signature(method)
    before = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    method.__signature__ = own.replace(parameters=[*before, *options])  # type: ignore[attr-defined]
    page = "\n".join(_lines(options))
    method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions, as keywords or in a BatchSpec:\n\n{page}"


def _parameters(types: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    from batch_agent.option import Unset, notes
    from batch_agent.spec import BatchSpec

    unset = notes(BatchSpec, Unset)
    for name, field in BatchSpec.model_fields.items():
        default = DECIDED if name in unset and not unset[name].is_none else field.default
        if field.is_required():
            default = inspect.Parameter.empty
        kind = types.get(name, OUTPUT_SCHEMA)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _lines(options: list[inspect.Parameter]) -> Iterator[str]:
    from batch_agent.option import Unset, notes
    from batch_agent.spec import OLD_NAMES, BatchSpec

    unset = notes(BatchSpec, Unset)
    for option in options:
        default = "required" if option.default is option.empty else f"default {option.default!r}"
        default = f"default: {plain(unset[option.name].words)}" if option.name in unset else default
        yield f"{option.name}: {option.annotation} ({default})"
        sentence = plain(BatchSpec.model_fields[option.name].description or "")
        yield textwrap.fill(sentence, WIDTH, initial_indent="    ", subsequent_indent="    ")
    yield "\nOlder names: " + ", ".join(f"{old} for {new}" for old, new in OLD_NAMES.items()) + "."


def _written(kind: object) -> str:
    return kind.__forward_arg__ if isinstance(kind, ForwardRef) else str(kind)
