"""Text of files that the command line is told to read."""

from __future__ import annotations

from pathlib import Path

from batch_agent.errors import SpecError


def read_text(path: Path, what: str = "") -> str:
    """The text of a file, without a byte order mark. SpecError when it cannot be read; ``what`` it is, in its words."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise SpecError(f"cannot read {f'{what} ' if what else ''}{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8") from None
