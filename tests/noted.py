"""``python tests/noted.py NAME [--versions PACKAGE,…] -- COMMAND…``: runs a suite that needs more than CI has.

How it ended is written into ``tests/results.json``: the last result of each suite, with its date, commit and versions.
Only the standard library is needed, since each suite has an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "results.json"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/noted.py")
    parser.add_argument("name")
    parser.add_argument("--versions", default="", help="packages whose versions matter, with commas between them")
    parser.add_argument("--file", type=Path, default=FILE)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if not command:
        parser.error("give the command of the suite after --")
    status, last = run(command)
    result = {
        "command": shlex.join(command),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": versions(options.versions),
        "exit_status": status,
        "outcome": last,
    }
    note(options.file, options.name, result)
    return status


def run(command: Sequence[str]) -> tuple[int, str]:
    """Run the command, show what it prints, and return its exit status and the last line of it."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip(" =\n") or last
    return process.returncode, last


def commit() -> str | None:
    with suppress(FileNotFoundError):
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or None
    return None


def versions(names: str) -> dict[str, str]:
    found = {}
    for name in filter(None, names.split(",")):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def note(file: Path, name: str, result: dict[str, object]) -> None:
    """Replace the result of the suite. The others stay as they are."""
    known = json.loads(file.read_text()) if file.exists() else {}
    text = json.dumps(dict(sorted({**known, name: result}.items())), indent=2, ensure_ascii=False)
    beside = file.with_suffix(".part")
    beside.write_text(text + "\n")
    beside.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
