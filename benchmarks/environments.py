"""The environments of the baselines that must not share ours: made once, with pip, under ``.bench-venv/``."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".bench-venv"
REQUIREMENTS = {
    "httpx": ["httpx", "pydantic"],
    "openai": ["openai"],
    "old": ["batch-agent==0.2.0"],
    "litellm": ["litellm", "mcp"],
    "inspect": ["inspect_ai", "openai"],
    "pydantic-ai": ["pydantic-ai-slim[openai]"],
    "openai-agents": ["openai-agents"],
    "langchain": ["langchain", "langchain-openai"],
    "curator": ["bespokelabs-curator"],
}


def python_of(name: str) -> Path:
    """The interpreter of the environment ``name``, which is made first when it is not there or not complete."""
    folder, wanted = FOLDER / name, REQUIREMENTS[name]
    stamp, python = folder / "requirements.json", folder / "bin" / "python"
    if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        print(f"making {folder.relative_to(ROOT)}: {', '.join(wanted)}")
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        subprocess.run(command, check=True)
        stamp.write_text(json.dumps(wanted))
    return python


def versions_of(name: str) -> dict[str, str]:
    """What is installed there; asked of that interpreter, because it need not be ours."""
    code = "import json,importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run([python_of(name), "-c", code], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return {package: version for package, version in sorted(versions.items()) if package not in ("pip", "setuptools")}
