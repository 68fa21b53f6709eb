"""Builds the documentation site: ``python docs/site/build.py FOLDER``, or ``make docs``.

The pages are the Markdown files of the repository, unchanged except for links that leave the site. This script adds
the first page with the navigation and the pages of the API, calls Sphinx, and checks the result: every link and anchor
leads somewhere, every page is in the navigation, and no page loads a script, style, font or picture from elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGES = ("*.md", "docs/**/*.md", "design/*.md", "benchmarks/*.md", "deploy/**/*.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LOADED = re.compile(r"""url\(\s*['"]?(?!data:|#)([^'")]+)|@import\s+['"]([^'"]+)""")

# What a reader wants to do → pages, with the words of the navigation.
NAVIGATION: dict[str, dict[str, str]] = {
    "Start": {
        "README": "Overview and first run",
        "docs/jobs/label_csv": "Label a CSV file",
        "docs/jobs/trusted_labels": "Measure how good labels are",
        "docs/jobs/review_files": "Review files",
        "docs/jobs/grade_answers": "Grade answers",
        "docs/jobs/extract_documents": "Extract data from documents",
        "docs/jobs/on_my_server": "Run against my vLLM",
        "docs/jobs/overnight": "Run overnight, with a budget",
        "docs/notebooks": "Work in a notebook",
        "docs/coming-from": "Migrate from another package",
    },
    "Describe the work": {
        "docs/files": "Inputs and results as files",
        "docs/templates": "Write the task",
        "docs/documents": "Send PDF, Word and HTML",
        "docs/images": "Send images",
        "docs/tools": "Give agents tools",
        "docs/mcp": "Use MCP servers",
        "docs/agents": "Bring your own agent",
        "docs/gateway": "Connect an agent by address",
        "docs/pipelines": "Chain stages, reduce results",
        "docs/contexts": "Handle long inputs",
    },
    "Choose a model": {
        "docs/backends": "Backends",
        "docs/local": "The embedded model",
        "docs/doctor": "Test a server",
    },
    "Run it": {
        "docs/durable": "Stop, resume, survive crashes",
        "docs/changed": "I changed something",
        "docs/errors": "Understand errors",
        "docs/cost": "Limit the cost",
        "docs/capacity": "Tune concurrency",
        "docs/kv": "Use the KV cache",
        "docs/security": "Security",
    },
    "See what happens": {
        "docs/results": "Results and control",
        "docs/trust": "How good the answers are",
        "docs/view": "Watch in the browser",
        "docs/terminal": "Watch on the terminal",
        "docs/view-api": "Read a run over HTTP",
        "docs/events": "Events",
        "docs/metrics": "Prometheus and OpenTelemetry",
    },
    "Use many machines": {
        "docs/cluster": "One run, many machines",
        "docs/fleet": "Many servers as one",
        "docs/swarm": "Swarms",
        "docs/ticks": "Agents that act in ticks",
        "docs/serve": "Serve a batch API",
        "deploy/README": "Deploy",
    },
    "Test your program": {
        "docs/testing": "Test without a model",
        "docs/contract": "Write a backend",
    },
    "Reference": {
        "docs/options": "Options",
        "docs/commands": "Commands",
        "api/index": "Python API",
        "CHANGELOG": "Changelog",
    },
    "Internals": {
        "ARCHITECTURE": "Architecture",
        "CONTRIBUTING": "Contributing",
        "SECURITY": "Report a vulnerability",
        "benchmarks/README": "Benchmarks",
        "design/index": "Design pages",
    },
}
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
    pages = sorted(path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern))
    for page in pages:
        write(source / page, LINK.sub(partial(kept, page), (ROOT / page).read_text()))
    shutil.copytree(ROOT / "docs" / "images", source / "docs" / "images")
    shutil.copytree(HERE / "static", source / "static")
    design = sorted(str(page.with_suffix("")) for page in pages if page.parts[0] == "design")
    write(source / "design/index.md", "# Design pages\n\nThe reasons for the hard parts.\n\n" + toctree("", design))
    for name in ("benchmarks", "deploy"):  # whose first page lists the others
        others = [
            str(page.with_suffix("")) for page in pages if page.parts[0] == name and str(page) != f"{name}/README.md"
        ]
        first = source / name / "README.md"
        write(first, first.read_text() + "\n" + toctree("", others, hidden=True))
    write(source / "index.md", first_page())
    api(source / "api")


def kept(page: Path, link: re.Match[str]) -> str:
    """Return a link of the page with the title of its target; only the text if that is not part of the site."""
    text, path, anchor = link[1], link[2], link[3] or ""
    target = ROOT / page.parent / path
    if "://" in path or path.startswith("mailto:") or (target.suffix == ".png" and target.exists()):
        return link[0]
    if target.suffix != ".md" or not target.exists():
        return text if text.startswith("`") else f"`{text}`"
    title = target.read_text().partition("\n")[0].lstrip("# ").partition(":")[0]
    return f"[{title}]({path}{anchor})" if text.endswith(target.name) else link[0]


def first_page() -> str:
    groups, trees = [], []
    for title, tasks in NAVIGATION.items():
        links = "\n".join(f"- [{words}]({page}.md)" for page, words in tasks.items())
        groups.append(f"<div>\n\n**{title}**\n\n{links}\n\n</div>\n")
        trees.append(toctree(title, [f"{words} <{page}>" for page, words in tasks.items()], hidden=True))
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
    write(folder / "index.md", f"# Python API\n\n{listed}\n" + toctree("", entries, hidden=True))
    for name in API:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [
            own
            for own, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == name and own[0] != "_"
        ]
        lines = [f"# `{name}`\n", "```{eval-rst}", f".. currentmodule:: {name}\n"]
        for own in sorted(public, key=lambda own: MAIN.index(own) if own in MAIN else len(MAIN)):
            value = getattr(module, own)
            if inspect.isclass(value):
                members = [] if own == "BatchSpec" else ["   :members:"]
                bases = ["   :show-inheritance:"] if issubclass(value, Exception) else []
                lines += [f".. autoclass:: {own}", *members, *bases, ""]
            elif callable(value):
                lines += [f".. autofunction:: {own}", ""]
        write(folder / f"{name}.md", "\n".join([*lines, "```\n"]))


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
    wrong = list(faults(site.resolve()))
    pages = sum(1 for _ in site.rglob("*.html"))
    wrong += [] if pages else ["nothing was built"]
    sys.stderr.writelines(f"{fault}\n" for fault in wrong)
    sys.stdout.write(f"{pages} pages, {len(wrong)} faults: {site / 'index.html'}\n")
    return 1 if wrong or built.returncode else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"))
