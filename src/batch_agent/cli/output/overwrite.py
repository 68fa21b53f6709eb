"""What --output must not be: something that the command reads, or that another part of it writes."""

from __future__ import annotations

from pathlib import Path

from batch_agent.errors import SpecError


def refuse_overwriting(output: Path, other: Path, what: str) -> None:
    """SpecError when the output is the other file, or in the other directory."""
    if other.is_dir():
        if output.resolve().is_relative_to(other.resolve()):
            raise SpecError(f"--output {output} is in the directory of the {what} and would be one of them")
        return
    try:
        same = output.samefile(other)
    except OSError:  # one of them is not there yet
        return
    if same:
        raise SpecError(f"--output {output} is the file of the {what}; give another one")


def refuse_in_run_directory(output: Path, directory: Path) -> None:
    """Whose files the run itself writes, and reads again."""
    if output.resolve().is_relative_to(directory.resolve()):
        raise SpecError(
            f"--output {output} is in the run directory {directory}, whose files are the run's own; give another place"
        )
