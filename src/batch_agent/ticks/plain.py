"""The boundary to the user's values and code: no value and no function of theirs affects more than one agent.

Observations are user objects. They may be deep, cyclic, huge, not UTF-8, or raise when read. All code that writes one
(a prompt, a memory, a trace, an HTTP response) uses ``plain``, ``json_of`` or ``text_of``, which are bounded and do not
raise. All code that calls a user's function uses ``guarded``, ``tried`` or ``called``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue
from pydantic_core import to_json

from batch_agent.dispatch.cancellation import worker_boundary
from batch_agent.errors import JobError, WorkerFailed
from batch_agent.foreign import boundary, describe, encodable
from batch_agent.tools.threads import Threads

DEPTH = 32
ITEMS = 100_000  # values in total
CHARACTERS = 1_000_000  # of one text
INTEGER_BITS = 4096  # Python refuses to write far longer ones
CUT = "[...]"

T = TypeVar("T")
Items = dict[Any, Any] | list[Any]


def plain(value: object) -> JsonValue:
    """Return the value as plain JSON data. Floats stay unchanged, NaN included."""
    return _Walk().value(value, DEPTH)


def json_of(value: object) -> bytes:
    """Return the value as JSON. NaN and infinities become null."""
    return to_json(plain(value), inf_nan_mode="null")


def text_of(value: object) -> str:
    """Return the value as text: with the ``__str__`` of its class if the class defines one, else as its plain data."""
    if type(value) is str:
        return _cut(value)
    try:
        text = str(value if type(value).__str__ is not object.__str__ else plain(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001
        text = str(plain(value))
    return _cut(text)


def _cut(text: str) -> str:
    return encodable(text if len(text) <= CHARACTERS else text[:CHARACTERS] + CUT)


class _Walk:
    def __init__(self) -> None:
        self._left = ITEMS
        self._around: set[int] = set()  # the containers around the current value

    def value(self, value: object, depth: int) -> JsonValue:
        self._left -= 1
        if type(value) is str:
            return _cut(value)
        if type(value) is float or value is None or value is True or value is False:
            return value
        if type(value) is int and value.bit_length() <= INTEGER_BITS:
            return value
        try:
            items = value if type(value) is dict or type(value) is list else _opened(value)
            return self._container(id(value), items, depth) if isinstance(items, dict | list) else items
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001
            return f"<{type(value).__name__}, unreadable: {describe(error)}>"

    def _container(self, identity: int, items: Items, depth: int) -> JsonValue:
        if identity in self._around:
            return "<cycle>"
        if not depth or self._left <= 0:
            return CUT
        is_cut = len(items) > self._left
        shown = islice(items, self._left) if is_cut else items
        self._around.add(identity)
        try:
            if isinstance(items, dict):
                pairs = {
                    _cut(key) if type(key) is str else text_of(key): self.value(items[key], depth - 1) for key in shown
                }
                return {**pairs, CUT: CUT} if is_cut else pairs
            written = [self.value(item, depth - 1) for item in shown]
            return [*written, CUT] if is_cut else written
        finally:
            self._around.discard(identity)


def _opened(value: object) -> JsonValue | Items:
    """Return the items of a container, a number or text for a number, else the object's text."""
    match value:
        case str():
            return _cut(str.__str__(value))
        case bytes() | bytearray() | memoryview():
            return bytes(value[:CHARACTERS]).decode(errors="replace")
        case Integral():  # numpy's too
            number = int(value)
            return number if number.bit_length() <= INTEGER_BITS else f"<integer of {number.bit_length()} bits>"
        case Real():
            return float(value)
        case Mapping():
            return {key: value[key] for key in islice(value, ITEMS)}
        case Sequence():
            return list(islice(value, ITEMS))
        case Set():
            return sorted(islice(value, ITEMS), key=text_of)  # a stable order, independent of hashes
        case BaseModel():
            return value.model_dump(by_alias=True)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return _cut(str(value))


def guarded(name: str, function: Callable[[], T]) -> T:
    """Return what ``function`` returns. An exception becomes a WorkerFailed that says that ``name`` raised it. A
    JobError, which has its own message, and Ctrl-C pass unchanged."""
    with boundary(lambda raised: WorkerFailed(f"{name} raised {raised}"), JobError):
        return function()


def tried(function: Callable[[], T], otherwise: T) -> T:
    """Return what ``function`` returns, or ``otherwise`` if it raises."""
    try:
        return guarded("", function)
    except JobError:
        return otherwise


async def called(threads: Threads, name: str, method: Callable[[], object]) -> object:
    """Return what ``method`` returns. It runs in a thread unless it is async. Exceptions are handled as in
    ``guarded``."""
    with worker_boundary(f"{name} raised"):
        if inspect.iscoroutinefunction(method):
            return await method()
        value = await threads.run(method)
        return await value if inspect.isawaitable(value) else value


# What users' backends take and return.

Arguments = tuple[str, dict[str, object]]  # the prompt, and the other arguments


@dataclass(slots=True)
class GenerationResult:
    """``finish_reason`` is stop, length or error. An error has no ``text``, and ``metadata["error"]`` says why."""

    text: str
    tokens_used: int = 0
    finish_reason: str = "stop"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """The reason why there is no answer, or ""."""
        if self.finish_reason != "error":
            return ""
        why = self.metadata.get("error")
        return (self.text if why is None else text_of(why)) or "no reason was given"


def method_of(generator: object, name: str) -> Callable[..., object] | None:
    """Return a method of the user's object; None if it has none of this name."""
    method: object = getattr(generator, name, None)
    return method if callable(method) else None


def result_of(value: object) -> GenerationResult:
    """Return what a backend returned: a GenerationResult or an object with its fields, a mapping, or text. Raises
    WorkerFailed if it is invalid."""
    if isinstance(value, str):
        return GenerationResult(value)
    text, tokens, reason, metadata = (
        _field(value, name) for name in ("text", "tokens_used", "finish_reason", "metadata")
    )
    if isinstance(reason, str):
        reason = str.__str__(reason)  # an enum may be text with another ``str``
    result = GenerationResult(
        text if isinstance(text, str) else "",
        tokens if isinstance(tokens, int) else 0,
        "stop" if reason is None else text_of(reason) or "stop",
        metadata if isinstance(metadata, dict) else {},
    )
    if not isinstance(text, str) and not result.error:
        raise WorkerFailed(f"the backend returned a {type(value).__name__} without text")
    return result


def _field(value: object, name: str) -> object:
    def read() -> object:
        return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)

    return guarded(f"the backend returned a {type(value).__name__} whose {name}", read)


def arguments_for(method: Callable[..., object], prompt: str, system: str, **options: object) -> Arguments:
    """Return the arguments for the method: the prompt, and the options that it has parameters for. The system prompt is
    passed as ``system_prompts`` (a list of one) or as ``system_prompt``; if the method has neither parameter, it is put
    before the prompt."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # a builtin without a signature
        parameters = {}.values()
    names = {one.name for one in parameters}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        names |= {"system_prompt", "temperature", "max_tokens"}
    taken = {name: value for name, value in options.items() if value is not None and name in names}
    if "system_prompts" in names:
        taken["system_prompts"] = [system]
    elif system and "system_prompt" in names:
        taken["system_prompt"] = system
    elif system:
        prompt = f"{system}\n\n{prompt}"
    return prompt, taken
