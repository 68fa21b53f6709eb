"""The search of the site: what can be found, made of the Markdown pages. ``static/searchtools.js`` ranks it.

Every section is an entry, and so is every row of a table whose first cell is a name in code: an option, a flag, an
error, a metric. The pages of Sphinx have no ids for such rows; ``with_row_ids`` adds them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"^\s*(```+|~~~+)")
HEADING = re.compile(r"^(#{1,4}) +(.*?)\s*$")
ROW = re.compile(r"^\| *`([^`|]+)` *\|(.*)\|\s*$")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
BUILT_ROW = re.compile(
    r'<tr class="(row-\w+)"><td><p>(<code class="docutils literal notranslate">(?:(?!</?code).)*</code>)</p>'
)

# A page, a section or a row → what readers call it, if it does not say these words, or others say them more often.
SYNONYMS = {
    "docs/changed.md": "change the prompt, edit the task, change the model, new rows, fix a typo, add rows, rerun",
    "docs/files.md": "excel, xlsx, csv, spreadsheet, parquet, pandas, dataframe, hugging face",
    "docs/capacity.md": "rate limit, too many requests, 429, throttling, concurrency, parallel, speed, slow",
    "docs/durable.md": "continue, restart, crash, checkpoint, ctrl-c, interrupted",
    "docs/cost.md": "budget, price, money, expensive, dollars, cache",
    "docs/results.md": "output, progress bar, cancel, pause, export",
    "docs/templates.md": "prompt, jinja, message, placeholder, braces",
    "docs/errors.md": "error, errors, exception, failed rows, retry, traceback",
    "docs/trust.md": "accuracy, evaluation, gold, ground truth, benchmark, confidence, majority vote, quality",
    "docs/backends.md": "openai, anthropic, bedrock, azure, vllm, sglang, ollama, provider, api key, base url",
    "docs/tools.md": "function calling, tool use",
    "docs/notebooks.md": "jupyter, colab, ipython",
    "docs/cluster.md": "redis, ray, processes, multiprocessing, slurm, kubernetes",
    "docs/view.md": "dashboard, web page, ui",
    "docs/metrics.md": "grafana, monitoring, tracing, opentelemetry",
    "docs/options.md": "parameters, arguments, settings, configuration",
    "docs/commands.md": "command line, cli, flags",
    "docs/images.md": "pictures, vision, multimodal",
    "docs/documents.md": "pdf, word, docx, html, attachments",
    "docs/options.md#row-output_schema": "json schema, structured output, pydantic, json mode",
    "docs/options.md#row-max_inflight": "concurrency, parallel requests, max concurrency",
    "docs/options.md#row-rpm": "rate limit, requests per minute",
    "docs/options.md#row-tpm": "rate limit, tokens per minute",
    "docs/options.md#row-doubt": "logprobs, log-probabilities, confidence",
    "docs/fleet.md": "multi gpu, several servers, load balancing, many gpus",
    "docs/fleet.md#a-standby-another-model-while-all-servers-are-down": "failover, fallback model, backup model",
    "docs/review.md": "human review, annotate, annotation, human in the loop, label by hand, audit",
    "deploy/README.md": "docker, kubernetes, helm, production",
    "docs/options.md#row-task": "prompt, user prompt",
    "docs/options.md#row-timeout_per_turn": "request timeout",
}


@dataclass(frozen=True)
class Entry:
    """Something that can be found. ``name``: of an option or an object, else empty; ``heading``: empty for a page."""

    page: str
    title: str
    anchor: str
    heading: str
    name: str
    text: str
    also: str = ""


def entries(page: str, text: str) -> Iterator[Entry]:
    """Yield the sections and the named rows of a Markdown page; the first entry is the page itself."""
    title, anchor, heading, fenced = "", "", "", False
    lines: list[str] = []
    rows: list[Entry] = []
    slugs: dict[str, int] = {}
    named: set[str] = set()
    every = [*COMMENT.sub("", text).splitlines(), "## "]
    for line, after in zip(every, [*every[1:], ""], strict=True):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced and (found := HEADING.match(line)) is not None:
            if title:
                also = SYNONYMS.get(f"{page}#{anchor}" if heading else page, "")
                yield Entry(page, title, anchor, heading, "", plain(" ".join(lines)), also)
                yield from rows
            lines, rows = [], []
            if title:
                heading = plain(found[2])
                anchor = unique(slug(heading), slugs)
            else:
                title = plain(found[2])
                unique(slug(title), slugs)
        elif not (fenced or after.startswith("| --- ")) and (row := ROW.match(line)) and row_id(row[1]) not in named:
            place = row_id(row[1])
            named.add(place)
            also = SYNONYMS.get(f"{page}#{place}", "")
            cells = filter(None, map(plain, row[2].split("|")))
            rows.append(Entry(page, title, place, heading, row[1], " · ".join(cells), also))
        else:
            lines.append(line)


def plain(text: str) -> str:
    words = LINK.sub(r"\1", text).replace("`", "").replace("**", "").replace("|", " ")
    return " ".join(word for word in words.split() if word.strip("-:"))


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def unique(anchor: str, seen: dict[str, int]) -> str:
    seen[anchor] = seen.get(anchor, -1) + 1
    return f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor


def row_id(name: str) -> str:
    return "row-" + (re.sub(r"\W+", "-", name).strip("-") or "x")


def with_row_ids(page: str) -> str:
    """Return a built page in which each row that begins with a name in code has an id."""
    given: set[str] = set()

    def named(row: re.Match[str]) -> str:
        place = row_id(html.unescape(re.sub(r"<[^>]+>", "", row[2])))
        if place in given:
            return row[0]
        given.add(place)
        return f'<tr id="{place}" class="{row[1]}"><td><p>{row[2]}</p>'

    return BUILT_ROW.sub(named, page)


def index(found: list[Entry]) -> str:
    """Return the program that gives the entries to the search; it also works without a server."""
    titles = {entry.page: entry.title for entry in found}
    pages = list(titles)
    rows = [
        [pages.index(each.page), each.anchor, each.heading, each.name, each.text, *([each.also] if each.also else [])]
        for each in found
    ]
    listed = [[page.removesuffix(".md") + ".html", title] for page, title in titles.items()]
    return f"Search.setIndex({json.dumps({'pages': listed, 'entries': rows}, ensure_ascii=False)});\n"
