"""The error for a document that cannot be read."""

from __future__ import annotations


class DocumentError(Exception):
    """A document cannot be read. The message continues a sentence that starts with the path of the file. If ``missing``
    is true, a package is not installed, and the file itself may be valid."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
