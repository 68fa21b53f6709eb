"""What helps people to begin: files to start from, and a shell that completes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batch_agent.cli.main import COMMANDS, main


def test_init_writes_files_that_run_and_overwrites_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["init", "new"]) == 0
    assert "batch-agent run new/spec.yaml" in capsys.readouterr().out
    assert main(["run", "new/spec.yaml", "--backend", "simulated://instant", "--output", "out.csv"]) == 0
    assert len(Path("out.csv").read_text().splitlines()) == 4
    assert main(["init", "new"]) == 1
    assert "new already has spec.yaml, support.py, rows.csv" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_in_the_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert all(flag in script for flag in ("max-outage", "keep-answers", "unfinished", "watch", "min-fraction"))


def test_bash_completes_commands_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    main(["completion", "bash"])
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        call = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _batch_agent; echo ${{COMPREPLY[@]}}"
        done = subprocess.run([bash, "-c", f"{script}\n{call}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("batch-agent", "re") == ["resume", "retry-failed", "review", "report"]
    assert completed("batch-agent", "run", "--max-o") == ["--max-outage"]
    assert completed("batch-agent", "run", "--format", "t") == ["tsv", "text"]
    assert completed("batch-agent", "fleet", "") == ["wait", "status", "bench", "proxy"]
    assert completed("batch-agent", "fleet", "wait", "--min") == ["--min-hosts", "--min-fraction"]


def test_without_the_package_mcp_only_that_command_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in ("mcp", "mcp_server"):
        monkeypatch.delitem(sys.modules, f"batch_agent.cli.commands.{name}", raising=False)
    assert main(["completion", "fish"]) == 0
    assert main(["mcp"]) == 1
    assert "batch-agent mcp needs the package mcp" in capsys.readouterr().err
