"""Builds the documentation site: ``python docs/site/build.py FOLDER``, or ``make docs``.

The pages are the Markdown files of the repository, unchanged except for links that leave the site. This script adds
the first page with the navigation, the pages of the API and the search (``search.py``), calls Sphinx, and checks the
result: every link, anchor and result of the search leads somewhere, every page is in the navigation, and no page loads
a script, style, font or picture from elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batch_agent.options import Options
from batch_agent.spec import BatchSpec

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import search  # noqa: E402
import tables  # noqa: E402

ROOT = HERE.parent.parent
PAGES = ("*.md", "docs/**/*.md", "design/*.md", "benchmarks/*.md", "deploy/**/*.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LOADED = re.compile(r"""url\(\s*['"]?(?!data:|#)([^'")]+)|@import\s+['"]([^'"]+)""")

# What a reader wants to do → pages. The navigation shows their titles.
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": (
        "README",
        "docs/jobs/label_csv",
        "docs/jobs/trusted_labels",
        "docs/jobs/promise",
        "docs/jobs/review_files",
        "docs/jobs/grade_answers",
        "docs/jobs/extract_documents",
        "docs/jobs/on_my_server",
        "docs/jobs/overnight",
        "docs/notebooks",
        "docs/coming-from",
    ),
    "Describe the work": (
        "docs/files",
        "docs/templates",
        "docs/documents",
        "docs/images",
        "docs/tools",
        "docs/mcp",
        "docs/agents",
        "docs/gateway",
        "docs/pipelines",
        "docs/contexts",
    ),
    "Choose a model": (
        "docs/backends",
        "docs/local",
        "docs/doctor",
    ),
    "Run it": (
        "docs/durable",
        "docs/changed",
        "docs/errors",
        "docs/cost",
        "docs/capacity",
        "docs/kv",
        "docs/security",
    ),
    "See what happens": (
        "docs/results",
        "docs/trust",
        "docs/review",
        "docs/cascade",
        "docs/view",
        "docs/terminal",
        "docs/view-api",
        "docs/events",
        "docs/metrics",
    ),
    "Use many machines": (
        "docs/cluster",
        "docs/fleet",
        "docs/swarm",
        "docs/ticks",
        "docs/serve",
        "deploy/README",
    ),
    "Test your program": (
        "docs/testing",
        "docs/contract",
    ),
    "Reference": (
        "docs/options",
        "docs/commands",
        "api/index",
        "CHANGELOG",
    ),
    "Internals": (
        "ARCHITECTURE",
        "CONTRIBUTING",
        "SECURITY",
        "benchmarks/README",
        "design/index",
    ),
}
MADE = {
    "README": "Overview and first run",
    "api/index": "Python API",
    "design/index": "Design pages",
}  # titles given here
API = {
    "batch_agent": "Runs, results, pipelines, tools",
    "batch_agent.errors": "Errors",
    "batch_agent.events": "Events",
    "batch_agent.runtimes": "Command-line agents",
    "batch_agent.testing": "Test doubles",
    "batch_agent.swarm": "Swarms",
    "batch_agent.ticks": "Agents that act in ticks",
    "batch_agent.ray": "Ray",
}
MAIN = (
    "BatchAgent",
    "BatchSpec",
    "Results",
    "AgentResult",
    "Success",
    "Failure",
    "AgentError",
    "Pipeline",
    "Tool",
    "Fleet",
    *("ScriptedServer", "Request", "Say", "CallTools", "ToolUse", "Fail", "ScriptedBackend", "MessagesServer"),
)
FIRST = """---
nosearch: true
---

# Batch Agent

**Input list in, structured result list out.** Run one task on ten to a million inputs, with one tool-using LLM agent
for each input: on an embedded model, on your own servers, or on a paid API.

```python
from typing import Literal
from pydantic import BaseModel
from batch_agent import BatchAgent

class Label(BaseModel):
    mood: Literal["good", "bad"]

results = BatchAgent.run_sync(
    task="Is this customer happy? {text}",
    inputs="examples/data/reviews.csv",
    output_schema=Label,
    run_dir="runs/moods", resume=True,       # a killed run continues where it stopped
)
```

New here? The [overview](README.md) installs it and runs 30 agents without a server or a key, in about a minute.
"""


def stage(source: Path) -> None:
    """Write the pages that Sphinx reads."""
    shutil.rmtree(source, ignore_errors=True)
    pages = sorted(page.relative_to(ROOT) for page in staged())
    for page in pages:
        text = (ROOT / page).read_text()
        if made := MADE.get(str(page.with_suffix(""))):
            text = f"# {made}\n" + text.partition("\n")[2]
        write(source / page, LINK.sub(partial(kept, page), text))
    shutil.copytree(ROOT / "docs" / "images", source / "docs" / "images")
    shutil.copytree(HERE / "static", source / "static")
    design = sorted(str(page.with_suffix("")) for page in pages if page.parts[0] == "design")
    write(
        source / "design/index.md",
        f"# {MADE['design/index']}\n\nThe reasons for the hard parts.\n\n" + toctree("", design),
    )
    for name in ("benchmarks", "deploy"):  # whose first page lists the others
        others = [
            str(page.with_suffix("")) for page in pages if page.parts[0] == name and str(page) != f"{name}/README.md"
        ]
        first = source / name / "README.md"
        write(first, first.read_text() + "\n" + toctree("", others, hidden=True))
    write(source / "index.md", first_page())
    api(source / "api")


@cache
def staged() -> frozenset[Path]:
    """Return the pages of the repository that are on the site."""
    return frozenset(path for pattern in PAGES for path in ROOT.glob(pattern))


def kept(page: Path, link: re.Match[str], folder: str | None = None) -> str:
    """Return a link of the page with the title of its target; only the text if that is not part of the site.
    ``folder``: to which the link is relative, if that is not the folder of the page."""
    text, path, anchor = link[1], link[2], link[3] or ""
    if folder is not None:
        path = f"../{folder}/{path}"
    target = ROOT / page.parent / path
    if "://" in path or path.startswith("mailto:") or (target.suffix == ".png" and target.exists()):
        return link[0]
    if target.resolve() not in staged():
        return text if text.startswith("`") else f"`{text}`"
    title = title_of(str(target.resolve().relative_to(ROOT).with_suffix("")))
    return f"[{title if text.endswith(target.name) else text}]({path}{anchor})"


def title_of(page: str) -> str:
    return MADE.get(page) or (ROOT / f"{page}.md").read_text().partition("\n")[0].lstrip("# ")


def first_page() -> str:
    groups, trees = [], []
    for title, tasks in NAVIGATION.items():
        links = "\n".join(f"- [{title_of(page)}]({page}.md)" for page in tasks)
        groups.append(f"<div>\n\n**{title}**\n\n{links}\n\n</div>\n")
        trees.append(toctree(title, list(tasks), hidden=True))
    return "\n".join([FIRST, '<div class="tasks">\n', *groups, "</div>\n", *trees])


def toctree(caption: str, entries: list[str], *, hidden: bool = False) -> str:
    options = [f":caption: {caption}"] * bool(caption) + [":hidden:"] * hidden + [":maxdepth: 1"]
    return "\n".join(
        ["```{toctree}", *options, "", *(f"/{entry}" if "<" not in entry else entry for entry in entries), "```\n"]
    )


def api(folder: Path) -> None:
    """Write a page for each public module, from its docstrings."""
    folder.mkdir()
    listed = "".join(f"- [`{name}`]({name}.md): {words}\n" for name, words in API.items())
    entries = [f"{name} </api/{name}>" for name in API]
    write(folder / "index.md", f"# {MADE['api/index']}\n\n{listed}\n" + toctree("", entries, hidden=True))
    for name in API:
        lines = [f"# `{name}`\n", "```{eval-rst}", f".. currentmodule:: {name}\n"]
        for own, value in public(name):
            if inspect.isclass(value):
                members = [] if own == "BatchSpec" else ["   :members:"]
                bases = ["   :show-inheritance:"] if issubclass(value, Exception) else []
                lines += [f".. autoclass:: {own}", *members, *bases, ""]
            elif callable(value):
                lines += [f".. autofunction:: {own}", ""]
            if own == "BatchSpec":
                lines += ["```\n", *options(), "```{eval-rst}"]
        write(folder / f"{name}.md", "\n".join([*lines, "```\n"]))


def public(name: str) -> list[tuple[str, object]]:
    """Return the public names of a module and what they are, the main ones first."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [
        own
        for own, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == name and own[0] != "_"
    ]
    return [
        (own, getattr(module, own))
        for own in sorted(names, key=lambda own: MAIN.index(own) if own in MAIN else len(MAIN))
    ]


def options() -> Iterator[str]:
    """Yield the options as fields of BatchSpec, with their types. Their words are those of docs/options.md."""
    types: dict[str, object] = {**Options.__annotations__}
    page = Path("api/batch_agent.md")
    for name, field in BatchSpec.model_fields.items():
        shown = types.get(name) or {"output_schema": "Any", "worker": "Worker"}[name]
        kind = getattr(shown, "__forward_arg__", shown)
        text = LINK.sub(lambda link: kept(page, link, "docs"), field.description or "")
        default = LINK.sub(lambda link: kept(page, link, "docs"), tables.default_of(name))
        lines = (f":type: {kind}", "", text, "", f"Default: {default}.", "````", "")
        yield from (f"````{{py:attribute}} BatchSpec.{name}", *lines)


def found(source: Path, site: Path) -> list[search.Entry]:
    """Return all that can be found on the site."""
    pages = sorted(path.relative_to(source) for path in source.rglob("*.md"))
    written = [page for page in pages if page.parts[0] != "api" and str(page) != "index.md"]
    sections = (each for page in written for each in search.entries(str(page), (source / page).read_text()))
    return [*sections, *(each for module in API for each in objects(module, Page(site / f"api/{module}.html").ids))]


def objects(module: str, ids: set[str]) -> Iterator[search.Entry]:
    """Yield the names on the page of a module."""
    page = f"api/{module}.md"
    yield search.Entry(page, f"{module}: {API[module]}", "", "", "", "")
    for place in sorted(each for each in ids if each.startswith(f"{module}.")):
        name = place.removeprefix(f"{module}.")
        text = BatchSpec.model_fields[name[10:]].description if name.startswith("BatchSpec.") else told(module, name)
        yield search.Entry(page, module, place, "", name, search.plain(text or ""))


def told(module: str, name: str) -> str | None:
    value: object = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return None if isinstance(value, str | int | tuple) else inspect.getdoc(value)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Page(HTMLParser):
    """The ids of a built page, where its links lead, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or (tag == "link" and "href" in given):
            self.loaded.append(given.get("src") or given["href"])
        self.loaded += [found[0] or found[1] for found in LOADED.findall(given.get("style", ""))]


def faults(site: Path) -> Iterator[str]:
    """Yield what is wrong with the built site, one line each."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.links:
            if not leads_somewhere(path, link, pages):
                yield f"{name}: the link {link} leads nowhere"
        for loaded in page.loaded:
            if urlsplit(loaded).netloc:
                yield f"{name}: loads {loaded} from elsewhere"
            elif not loaded.startswith("data:") and not (path.parent / unquote(urlsplit(loaded).path)).exists():
                yield f"{name}: {loaded} is missing"
    for sheet in site.rglob("*.css"):
        found = [one or other for one, other in LOADED.findall(sheet.read_text())]
        yield from (f"{sheet.relative_to(site)}: loads {url} from elsewhere" for url in found if urlsplit(url).netloc)


def unfound(site: Path, everything: list[search.Entry]) -> Iterator[str]:
    """Yield the results of the search that lead nowhere."""
    ids = {path.relative_to(site): Page(path).ids for path in site.rglob("*.html")}
    for entry in everything:
        page = Path(entry.page).with_suffix(".html")
        if page not in ids or (entry.anchor and entry.anchor not in ids[page]):
            yield f"search: {entry.page}#{entry.anchor} leads nowhere"


def leads_somewhere(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True  # elsewhere; there may be no network to ask
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target not in pages:
        return target.exists()
    return not parts.fragment or unquote(parts.fragment) in pages[target].ids


def main(folder: Path) -> int:
    source, site = folder / "source", folder / "html"
    stage(source)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    shutil.rmtree(site, ignore_errors=True)
    places = ["-d", str(folder / "trees"), "-c", str(HERE), str(source), str(site)]
    built = subprocess.run([*command, *places], check=False)
    everything = found(source, site) if built.returncode == 0 else []
    (site / "searchindex.js").write_text(search.index(everything))
    for built_page in site.rglob("*.html"):
        built_page.write_text(search.with_row_ids(built_page.read_text()))
    wrong = [*faults(site.resolve()), *unfound(site, everything)]
    pages = sum(1 for _ in site.rglob("*.html"))
    wrong += [] if pages else ["nothing was built"]
    sys.stderr.writelines(f"{fault}\n" for fault in wrong)
    sys.stdout.write(f"{pages} pages, {len(wrong)} faults: {site / 'index.html'}\n")
    return 1 if wrong or built.returncode else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"))
