"""Pictures on their way from a file to a message."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest

from batch_agent.errors import InputError
from batch_agent.files.pictures import read_image
from batch_agent.messages import IMAGE_TOKENS, Image


def png(width: int = 1, height: int = 1) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (width + 1) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08" + struct.pack(">HH", 600, 800) + b"\x03" + bytes(9)
GIF = b"GIF89a" + struct.pack("<HH", 300, 200) + bytes(3)
WEBP = b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x00\x00\x00\x00\x2b\x01\x00\xc7\x00\x00"


@pytest.mark.parametrize(
    ("data", "kind", "tokens"),
    [
        (png(750, 100), "image/png", 100),
        (JPEG, "image/jpeg", 640),
        (GIF, "image/gif", 85),
        (WEBP, "image/webp", 85),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp", IMAGE_TOKENS),
        (png(9000, 20), "image/png", 240),
    ],
)
def test_the_kind_and_the_size_are_read_from_the_bytes_and_not_from_the_name(
    data: bytes, kind: str, tokens: int, tmp_path: Path
) -> None:
    file = tmp_path / "picture.txt"
    file.write_bytes(data)
    image = read_image(Image(file))
    assert image.url == f"data:{kind};base64,{b64encode(data).decode()}"
    assert image.tokens == tokens


def test_a_picture_is_known_by_the_hash_of_its_bytes_however_it_was_given(tmp_path: Path) -> None:
    data = png()
    (tmp_path / "a.png").write_bytes(data)
    given = [Image(tmp_path / "a.png"), Image(data), Image.of(data, "image/png")]
    assert {read_image(image).mark for image in given} == {f"[image sha256:{sha256(data).hexdigest()}]"}


def test_an_address_is_left_to_the_server() -> None:
    image = Image("https://example.org/cat.png")
    assert read_image(image) is image
    assert image.mark == "[image https://example.org/cat.png]"


def test_a_relative_path_is_one_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    assert read_image(Image("a.png"), tmp_path).is_data


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (Image("/nowhere/a.png"), "/nowhere/a.png cannot be read: No such file"),
        (Image("a\0b"), "cannot be read"),
        (Image(b""), "the image is empty"),
        (Image(b"%PDF-1.7"), "is not a PNG, JPEG, GIF or WebP"),
        (Image("data:image/png;base64,%%%"), "not base64"),
        (Image("data:text/plain,hello"), "not base64"),
    ],
)
def test_what_is_no_picture_says_so(image: Image, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_image(image)


def test_a_printed_picture_does_not_show_its_bytes() -> None:
    assert len(repr(Image(b"x" * 10_000))) < 100


def test_a_picture_has_one_mark_whether_or_not_it_was_looked_at() -> None:
    data = png()
    mark = f"[image sha256:{sha256(data).hexdigest()}]"
    given = Image(data), Image.of(data, "image/png"), read_image(Image(data))
    assert [image.mark for image in given] == [mark] * 3
    assert Image("data:image/png;base64,no base64").mark.startswith("[image sha256:")
