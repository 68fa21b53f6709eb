"""The check of words in ``make lint``: what it reads, what it skips, and that its list is usable."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "words.py"
REFUSED = {"nobody": "no caller", "goes on": "continues"}


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Nobody waits."""\n', [1]),
        ('"""A run.\n\nIt goes\non here."""\n', [3]),
        ("x = 1  # nobody\n", [1]),
        ('x = 1\ny = f"{x} goes on"\n', [2]),
        ("nobody = 1\n", []),
        ('"""See ``nobody`` and `goes on`."""\n', []),
        ('"""Nobody waits."""  # words: ok\n', []),
        ('"""A run\n\nnobody waits for."""  # words: ok\n', []),
    ],
)
def test_phrases_are_found_in_comments_and_strings_of_code(
    words: ModuleType, tmp_path: Path, source: str, lines: list[int]
) -> None:
    file = tmp_path / "file.py"
    file.write_text(source)
    assert [int(line.split(":")[1]) for line in words.found(file, REFUSED)] == lines


def test_code_blocks_of_a_page_are_skipped(words: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nobody waits.\n\n```text\nnobody\n```\n\nIt `goes on`. <!-- words: ok --> nobody\nIt goes on.\n")
    assert list(words.found(page, REFUSED)) == [
        f"{page}:1: 'Nobody': write no caller",
        f"{page}:8: 'goes on': write continues",
    ]


def test_every_phrase_of_the_list_has_advice_and_every_path_exists(words: ModuleType) -> None:
    refused = words.phrases(PAGE.with_suffix(".txt").read_text())
    assert refused
    assert [phrase for phrase, advice in refused.items() if not advice] == []
    assert [name for name in words.CHECKED if not (words.ROOT / name).exists()] == []
