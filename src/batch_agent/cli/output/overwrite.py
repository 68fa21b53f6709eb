"""Checks that --output is not a file that the command reads or writes for another purpose."""

from __future__ import annotations

from pathlib import Path

from batch_agent.errors import SpecError


def refuse_overwriting(output: Path, other: Path, what: str) -> None:
    """Raise SpecError if the output is the other file, or is in the other directory."""
    if other.is_dir():
        if output.resolve().is_relative_to(other.resolve()):
            raise SpecError(f"--output {output} is in the directory of the {what}, and would be read as one of them")
        return
    try:
        same = output.samefile(other)
    except OSError:  # one of them does not exist yet
        return
    if same:
        raise SpecError(f"--output {output} is the file of the {what}; give another file")


def refuse_in_run_directory(output: Path, directory: Path) -> None:
    """Raise SpecError if the output is in the run directory: the run writes and reads the files there."""
    if output.resolve().is_relative_to(directory.resolve()):
        raise SpecError(
            f"--output {output} is in the run directory {directory}, whose files belong to the run; give another path"
        )
