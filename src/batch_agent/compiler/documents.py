"""Documents in rows: the field that holds one, and the fields that its content fills.

A row with a document has it in ``text``, and ``pages`` is None until it is read. Reading files is left to the ``Read``
that the plan is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike

from batch_agent.compiler.fields import listed
from batch_agent.documents.content import DocumentContent
from batch_agent.errors import InputError, SpecError
from batch_agent.messages import Attachment, Document

TEXT, PAGES = "text", "pages"

Read = Callable[[Document], DocumentContent]
"""Reads a document. Raises InputError for one that cannot be read."""


def document_in(fields: Mapping[str, object]) -> Document | None:
    found = fields.get(TEXT)
    return found if type(found) is Document else None


def with_document(fields: Mapping[str, object], column: str) -> Mapping[str, object]:
    """Returns the fields of a row and the document whose path is in one of them. Raises InputError."""
    if fields.get(PAGES) is not None:  # it was read before
        return fields
    path = fields.get(column)
    if not isinstance(path, str | PathLike) or not str(path).strip():
        raise InputError(f"the field {column!r} is not the path of a document")
    document = Document(path)
    if document.is_address:
        raise InputError(f"the field {column!r} is an address, which is not fetched: download {path} first")
    return {**fields, TEXT: document, PAGES: None}


def filled(fields: Mapping[str, object], content: DocumentContent) -> tuple[dict[str, object], dict[str, Attachment]]:
    """Return the fields with the document's text or marks of attachments, and the attachments by mark."""
    return {**fields, TEXT: content.text, PAGES: content.pages}, {part.mark: part for part in content.attached}


def check_column(column: str, names: tuple[str, ...]) -> None:
    """Raises SpecError if rows with these fields cannot have a document in that one."""
    if column not in names:
        raise SpecError(f"document_column: the first input has no field {column!r} (its fields: {listed(names)})")
    if TEXT in names and PAGES not in names:
        raise SpecError(f"document_column: the rows have a field {TEXT!r}, which the document fills: rename it")
