"""Documents and pictures in rows: the fields that hold them, and the fields that a document fills.

A row with a document has it in ``text``, and ``pages`` is None until it is read. Reading files is left to the ``Read``
that the plan is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike

from batch_agent.compiler.fields import listed
from batch_agent.documents.content import DocumentContent
from batch_agent.errors import InputError, SpecError, meant
from batch_agent.job import Job
from batch_agent.messages import Attachment, Content, Document, Image, Part

TEXT, PAGES = "text", "pages"

Read = Callable[[Document], DocumentContent]
"""Reads a document. Raises InputError for one that cannot be read."""


def document_in(fields: Mapping[str, object]) -> Document | None:
    found = fields.get(TEXT)
    return found if type(found) is Document else None


def with_document(fields: Mapping[str, object], column: str) -> Mapping[str, object]:
    """Return the fields of a row and the document whose path is in one of them. Raises InputError."""
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
    """Return the fields with the text of the document or with marks of attachments, and the attachments by mark."""
    return {**fields, TEXT: content.text, PAGES: content.pages}, {part.mark: part for part in content.attached}


def check_column(column: str, names: tuple[str, ...]) -> None:
    """Raise SpecError if rows with these fields cannot have a document in ``column``."""
    if column not in names:
        known = f"its fields: {listed(names)}"
        raise SpecError(f"document_column: the first input has no field {column!r} ({known}){meant(column, names)}")
    if TEXT in names and PAGES not in names:
        raise SpecError(f"document_column: the rows have a field {TEXT!r}, which the document fills: rename it")


Look = Callable[[Image], Image]
"""Returns a picture as it can be sent. Raises InputError for one that cannot be sent."""

Pictures = Mapping[str, Attachment]
"""By their marks, in the order of the row's fields."""


def has_pictures(fields: Mapping[str, object]) -> bool:
    kinds = set(map(type, fields.values()))
    if Image in kinds or list not in kinds:
        return Image in kinds
    return any(type(value) is list and _all_images(value) for value in fields.values())


def see(fields: Mapping[str, object], named: Collection[str], look: Look) -> tuple[Mapping[str, object], Pictures]:
    """Return the fields with marks in place of pictures, and the pictures. ``named``: further fields.

    A mark is a short text with the hash of its picture, so that templates, estimates and the record need not know
    pictures. At the end ``with_pictures`` adds the marks of pictures that the task does not mention, and ``content_of``
    puts the pictures in place of the marks.
    """
    pictures: dict[str, Attachment] = {}
    marked: dict[str, object] = {}
    for name, value in fields.items():
        images = _images(name, value, named=name in named)
        for image in images or ():
            found = look(image)
            pictures[found.mark] = found
            marked[name] = "\n".join(filter(None, (marked.get(name), found.mark)))  # type: ignore[arg-type]
        if images == []:
            marked[name] = ""
    return ({**fields, **marked} if marked else fields), pictures


def _images(name: str, value: object, *, named: bool) -> list[Image] | None:
    """Return the pictures of a field; None if it has none."""
    if type(value) is Image:
        return [value]
    if isinstance(value, list | tuple) and (_all_images(value) or named):
        return [image for item in value for image in _images(name, item, named=named) or ()]
    if not named:
        return None
    if value is None or value == "":
        return []  # this row has none
    if isinstance(value, str | bytes | bytearray | PathLike):
        return [Image(bytes(value) if isinstance(value, bytearray) else value)]
    raise InputError(f"the field {name!r} is no image: it is a {type(value).__name__}, not a path, a URL or bytes")


def _all_images(values: Collection[object]) -> bool:
    return bool(values) and all(type(value) is Image for value in values)


def with_pictures(prompt: str, pictures: Pictures) -> str:
    """Return the message with the marks of unmentioned pictures appended."""
    return "\n".join([prompt, *(mark for mark in pictures if mark not in prompt)]) if pictures else prompt


def content_of(job: Job) -> Content:
    """Return the message of a job: its text, or parts if it has pictures, each in its place."""
    if not job.images:
        return job.prompt
    parts: list[Part] = [job.prompt]
    for mark, image in job.images.items():
        parts = [piece for part in parts for piece in _split(part, mark, image)]
    return tuple(part for part in parts if part != "")


def _split(part: Part, mark: str, image: Attachment) -> list[Part]:
    if isinstance(part, Attachment):
        return [part]
    pieces: list[Part] = []
    for text in part.split(mark):
        pieces += [text, image]
    return pieces[:-1]
