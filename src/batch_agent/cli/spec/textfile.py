"""Text files that are named on the command line."""

from __future__ import annotations

from pathlib import Path

from batch_agent.errors import SpecError


def read_text(path: Path, what: str = "") -> str:
    """Return the text of a file, without a byte order mark. Raises a SpecError that calls the file ``what``."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise SpecError(f"cannot read {f'{what} ' if what else ''}{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8") from None
