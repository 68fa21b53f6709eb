"""The rules of the source tree, each checked over all files at once. A failure lists every offender."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import batch_agent

ROOT = Path(batch_agent.__file__).parent
# A part imports only from those before it.
ORDER = [
    "version",
    "vllm_pin",
    "foreign",
    "value_type",
    "blocking",
    "guard",
    "children",
    "messages",
    "money",
    "errors",
    "job",
    "trust",
    "documents",
    "events",
    "option",
    "agreement",
    "spec",
    "documented",
    "compiler",
    "scheduler",
    "share",
    "outputs",
    "http",
    "door",
    "backends",
    "conformance",
    "runtimes",
    "files",
    "tools",
    "record",
    "observe",
    "results",
    "dispatch",
    "gateway",
    "fleet",
    "agent",
    "run",
    "topology",
    "swarm",
    "ticks",
    "view",
    "serve",
    "testing",
    "options",
    "api",
    "ray",
    "__init__",
    "cli",
    "__main__",
]
# Folders of the packages that have some. Those of cli/ are in the order of their imports.
FOLDERS = {
    "backends": ["anthropic", "batch", "bedrock", "engines", "http", "local", "openai", "schema", "simulated"],
    "cli": ["output", "spec", "commands"],
    "record": ["redis"],
    "swarm": ["patterns", "uq"],
    "testing": ["contract"],
    "tools": ["builtin", "mcp"],
}
PURE = ("compiler", "scheduler", "outputs", "trust")
# Parts, or files, that start tasks: each owns what it starts, and waits for its end.
START_TASKS = {
    "dispatch": "probes, load polls and hedges beside a request",
    "gateway": "signs of life to a client that waits",
    "runtimes": "the input and the output of a process, beside its end",
    "agent": "the requests and calls of a user's worker, which end with its row",
    "run": "the feeder, the workers and their leases, the agents and the tool calls of a run",
    "fleet": "probes of many servers at once, and the proxy",
    "swarm": "the requests of one call to many servers",
    "ticks": "thoughts that outlast their tick",
    "ray": "the calls that wait for actors, and the nodes that come and go",
    "view": "the index of a run, built while its page is shown",
    "serve": "batches, the lines that are granted, and what is written to a client that streams",
    "api.py": "run_sync inside a running loop",
    "backends/base.py": "many requests as one call, which awaits them",
    "backends/engines/engine.py": "many requests as one call, which awaits them",
    "testing/contract/backend.py": "requests that a test cancels, or holds",
    "testing/contract/wire.py": "the connections of a test server, which end with it",
    "conformance/serving.py": "requests at once, and one that is cancelled; each question awaits its own",
}
STARTERS = {"create_task", "ensure_future", "gather", "TaskGroup"}
# Class names that are there more than once, and why.
SAME_NAME = {
    "Agent": "the vocabulary of ticks, for users",
    "AnswerStream": "the same role in two wires",
    "Answered": "an event of a server's state; in conformance, what a server answered",
    "Cut": "the vocabulary of testing, for users",
    "Exchange": "the vocabulary of testing, for users",
    "Failed": "an event of a server's state; in a record, how a row ended",
    "Hang": "the vocabulary of testing, for users",
    "Reading": "an event of a server's state; in files, how a table is read",
    "Reduced": "the vocabulary of swarm, for users",
    "Say": "the vocabulary of testing, for users",
    "Request": "the vocabulary of testing, for users",
    "ToolUse": "the vocabulary of testing, for users",
}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 800, 70
MOST_HEADERS = 2  # blocks of comments that describe a part of a file as if it were a file
MOST_PACKED = 7  # assignments of three or more values with a call among them, each of which is a statement of its own


@cache
def sources() -> dict[str, list[ast.AST]]:
    """Every file of the package with the nodes of its syntax tree."""
    files = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): [*ast.walk(ast.parse(path.read_text()))] for path in files}


def part_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports_of(nodes: list[ast.AST]) -> Iterator[list[str]]:
    """The modules of this package that a file imports, as their parts below it."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "batch_agent":
            yield ["__init__"]
        elif isinstance(node, ast.ImportFrom):
            yield from _below(node.module or "")
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield from _below(name.name)


