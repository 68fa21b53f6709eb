"""The documentation site, without its generator: the navigation is complete, and the check of a site finds faults."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site" / "build.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


def test_every_page_is_in_the_navigation_once_and_nothing_else_is() -> None:
    named = [page for pages in site.NAVIGATION.values() for page in pages]
    assert len(named) == len(set(named))
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(named)
    made = {"api/index", "design/index"}
    assert all((ROOT / f"{page}.md").exists() for page in set(named) - made)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [errors.md](errors.md#errors)", "see [Errors](errors.md#errors)"),
        ("see [the errors](errors.md)", "see [the errors](errors.md)"),
        ("see [show.py](../examples/triage/show.py)", "see `show.py`"),
        ("see [a page](https://example.org/a.md)", "see [a page](https://example.org/a.md)"),
    ],
)
def test_links_have_titles_and_those_that_leave_the_site_are_text(text: str, shown: str) -> None:
    assert site.LINK.sub(lambda link: site.kept(Path("docs/results.md"), link), text) == shown


def test_the_first_page_links_every_task_and_its_program_compiles() -> None:
    page = site.first_page()
    assert all(f"]({name}.md)" in page for pages in site.NAVIGATION.values() for name in pages)
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert program is not None
    compile(program[1], "index", "exec")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="other.html#there">x</a>', None),
        ('<a href="https://example.org/">x</a>', None),
        ('<img src="data:image/png;base64,x">', None),
        ('<a href="missing.html">x</a>', "leads nowhere"),
        ('<a href="other.html#not-there">x</a>', "leads nowhere"),
        ('<a href="#not-there">x</a>', "leads nowhere"),
        ('<img src="missing.png">', "is missing"),
        ('<script src="https://cdn.example.org/a.js"></script>', "from elsewhere"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "from elsewhere"),
        ('<p style="background: url(https://example.org/a.png)">', "from elsewhere"),
    ],
)
def test_the_check_of_a_built_site(tmp_path: Path, body: str, fault: str | None) -> None:
    (tmp_path / "index.html").write_text(f"<html><body>{body}</body></html>")
    (tmp_path / "other.html").write_text('<html><body><h1 id="there">x</h1></body></html>')
    found = list(site.faults(tmp_path.resolve()))
    assert len(found) == (fault is not None)
    assert all(fault in line for line in found)


def test_a_style_sheet_with_a_font_from_elsewhere_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example.org/a.woff2') } p { color: red }")
    assert [line for line in site.faults(tmp_path) if "from elsewhere" in line]
