"""Standard output and standard error, which may be closed, full, or without a reader.

Results and other requested output go to standard output; failing to write them is an error. Messages go to standard
error; failing to write them is ignored, because a run must not end for a message.
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
    """Replace closed streams by the null device. Otherwise the next opened file would get the descriptor of a closed
    stream, and messages would be written into that file."""
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            _to_null(descriptor, flags)
    sys.stdout = sys.stdout or _null()
    sys.stderr = sys.stderr or _null()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the locale's encoding lacks


def say(text: str, *, wrap: bool = True) -> None:
    """Print a message on standard error. On a terminal it is wrapped between words; ``wrap=False`` for text to copy."""
    with suppress(OSError, ValueError):  # full, without a reader, or closed by a tool
        print(wrapped(text, terminal_width(sys.stderr)) if wrap else text, file=sys.stderr)
    flush_words()


def flush_words() -> None:
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        discard(sys.stderr)


def put(text: str, stream: TextIO | None = None) -> None:
    """Print the requested output on standard output, or on the stream that was standard output."""
    stream = stream or sys.stdout
    with writing(stream):
        print(text, file=stream)


def put_json(value: object, stream: TextIO | None = None) -> None:
    """Print a value as one line of JSON on standard output, or on the stream that was standard output."""
    from batch_agent.files.results import to_json  # imported here, so that help texts appear quickly

    put(to_json(value).decode(), stream)


@contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """Turn errors of writing to standard output into BatchAgentError. The caller handles BrokenPipeError."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(stream)
        raise BatchAgentError(f"cannot write to standard output: {error.strerror}") from None


def discard(stream: TextIO) -> None:
    """Discard the buffer of a stream. Otherwise Python writes it again at exit, and changes the exit status."""
    with suppress(OSError, ValueError):  # it has no descriptor
        _to_null(stream.fileno(), os.O_WRONLY)


def _to_null(descriptor: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
