"""The tree's rules, checked on the source: who may import whom, who may start tasks, how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import batch_agent

ROOT = Path(batch_agent.__file__).parent
# A part imports only from those before it.
ORDER = [
    "version",
    "foreign",
    "blocking",
    "messages",
    "errors",
    "job",
    "events",
    "spec",
    "documented",
    "compiler",
    "scheduler",
    "outputs",
    "backends",
    "tools",
    "files",
    "store",
    "observe",
    "results",
    "dispatch",
    "engine",
    "topology",
    "fleet",
    "swarm",
    "ticks",
    "testing",
    "api",
    "__init__",
    "cli",
    "__main__",
]
SOURCES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "batch_agent":
                yield "__init__"
            elif node.module and node.module.startswith("batch_agent."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("batch_agent."):
                    yield name.name.split(".")[1]


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    assert {part_of(path) for path in SOURCES} <= set(ORDER)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_part_imports_only_from_those_above_it(path: Path) -> None:
    mine = ORDER.index(part_of(path))
    below = {part for part in imported_parts(ast.parse(path.read_text())) if ORDER.index(part) > mine}
    assert not below


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_engine_starts_tasks(path: Path) -> None:
    # The engine, the faces that have loops of their own in place of a run, and the edges that own an event loop.
    if part_of(path) in ("dispatch", "engine", "fleet", "swarm", "ticks", "api", "cli", "testing"):
        return
    if path.name == "generating.py":  # many requests as one call, awaited by it
        return
    starters = {"create_task", "ensure_future", "gather", "TaskGroup"}
    used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not used & starters


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_concept(path: Path) -> None:
    assert path.read_text().count("\n") <= 500
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{node.name} is too long"
        assert not isinstance(node, ast.Global), "no module-level state is changed"
