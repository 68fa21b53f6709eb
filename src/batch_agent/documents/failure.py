"""Why a document cannot be read."""

from __future__ import annotations


class DocumentError(Exception):
    """The message completes a sentence that begins with the file's name. ``missing`` says that a package is not
    installed, which is no fault of the file."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
