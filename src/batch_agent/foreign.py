"""Formats exceptions of code that is not ours (tools, validators, serializers, modules of a spec).

Such code may raise anything. Its ``SystemExit``, ``GeneratorExit`` or ``CancelledError`` is not meant for our process
or our tasks. So ``boundary`` catches BaseException and lets only the KeyboardInterrupt of Ctrl-C through. Each caller
decides what a failure means.
"""

from __future__ import annotations

import inspect
import json
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType

MESSAGE_CHARACTERS = 4000
TRACEBACK_CHARACTERS = 20_000
OWN = str(Path(__file__).parent)
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def message_of(error: BaseException) -> str:
    """Return the exception's message, encodable as UTF-8; "" if reading it raises as well."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001
        return ""
    return encodable(text)


def encodable(text: str) -> str:
    """Return the text with "?" in place of lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception, shortened, without its traceback."""
    message = message_of(error)
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]} [...]"
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def place_of(error: BaseException) -> str:
    """Return where the user's code raised, as " (file, line 3, in work: the source line)"; "" if that is unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OWN)]
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    frame = (own or frames)[-1]
    source = f": {frame.line.strip()}" if frame.line else ""
    return encodable(f" ({frame.filename}, line {frame.lineno}, in {frame.name}{source})")


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text, without the frames of this package at its beginning."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(OWN):
        tb = tb.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, tb))
    except KeyboardInterrupt:
        raise
    except BaseException:  # the exception's own methods  # noqa: BLE001
        return ""
    if len(text) > TRACEBACK_CHARACTERS:
        text = f"{text[: TRACEBACK_CHARACTERS // 2]}\n[...]\n{text[-TRACEBACK_CHARACTERS // 2 :]}"
    return encodable(text)


def drop_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was handled. A frame that holds its own error is a reference cycle, and
    keeps everything in the frame until the garbage collector finds it."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__


def is_ctrl_c(error: BaseException | None) -> bool:
    """Return whether this is the KeyboardInterrupt of a signal, and not one that foreign code raised itself."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # it leaves no frame: the error may be from either
        return True
    function = handler.func if isinstance(handler, partial) else handler
    code = getattr(function, "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


class boundary:  # noqa: N801 (a context manager)
    """Raise ``error(description)`` in place of whatever the block raises, except Ctrl-C and the types in
    ``passing``."""

    __slots__ = ("_error", "_passing")

    def __init__(self, error: Callable[[str], Exception], *passing: type[BaseException]) -> None:
        self._error, self._passing = error, passing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: object) -> None:
        if raised is not None and not isinstance(raised, self._passing) and not is_ctrl_c(raised):
            raise self._error(describe(raised)) from raised


def name_of(function: object) -> str:
    """Return the qualified name of a function, or of the class of a callable; for a partial, with its arguments."""
    if isinstance(function, partial):
        # Values that are not JSON may be formatted differently in another process.
        with suppress(TypeError, ValueError):
            return f"{name_of(function.func)}{json.dumps([function.args, function.keywords], sort_keys=True)}"
        return name_of(function.func)
    kind = function if isinstance(function, FunctionType) else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_async(function: Callable[..., object]) -> bool:
    """Return whether calling it gives a coroutine: an ``async def``, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
