"""The program that reads a document from standard input and writes its pages to standard output as lines of JSON.

The lines are ``{"pages": N}``, then a ``{"text": …}`` or ``{"image": base64}`` for each page, then ``{"end": true}``.
If it fails, the last line is ``{"error": …, "missing": …}``. The parent closes the pipe when it needs no more pages.
"""

from __future__ import annotations

import json
import os
import sys
from base64 import b64encode
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from batch_agent.documents.failure import DocumentError

FILE = "/dev/fd/0"
MEMORY_BYTES = 4 * 2**30  # limit of the address space: stops a file that unpacks to an unlimited size


def main() -> None:
    """Read the document. Arguments: ``text`` or ``images``, the format, the first page."""
    what, kind, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
    _limit_memory()
    try:
        _read(what, kind, first)
        _write({"end": True})
    except DocumentError as error:
        _write({"error": str(error), "missing": error.missing})
    except MemoryError:
        _write({"error": "needs too much memory to be read", "missing": False})
    except BrokenPipeError:  # the parent needs no more pages
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _write({"error": f"cannot be read: {error.strerror}", "missing": False})


def _read(what: str, kind: str, first: int) -> None:
    if kind == "pdf":
        from batch_agent.documents.pdf import open_pdf, page_pictures, page_texts

        document = open_pdf(FILE)
        _write({"pages": len(document)})
        if what == "images":
            for picture in page_pictures(document, first):
                _write({"image": b64encode(picture).decode()})
        else:
            _write_texts(page_texts(document, first))
        return
    if kind == "docx":
        from batch_agent.documents.word import word_pages

        pages = list(word_pages(FILE))  # the number of pages is known only at the end
    else:
        from batch_agent.documents.web import web_text

        pages = [web_text(FILE)]
    _write({"pages": len(pages)})
    _write_texts(islice(pages, first - 1, None))


def _write_texts(texts: Iterable[str]) -> None:
    for text in texts:
        _write({"text": text.encode("utf-8", "replace").decode()})


def _write(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # not supported on every system
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    main()
