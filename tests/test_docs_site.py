"""The documentation site, without its generator: the navigation is complete, the search finds what readers look for,
and the check of a site finds faults."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.view.browser import MISSING, PROGRAM, chromium

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


def test_the_navigation_shows_the_title_of_each_page_and_no_title_twice() -> None:
    titles = [site.title_of(page) for pages in site.NAVIGATION.values() for page in pages]
    assert len(titles) == len(set(titles))
    assert all(f"[{title}](" in site.first_page() for title in titles)


def test_every_place_that_synonyms_name_exists() -> None:
    found = {(each.page, each.anchor) for each in everything()}
    for place in site.search.SYNONYMS:
        page, _, anchor = place.partition("#")
        assert (page, anchor) in found


def test_sections_and_rows_that_begin_with_a_name_in_code_can_be_found() -> None:
    page = "# Title\n\nFirst.\n\n## A `b`: [c](d.md)\n\n"
    page += "| name | |\n| --- | --- |\n| `--x N` | 3 | what `x` is |\n| two | |\n"
    found = [(each.anchor, each.heading, each.name, each.text) for each in site.search.entries("docs/p.md", page)]
    row = ("row-x-N", "A b: c", "--x N", "3 · what x is")
    assert found == [("", "", "", "First."), ("a-b-c", "A b: c", "", "name two"), row]


def test_a_row_of_a_built_page_gets_the_id_that_the_search_links_to() -> None:
    code = '<code class="docutils literal notranslate"><span class="pre">--x</span> <span class="pre">N</span></code>'
    row = f'<tr class="row-even"><td><p>{code}</p></td><td><p>what</p></td></tr>'
    assert site.search.with_row_ids(row + row) == row.replace("<tr ", f'<tr id="{site.search.row_id("--x N")}" ') + row


def everything() -> list[Any]:
    pages = sorted(path.relative_to(ROOT) for path in site.staged())
    return [each for page in pages for each in site.search.entries(str(page), (ROOT / page).read_text())]


@pytest.mark.real
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
async def test_the_search_finds_what_readers_look_for_in_files_on_a_disk(tmp_path: Path) -> None:
    program = (ROOT / "docs" / "site" / "static" / "searchtools.js").read_text()
    scripts = f"<script>{program}</script><script src='index.js'></script>"
    (tmp_path / "index.js").write_text(site.search.index(everything()))
    (tmp_path / "search.html").write_text(f"<html><body><div id='search-results'></div>{scripts}</body></html>")
    first = {
        "max_tokens": "docs/options.html#row-max_tokens",
        "--max-tokens": "docs/commands.html#row-max-tokens-N",
        "change the prompt": "docs/changed.html",
        "rate limits": "docs/options.html#row-rpm",
        "excel": "docs/files.html",
        "resume": "docs/options.html#row-resume",
        "jupyter": "docs/notebooks.html",
        "Errors": "docs/errors.html",
        "failover": "docs/fleet.html#a-standby-another-model-while-all-servers-are-down",
        "vllm": "docs/backends.html",
        "id column": "docs/options.html#row-id_column",
    }
    links = "[...document.querySelectorAll('ul a')].map((link) => link.getAttribute('href'))"
    async with chromium() as page:
        for words, place in first.items():
            await page.goto(f"file://{tmp_path}/search.html?{urlencode({'q': words})}")
            await page.until("document.querySelector('ul li')")
            assert (await page.ask(links))[0] == place, words
        await page.goto(f"file://{tmp_path}/search.html?q=rate+limit")
        await page.until("document.querySelector('ul li')")
        assert "docs/capacity.html" in (await page.ask(links))[:4]
        await page.goto(f"file://{tmp_path}/search.html?q=xyzzyx+%3Cb%3E")
        await page.until("document.body.innerText.includes('Nothing was found')")
        assert page.problems == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [errors.md](errors.md#errors)", "see [Understand errors](errors.md#errors)"),
        ("see [the errors](errors.md)", "see [the errors](errors.md)"),
        ("see [show.py](../examples/triage/show.py)", "see `show.py`"),
        ("see [more](../examples/trusted_labels/README.md)", "see `more`"),
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
