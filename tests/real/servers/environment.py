"""A virtual environment for a server, made once from a list of exact versions."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path


def python_of(folder: Path, requirements: Path) -> Path:
    """The interpreter of the environment at ``folder``, made first where it is not there or not of this list. The
    list is complete: what the packages say they need is not asked, and could not be satisfied for all of them."""
    stamp, python = folder / requirements.name, folder / "bin" / "python"
    wanted = requirements.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {folder}: {len(wanted.split())} packages", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps"]
        subprocess.run([*pip, "-r", requirements], check=True)
        stamp.write_text(wanted)
    return python
