"""Conversion of table cells to JSON values, because rows are written to prompts, journals and results."""

from __future__ import annotations

import base64
from datetime import date, datetime, time, timedelta


def plain(value: object) -> object:
    """Return the value as a JSON value: dates as ISO text, durations as seconds, bytes as text or base64, and missing
    values (NaN, NaT, NA) as None."""
    match value:
        case None | str() | int():
            return value
        case float():
            return None if value != value else float(value)
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode("ascii")
        case datetime() | date() | time():
            return None if type(value).__name__ == "NaTType" else value.isoformat()
        case timedelta():
            return value.total_seconds()
        case _:
            return _of_others(value)


def _of_others(value: object) -> object:
    """Convert values of other packages. They are recognised by their class names, without importing the packages."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy":
        return plain(value.tolist())  # type: ignore[attr-defined]
    return None if kind.__name__ in ("NAType", "NaTType") else str(value)
