"""The results of suites that need more than CI has: one per suite, written by the command itself."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests import noted

ROOT = Path(__file__).parent.parent


def test_a_suite_leaves_its_last_line_its_exit_status_and_versions(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for name, program in (("b", "print('3 failed'); raise SystemExit(1)"), ("a", "print('== 2 passed ==\\n')")):
        arguments = [name, "--versions", "pytest,no-such-package", "--file", str(file), "--"]
        assert noted.main([*arguments, sys.executable, "-c", program]) == (name == "b")
    found = json.loads(file.read_text())
    assert list(found) == ["a", "b"]
    assert [found[name]["outcome"] for name in "ab"] == ["2 passed", "3 failed"]
    assert [found[name]["exit_status"] for name in "ab"] == [0, 1]
    assert found["a"]["versions"] == {"pytest": pytest.__version__}


def test_a_new_result_replaces_that_of_the_same_suite_only(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for outcome in ("1 failed", "1 passed"):
        noted.note(file, "a", {"outcome": outcome})
        noted.note(file, "b", {"outcome": "7 passed"})
    assert json.loads(file.read_text()) == {"a": {"outcome": "1 passed"}, "b": {"outcome": "7 passed"}}


def test_each_result_is_of_a_suite_that_the_makefile_notes() -> None:
    suites = set(re.findall(r"noted\.py ([\w-]+)", (ROOT / "Makefile").read_text()))
    suites |= {f"test-{name}" for name in ("vllm", "vllm-pin", "dynamo", "agents", "llamacpp")}
    noted_suites = {name for name in json.loads(noted.FILE.read_text()) if not re.fullmatch(r"test-python3\.\d+", name)}
    assert noted_suites <= suites
