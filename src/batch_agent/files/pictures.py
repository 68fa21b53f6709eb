"""Images from files: their format, their size, and the ``data:`` URL that is sent.

Only formats that all providers accept are used: PNG, JPEG, GIF and WebP. A bad image raises InputError, which fails its
row only.
"""

from __future__ import annotations

import re
from base64 import b64decode
from hashlib import sha256
from pathlib import Path

from batch_agent.documents.content import place_of
from batch_agent.errors import InputError
from batch_agent.messages import IMAGE_TOKENS, Image

KINDS = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
# Models scale large images down and split them into tiles: about one token per 750 pixels, up to a limit.
PIXELS_PER_TOKEN = 750
LEAST_TOKENS = 85
MOST_TOKENS = 1600


def read_image(image: Image, root: Path | None = None, *, confined: bool = False) -> Image:
    """Return the image in the form that is sent: an http URL unchanged, a file as a ``data:`` URL. ``place_of``
    explains ``root`` and ``confined``."""
    if image.is_address:
        return image
    if image.is_data:
        data, where = _decoded(image.url), "the image"
    else:
        where = f"the image {image.url}"
        try:
            path = place_of(image.url, root, confined=confined)
            where = f"the image {path}"
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            raise InputError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    kind = next((media for pattern, media in KINDS if pattern.match(data)), None)
    if kind is None:
        what = "is empty" if not data else "is not a PNG, JPEG, GIF or WebP"
        raise InputError(f"{where} {what}")
    size, tokens = _size(data, kind), IMAGE_TOKENS
    if size is not None:
        tokens = min(MOST_TOKENS, max(LEAST_TOKENS, size[0] * size[1] // PIXELS_PER_TOKEN))
    return Image.of(data, kind, tokens=tokens, digest=sha256(data).hexdigest())


def _decoded(url: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError
        return b64decode(body, validate=True)
    except ValueError:
        raise InputError("the image is a data: URL that is not base64") from None


def _size(data: bytes, kind: str) -> tuple[int, int] | None:
    """Return width and height from the header of the file; None if they are not found."""
    if kind == "image/png" and len(data) >= 24:
        return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    if kind == "image/gif" and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if kind == "image/webp" and data[12:16] == b"VP8X" and len(data) >= 30:
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    return _jpeg_size(data) if kind == "image/jpeg" else None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the first frame header, after any other segments."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        at += 2 + length
    return None
