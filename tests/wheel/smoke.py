"""What a user has after installing the wheel and nothing else: ``make test-wheel`` runs this in an empty environment.

It is no test of pytest: the environment has no pytest.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import batch_agent
from batch_agent import BatchAgent, SpecError

COMMAND = Path(sys.executable).parent / "batch-agent"
SOURCE = Path(__file__).parents[2]


def check(what: str, holds: bool) -> None:
    if not holds:
        raise SystemExit(f"the wheel fails: {what}")


def command(*arguments: str) -> str:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)
    check(f"batch-agent {' '.join(arguments)} exits with {done.returncode}: {done.stderr}", done.returncode == 0)
    return done.stdout


def main() -> None:
    package = importlib.resources.files("batch_agent")
    check("it is not the source tree that is tested", SOURCE / "src" not in Path(str(package)).parents)
    check("types are shipped", package.joinpath("py.typed").is_file())
    check("the page is shipped", package.joinpath("view/static/main.js").is_file())
    check("the version", command("--version").split()[-1] == batch_agent.__version__)

    Path("rows.csv").write_text("id,text\na,one\nb,two\n")
    asked = ("run", "--task", "Repeat {text}", "rows.csv", "--backend", "simulated://instant", "--run-dir", "run")
    results = [json.loads(line) for line in command(*asked).splitlines()]
    check("a run has as many results as rows", [result["ok"] for result in results] == [True, True])
    check("a run is recorded", "2" in command("status", "run"))
    exported = command("export", "run", "--format", "csv").splitlines()
    check("results are exported", len(exported) == 3)

    Path("papers").mkdir()
    Path("papers/a.html").write_text("<h1>Head</h1><p>Words</p>")
    (result,) = BatchAgent.run_sync(task="{pages} {text}", inputs="papers/", backend="simulated://instant")
    check(f"documents are read: {result.error}", result.input["text"] == "Head\n\nWords")
    Path("papers/b.pdf").write_bytes(b"%PDF-1.7")
    for inputs, backend, needed in (("papers/", "simulated://instant", "pypdfium2"), (["a"], None, "openvino-genai")):
        try:
            BatchAgent.run_sync(task="x", inputs=inputs, backend=backend)
        except SpecError as error:
            check(f"the error names the missing package {needed}: {error}", needed in str(error))
        else:
            check(f"there is an error without the package {needed}", False)
    print(f"the wheel of {batch_agent.__version__} works on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        main()
