"""``python docs/tables.py``: writes the tables of backends, of options and of their flags into the pages.

The table of backends is made of the lines of ``batch_agent.backends.schemes`` and of the Capabilities of each backend,
which is opened for it and sends nothing; that of engines of the reports in docs/engines; that of features and shapes of
the markers of tests; the others of BatchSpec.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from batch_agent.backends.base import Capabilities
from batch_agent.backends.registry import open_backend
from batch_agent.backends.schemes import SCHEMES, Scheme
from batch_agent.cli.spec.arguments import flag_help, flag_name
from batch_agent.conformance.examination import CHECKS
from batch_agent.option import Flag, Unset, notes
from batch_agent.spec import OLD_NAMES, BatchSpec

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("backends", "cluster", "options", "commands")))
HEADER = ("`backend=`", "", "key from", "structured output", "with tools", "images", "load metrics", "options")


def able(scheme: Scheme) -> Capabilities:
    # A fleet has the capabilities of its servers.
    url: object = ["vllm://host"] if scheme.name == "fleet" else scheme.form.replace("host:port", "host:1")
    backend, _ = open_backend(url, model=None, api_key=None, environ={}, sends=False)
    return backend.capabilities


def table() -> Iterator[str]:
    yield "| " + " | ".join(HEADER) + " |"
    yield "| --- " * len(HEADER) + "|"
    for scheme in SCHEMES.values():
        can = able(scheme)
        schemas = ("yes" if can.schema_proven else "found out") if can.native_schema else ""
        flags = (can.schema_with_tools, can.images, can.reports_load)
        key = f"`{scheme.key}`" if scheme.key else ""
        options = ", ".join(f"`{name}`" for name in (*scheme.options, *scheme.texts))
        cells = (f"`{scheme.form}`", scheme.what, key, schemas, *("yes" if flag else "" for flag in flags), options)
        yield "| " + " | ".join(cells) + " |"


# The sections of docs/options.md, by their first option, and what is said below the heading.
SECTIONS = {
    "task": ("What to do", ""),
    "backend": ("Backend and model", ""),
    "max_inflight": ("Concurrency, retries and timeouts", ""),
    "prices": ("Cost, budgets and routing", "[cost.md](cost.md) has the details."),
    "run_dir": ("Record and resume", "[durable.md](durable.md) and [changed.md](changed.md) have the details."),
    "gold": ("Gold, pilots, reviews and promises", "[trust.md](trust.md) has the details."),
    "sinks": ("Events and metrics", ""),
    "max_tokens": ("The model call", ""),
    "no_hoist": ("The prompt", ""),
    "model_max_context": ("The context", "[contexts.md](contexts.md) has the details."),
}
WORDS: Mapping[object, str] = {None: "none", "": "none", (): "none", False: "off", True: "on"}


def options() -> Iterator[str]:
    older = {new: old for old, new in OLD_NAMES.items()}
    for name, field in BatchSpec.model_fields.items():
        if name in SECTIONS:
            title, below = SECTIONS[name]
            yield from ("", f"## {title}", "", *((below, "") if below else ()))
            yield from ("| option | default | meaning |", "| --- | --- | --- |")
        default = default_of(name)
        text = field.description or ""
        also = f" Older name: `{older[name]}`." if name in older and older[name] not in text else ""
        yield f"| `{name}` | {default} | {text}{also} |"


def default_of(name: str) -> str:
    field, unset = BatchSpec.model_fields[name], notes(BatchSpec, Unset)
    return "required" if field.is_required() else unset[name].words if name in unset else written(field.default)


def written(default: object) -> str:
    if isinstance(default, dict):
        return "none"
    if isinstance(default, int | float) and not isinstance(default, bool):
        return f"{default:g}"
    return WORDS.get(default, f'`"{default}"`')


def flags() -> Iterator[str]:
    yield from ("| flag | option |", "| --- | --- |")
    for name, flag in notes(BatchSpec, Flag).items():
        value = f" {flag.metavar}" if flag.metavar else ""
        text = flag_help(name).replace("|", "\\|")
        yield f"| `{flag_name(name)}{value}` | `{name}`: {text} |"


MARKS = {"works": "yes", "emulated": "emulated", "missing": "no", "unclear": "?", "not asked": ""}


def engines() -> Iterator[str]:
    """A column for each report of ``doctor --thorough`` in docs/engines."""
    reports = [json.loads(path.read_text()) for path in sorted((ROOT / "docs" / "engines").glob("*.json"))]
    heads = [f"{each['engine']}, {each['hardware']}, {each['model']}, {each['date']}" for each in reports]
    yield "| the server … | " + " | ".join(heads) + " |"
    yield "| --- " * (len(heads) + 1) + "|"
    found = [{answer["id"]: answer for answer in each["answers"]} for each in reports]
    for check in CHECKS:
        cells = [MARKS[each[check.id]["status"]] if check.id in each else "" for each in found]
        yield f"| {check.text} | " + " | ".join(cells) + " |"


SHAPES = ("local", "processes", "Redis", "Ray", "pipeline", "reduction", "worker=", "runtime")
FEATURES = (
    *("resume", "retry-failed", "retry-row", "force_resume", "budgets", "rate limits", "response cache"),
    *("streamed text in the page", "show with inputs of unfinished rows", "control", "events", "metrics", "traces"),
    *("view live", "report", "compare", "votes", "standby", "a change that is undone"),
)


def shapes() -> Iterator[str]:
    """Features and shapes of a run, from the markers ``covers`` of the tests."""
    tested: set[tuple[str, str]] = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.covers" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "covers":
                    feature, *where = (str(ast.literal_eval(each)) for each in node.args)
                    tested |= {(feature, shape) for shape in where}
    if unknown := {pair for pair in tested if pair[0] not in FEATURES or pair[1] not in SHAPES}:
        raise SystemExit(f"a test covers what the table does not have: {sorted(unknown)}")
    yield "| | " + " | ".join(SHAPES) + " |"
    yield "| --- " * (len(SHAPES) + 1) + "|"
    for feature in FEATURES:
        cells = ["yes" if (feature, shape) in tested else "" for shape in SHAPES]
        yield f"| {feature} | " + " | ".join(cells) + " |"


BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "backends": table,
    "engines": engines,
    "options": options,
    "flags": flags,
    "shapes": shapes,
}


def filled(page: str) -> str:
    """The page with each table between its marks; without marks, as it is."""
    for name, made in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in page:
            before, rest = page.split(begin)
            lines = "\n".join(made())
            page = f"{before}{begin}\n{lines}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
