"""The command's streams as they may really be: closed, full, or with nobody reading.

Results and whatever else was asked for go to standard output, and not being able to write them is an error. Words for
people go to standard error; a run is not worth less because nobody hears of it, so writing these never fails.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from batch_agent.errors import BatchAgentError
from batch_agent.observe.text import terminal_width, wrapped


def ensure_streams() -> None:
    """Streams that the caller has closed become the null device. Left closed, the next file to be opened would get
    their number, and the words for people would be written into it."""
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            _to_null(descriptor, flags)
    sys.stdout = sys.stdout or _null()
    sys.stderr = sys.stderr or _null()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a prompt may have what the locale's encoding lacks


def say(text: str, *, wrap: bool = True) -> None:
    """A line, or several, for people: on a terminal broken between words, unless somebody may want to copy it."""
    with suppress(OSError, ValueError):  # full, gone, or closed by a tool
        print(wrapped(text, terminal_width(sys.stderr)) if wrap else text, file=sys.stderr)
    flush_words()


def flush_words() -> None:
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        discard(sys.stderr)


def put(text: str, stream: TextIO) -> None:
    """What the command was asked for, on standard output."""
    with writing(stream):
        print(text, file=stream)


@contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """Around writing to standard output. A reader that is gone is the caller's to notice."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(stream)
        raise BatchAgentError(f"cannot write to standard output: {error.strerror}") from None


def discard(stream: TextIO) -> None:
    """What a stream still holds goes nowhere; or Python would try again at exit, complain, and change the status."""
    with suppress(OSError, ValueError):  # it has no file
        _to_null(stream.fileno(), os.O_WRONLY)


def _to_null(descriptor: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
