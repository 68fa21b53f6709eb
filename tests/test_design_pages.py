"""The design pages and ARCHITECTURE.md name only what is there: files, packages and classes in back-ticks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "batch_agent"
PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "design").glob("*.md"))]
BACK_TICKS = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[a-z_0-9]+(?:/[a-z_0-9]+)*(?:\.py|/)")
CLASS = re.compile(r"(?:[A-Z][a-z0-9]+){2,}(?:\.[a-z_]+)*")
DEFINED = re.compile(r"^ *(?:class (\w+)|([A-Z]\w+)(?:: [^=\n]+)? = )", re.MULTILINE)
# Names of other programs and of wire formats that look like classes of ours.
FOREIGN = {
    *("TaskGroup", "TypeAdapter", "TypedDict", "ValueError", "KeyboardInterrupt", "CancelledError", "TimeoutError"),
    *("TypeError", "OSError", "NotImplementedError", "BaseModel", "JsonValue", "LiteLLM", "OpenCode", "RuntimeError"),
    *(
        "DataFrame",
        "ThreadPoolExecutor",
        "FileNotFoundError",
        "SystemExit",
        "WeakKeyDictionary",
        "ReadableStream",
        "DirtyEquals",
        "ResizeObserver",
    ),
}

MADE = {"lost/"}  # folders that the package makes


@cache
def defined() -> set[str]:
    """Every class, and every other name that is given a value, of the package, the tests and the benchmarks."""
    folders = (SOURCE, ROOT / "tests", ROOT / "benchmarks")
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    return {found[1] or found[2] for text in texts for found in DEFINED.finditer(text)}


@cache
def places() -> set[str]:
    """Every file and folder of the repository that pages may name: from the root, from the package, or from a part."""
    found: set[str] = set()
    for top in (ROOT / name for name in ("src", "tests", "benchmarks", "docs", "deploy", "examples", "design")):
        for path in (top, *top.rglob("*")):
            end = "/" if path.is_dir() else ""
            parts = path.relative_to(ROOT).parts
            found.update("/".join(parts[start:]) + end for start in range(len(parts)))
    return found


def unknown(page: Path) -> list[str]:
    wrong = []
    for name in BACK_TICKS.findall(page.read_text()):
        if FILE.fullmatch(name):
            known = name in places() or name in MADE
        elif CLASS.fullmatch(name):
            first = name.partition(".")[0]
            known = first in defined() or first in FOREIGN
        else:
            continue
        wrong += [] if known else [name]
    return sorted(set(wrong))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_what_is_there(page: Path) -> None:
    assert unknown(page) == []


def test_no_cell_of_the_map_is_a_paragraph() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    long = [cell for line in lines if line.startswith("|") for cell in line.split(" | ") if len(cell) > 320]
    assert long == [], "list the modules at the end of the page instead"


def test_the_lists_of_modules_name_modules_that_exist() -> None:
    _, lists = (ROOT / "ARCHITECTURE.md").read_text().split("## Modules of the larger packages")
    for package, named in re.findall(r"### `(\w+)/`\n(.*?)(?=\n### |\Z)", lists, re.DOTALL):
        modules = set(re.findall(r"(?:[-:;,.] |and |\n  )`([a-z_]+)/?`", named))
        there = {path.stem for path in (SOURCE / package).iterdir()}
        assert modules and modules - {"ask"} <= there, package


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_what_was_tried_stands_behind_the_rules(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert "Rejected" not in headings
    assert "What was tried" not in headings[:-1]
