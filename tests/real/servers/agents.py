"""The agents that users have, from nothing: three frameworks from the package index, three command lines from npm."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
FRAMEWORKS = ("pydantic-ai>=2.62", "openai-agents>=0.24", "langgraph>=1.2", "langchain-openai>=1.7")
PROGRAMS = {"opencode": "opencode-ai", "claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}


@contextmanager
def agents(folder: Path) -> Iterator[str]:
    """Where the command lines are; the frameworks' Python is in ``$BATCH_AGENT_TEST_AGENTS_PYTHON``."""
    python, programs = folder / "venv" / "bin" / "python", folder / "npm"
    if not python.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder / "venv", with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *FRAMEWORKS, "--editable", ROOT], check=True)
    if not all((programs / "bin" / name).exists() for name in PROGRAMS):
        scripts = f"--allow-scripts={','.join(PROGRAMS.values())}"
        npm = ["npm", "install", "--silent", "--global", "--prefix", programs, scripts, *PROGRAMS.values()]
        subprocess.run(npm, check=True)
    os.environ["BATCH_AGENT_TEST_AGENTS_PYTHON"] = str(python)
    yield str(programs / "bin")
