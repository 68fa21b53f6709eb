"""Reads a document in a separate process, page by page. The functions block, so callers use threads."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Literal

from batch_agent.documents.failure import DocumentError

SILENCE = 60.0  # seconds without a page after which the process is killed
CHUNK_BYTES = 2**16
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from batch_agent.documents.child import main; main()"
)


class OpenDocument:
    """A document that is being read. ``pages`` is the number of pages in the whole file."""

    def __init__(self, lines: Iterator[dict[str, object]]) -> None:
        self._lines = lines
        self.pages = int(str(self._next("pages")))

    def texts(self) -> Iterator[str]:
        """Yield the text of each page, from the requested first page."""
        while (text := self._next("text")) is not None:
            yield str(text)

    def pictures(self) -> Iterator[str]:
        """Yield each page as a JPEG picture in base64."""
        while (picture := self._next("image")) is not None:
            yield str(picture)

    def _next(self, name: str) -> object:
        """Return the value of that name in the next line; None at the end. Raises DocumentError."""
        line = next(self._lines)
        if "error" in line:
            raise DocumentError(str(line["error"]), missing=bool(line["missing"]))
        return line.get(name)


@contextmanager
def open_document(
    file: FileIO,
    kind: str,
    what: Literal["text", "images"] = "text",
    *,
    first: int = 1,
    silence: float = SILENCE,
    program: str = PROGRAM,
) -> Iterator[OpenDocument]:
    """Start the process, and kill it when the block ends. Raises DocumentError. ``kind`` is one of ``FORMATS``.
    ``first`` is the first page to read."""
    command = [sys.executable, "-c", program, json.dumps(sys.path), what, kind, str(first)]
    # The open file is the standard input of the process. So the process reads the file that was checked here, even if
    # another file now has that path. In its own session it gets no Ctrl-C from the terminal.
    process = subprocess.Popen(
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield OpenDocument(_lines(process, silence))
    finally:
        process.kill()
        process.communicate()


def _lines(process: subprocess.Popen[bytes], silence: float) -> Iterator[dict[str, object]]:
    assert process.stdout is not None
    descriptor, unread = process.stdout.fileno(), bytearray()
    output = select.poll()  # unlike select(), it takes descriptors above 1023
    output.register(descriptor, select.POLLIN)
    until = time.monotonic() + silence
    while True:
        if not output.poll(max(0.0, until - time.monotonic()) * 1000):
            raise DocumentError(f"could not be read: no page was read in {silence:g} s")
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            code = process.wait()
            how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise DocumentError(f"could not be read: the reader {how}")
        unread += chunk
        if b"\n" in chunk:
            until = time.monotonic() + silence
            *lines, unread = unread.split(b"\n")
            for line in lines:
                yield json.loads(line)
