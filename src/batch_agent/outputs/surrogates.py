"""Replaces lone halves of surrogate pairs: models write them as escapes, and strict JSON parsers refuse them.

A half has no meaning alone, so it becomes a replacement character; the rest of the answer is unchanged.
"""

from __future__ import annotations

import json
import re
from typing import cast

import orjson
from pydantic import JsonValue

_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def read_json(data: bytes | str) -> JsonValue:
    """Return the value of a JSON text, with lone halves replaced. Raises ValueError if it is not JSON."""
    try:
        value: JsonValue = orjson.loads(data)
        return value
    except orjson.JSONDecodeError:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        if not _HALF.search(text):
            raise
    try:
        return cast("JsonValue", mended_all(json.loads(mended(text), parse_constant=_refuse)))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def readable_json(text: str) -> str:
    """Return the same JSON, unchanged if strict parsers accept it. Text that is not JSON stays unchanged."""
    if not _HALF.search(text):
        return text
    try:
        orjson.loads(text)
        return text
    except orjson.JSONDecodeError:
        pass
    try:
        return orjson.dumps(read_json(text)).decode()
    except ValueError:
        return text


def mended(text: str) -> str:
    """Return the text without lone halves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def mended_all(value: object) -> object:
    """Return the value with lone halves replaced in every text."""
    if isinstance(value, dict):
        return {mended(name): mended_all(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [mended_all(part) for part in value]
    return mended(value) if isinstance(value, str) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
