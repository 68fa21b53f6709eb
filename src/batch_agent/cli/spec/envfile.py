"""``--env-file``: lines of NAME=VALUE that become environment variables, unless they are already set.

No ``.env`` is read by default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from batch_agent.cli.spec.textfile import read_text
from batch_agent.errors import SpecError

LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)")


def load_env_file(path: Path) -> None:
    """Set the variables of the file. A SpecError names the wrong line but does not quote it: it may hold a secret."""
    for name, value in list(_variables(read_text(path, "the env file"), path)):
        os.environ.setdefault(name, value)


def _variables(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise SpecError(f"{path} line {number} is not NAME=VALUE")
        yield match["name"], _unquoted(match["value"])


def _unquoted(value: str) -> str:
    """Return the value without its quotes. In an unquoted value, `` #`` starts a comment."""
    quoted = re.fullmatch(r"""(["'])(.*)\1(?:\s+#.*)?""", value)
    return quoted[2] if quoted else re.split(r"\s+#", value, maxsplit=1)[0].rstrip()
