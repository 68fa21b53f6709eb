"""Pictures in rows: which fields contain them, and where they appear in a row's message.

While a message is built, a picture is represented by its mark, a short text with its hash. So templates, estimates and
the record need not know pictures. At the end the marks are replaced by the pictures. A picture that the task does not
mention is appended. The caller of the compiler reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike

from batch_agent.errors import InputError
from batch_agent.job import Job
from batch_agent.messages import Attachment, Content, Image, Part

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
    """Return the fields with marks in place of pictures, and the pictures. ``named``: further fields."""
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
    """Return a job's message, with its pictures in their places."""
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