def _below(module: str) -> Iterator[list[str]]:
    package, *parts = module.split(".")
    if package == "batch_agent" and parts:
        yield parts


def none_of(offenders: list[str]) -> None:
    assert not offenders, "\n" + "\n".join(offenders)


def test_every_file_has_its_place_in_the_tree() -> None:
    unknown = []
    for file in sources():
        part, *below = file.split("/")
        known = part_of(file) in ORDER and (len(below) < 2 or below[0] in FOLDERS.get(part, ()))
        unknown += [] if known else [file]
    none_of(unknown)


def test_a_part_imports_only_from_those_above_it() -> None:
    wrong = [
        f"{file} imports {'.'.join(module)}"
        for file, nodes in sources().items()
        for module in imports_of(nodes)
        if ORDER.index(module[0]) > ORDER.index(part_of(file))
    ]
    none_of(wrong)


def test_what_the_command_line_prints_knows_no_spec_and_neither_knows_a_command() -> None:
    order = FOLDERS["cli"]
    wrong = [
        f"{file} imports {'.'.join(module)}"
        for file, nodes in sources().items()
        for module in imports_of(nodes)
        if file.startswith("cli/") and (folder := file.split("/")[1]) in order and module[0] == "cli"
        if len(module) > 1 and module[1] in order and order.index(module[1]) > order.index(folder)
    ]
    none_of(wrong)


def test_imports_are_absolute() -> None:
    relative = [
        file for file, nodes in sources().items() for node in nodes if isinstance(node, ast.ImportFrom) and node.level
    ]
    none_of(relative)


def test_only_the_parts_that_own_tasks_start_them() -> None:
    wrong = [
        f"{file}: {node.attr}"
        for file, nodes in sources().items()
        if part_of(file) not in START_TASKS and file not in START_TASKS
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in STARTERS
    ]
    none_of(wrong)


def test_the_parts_that_decide_neither_wait_nor_look_at_the_clock() -> None:
    wrong = []
    for file, nodes in sources().items():
        if part_of(file) in PURE:
            for node in nodes:
                names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                waits = isinstance(node, ast.AsyncFunctionDef | ast.Await)
                wrong += [file] if waits or {"asyncio", "time", "threading", "socket"} & set(names) else []
    none_of(wrong)


def test_a_file_and_a_function_are_short() -> None:
    long = [file for file in sources() if (ROOT / file).read_text().count("\n") > MOST_LINES]
    long += [
        f"{file}: {node.name}"
        for file, nodes in sources().items()
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    none_of(long)


def test_an_assignment_of_several_values_hides_no_calls() -> None:
    packed = [
        f"{file}:{node.lineno}"
        for file, nodes in sources().items()
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) >= 3
        if any(isinstance(part, ast.Call) for part in ast.walk(node.value))
        if any(isinstance(target, ast.Tuple) for target in node.targets)
    ]
    assert len(packed) <= MOST_PACKED, "\n" + "\n".join(packed)


def test_a_file_has_one_header() -> None:
    """A block of comment lines between empty lines describes another file: it belongs to a class or a function."""
    headers = [
        f"{file}: {found[1]}"
        for file in sources()
        for found in re.finditer(r"\n\n(# .+)\n#.*\n(?:#.*\n)*\n", (ROOT / file).read_text())
    ]
    assert len(headers) <= MOST_HEADERS, "\n" + "\n".join(headers)


def test_no_module_changes_a_global() -> None:
    none_of([file for file, nodes in sources().items() for node in nodes if isinstance(node, ast.Global)])


def test_no_class_name_is_there_twice_without_need() -> None:
    places = defaultdict(list)
    for file, nodes in sources().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    none_of([f"{name}: {', '.join(files)}" for name, files in twice.items() if name not in SAME_NAME])
    none_of([f"{name} is there once: take it off the list" for name in SAME_NAME if name not in twice])
