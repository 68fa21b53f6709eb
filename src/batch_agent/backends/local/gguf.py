"""Reads the header of a GGUF file: facts about the model that the engine does not pass on."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class NotGGUF(ValueError):
    """The file is not a GGUF model; the message says why."""


def context_length(path: Path) -> int:
    """Return the context length: prompt and answer together, in tokens."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise NotGGUF(f"{path} is not a GGUF file")
        try:
            _version, _tensors, entries = struct.unpack("<IQQ", file.read(20))
            for _ in range(entries):
                key = _string(file).decode(errors="replace")
                value = _value(file, _number(file, "I"))
                if key.endswith(".context_length") and isinstance(value, int):
                    return value
        except (struct.error, KeyError, OverflowError, MemoryError) as error:
            raise NotGGUF(f"{path} is damaged: its header cannot be read") from error
    raise NotGGUF(f"{path} does not state its context length")


def _number(file: BinaryIO, code: str) -> int | float:
    (value,) = struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))
    return value  # type: ignore[no-any-return]


def _string(file: BinaryIO) -> bytes:
    return file.read(int(_number(file, "Q")))


def _value(file: BinaryIO, kind: int | float) -> int | float | None:
    """Read a scalar; strings and arrays are skipped."""
    if kind == STRING:
        _string(file)
        return None
    if kind == ARRAY:
        inner, length = _number(file, "I"), int(_number(file, "Q"))
        if inner in SCALARS:
            file.seek(length * struct.calcsize(f"<{SCALARS[int(inner)]}"), 1)
        else:
            for _ in range(length):
                _value(file, inner)
        return None
    return _number(file, SCALARS[int(kind)])
