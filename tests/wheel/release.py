"""``make release``: build the wheel and the sdist, check both, and try the wheel in bare environments.

    python tests/wheel/release.py                        python3.11 to python3.14, as far as they are here
    python tests/wheel/release.py python3.12             these alone

For each Python: an empty environment with the wheel and nothing else (``smoke.py``), then the commands and blocks of
README.md from it. Then ``uv tool install`` and ``pipx install`` of the wheel. The files are left in ``dist/``.
Exit status 1 if anything fails, or if a Python of the default list is missing: its name is printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD, DIST = ROOT / "build" / "release", ROOT / "dist"
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
BUILDERS = ("build", "twine", "uv", "pipx")
TESTERS = ("pytest", "pytest-asyncio", "hypothesis", "markdown-it-py", "openvino-genai", "scipy")
FILES = ("batch_agent/py.typed", "batch_agent/view/static/main.js")


def run(*command: str | Path, **environment: str) -> str:
    """Run a command in the repository, without its source on the path. Raises SystemExit if it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", *command, flush=True)
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=kept | environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4_000:]}\n{command[0]} ended with status {done.returncode}")
    return done.stdout


def environment_of(name: str, python: str, *packages: str | Path) -> Path:
    """Make an environment, and return its folder of programs."""
    run(python, "-m", "venv", "--clear", BUILD / name)
    programs = BUILD / name / "bin"
    run(programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *packages)
    return programs


def build() -> Path:
    """Build wheel and sdist into ``dist/``, check them, and return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    tools = environment_of("tools", sys.executable, *BUILDERS)
    run(tools / "python", "-m", "build", "--outdir", DIST)
    run(tools / "python", "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,) = DIST.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        if missing := set(FILES) - set(packed.namelist()):
            raise SystemExit(f"the wheel lacks {', '.join(sorted(missing))}")
    return wheel


def try_with(python: str, wheel: Path) -> None:
    bare = environment_of(f"bare-{Path(python).name}", python, wheel)
    run(bare / "python", "tests/wheel/smoke.py")
    reader = environment_of(f"reader-{Path(python).name}", python, wheel, *TESTERS)
    run(reader / "python", "-m", "pytest", "tests/test_docs.py", "-k", "README", "-p", "no:cacheprovider")


def try_installers(wheel: Path) -> None:
    """Install the wheel as a tool with uv and with pipx, and ask each for its version."""
    tools = BUILD / "tools" / "bin"
    for name, command in (("uv", ("uv", "tool", "install", "--python", sys.executable)), ("pipx", ("pipx", "install"))):
        home = BUILD / name
        shutil.rmtree(home, ignore_errors=True)
        places = {"UV_TOOL_DIR": home, "UV_TOOL_BIN_DIR": home / "bin", "PIPX_HOME": home, "PIPX_BIN_DIR": home / "bin"}
        run(tools / command[0], *command[1:], wheel, **{key: str(value) for key, value in places.items()})
        print(run(home / "bin" / "batch-agent", "--version").strip())


def main(asked: list[str]) -> int:
    wheel = build()
    missing = [python for python in asked or PYTHONS if not _works(python)]
    for python in asked or PYTHONS:
        if python not in missing:
            try_with(python, wheel)
    try_installers(wheel)
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")
    if missing:
        print(f"not tried, because they are not here: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def _works(python: str) -> bool:
    """Return whether a command is a Python that starts; a version manager may have a stub for one that is missing."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
