"""Exceptions of code that is not ours (tools, validators, serializers, modules of a spec), as words.

Such code may raise anything. A ``SystemExit``, ``GeneratorExit`` or stray ``CancelledError`` out of it is not meant for
our process or our tasks, so the places that call it catch BaseException and let only a KeyboardInterrupt through, which
is the user's. Each place decides what a failure means there; here is only how it reads.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType

MESSAGE_CHARACTERS = 4000


def message_of(error: BaseException) -> str:
    """What the exception says, in text that UTF-8 can carry; nothing when asking it raises as well."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return text if text.isascii() else text.encode(errors="replace").decode()


def describe(error: BaseException) -> str:
    """Its type and what it says, cut, without its traceback."""
    message = message_of(error)
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]} [...]"
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def name_of(function: object) -> str:
    """The qualified name of a function, or of the class of an object that is called like one; that of a partial says
    with what."""
    if isinstance(function, partial):
        with suppress(TypeError, ValueError):  # what is not JSON may be written differently in another process
            return f"{name_of(function.func)}{json.dumps([function.args, function.keywords], sort_keys=True)}"
        return name_of(function.func)
    kind = function if isinstance(function, FunctionType) else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling it gives a coroutine: an ``async def``, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
