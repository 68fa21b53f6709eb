"""The documentation is true: its code runs, its links lead somewhere, nothing that users can say is left out.

A page's blocks are run in order, in a directory of their own that has the examples, against a server that says the
least a well-behaved model could say; ``make test-docs`` runs them with what a newcomer has, the embedded model. A block
that begins with ``# name.ext`` is that file. One that cannot run says why in a comment before it:
``<!-- not run: needs a GPU -->``. One that needs packages of an extra names them: ``<!-- needs: jinja2 -->``.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, chdir
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from tests.cli.commandline import batch_agent, own_modules
from tests.warm import interpreter

from batch_agent.cli.main import COMMANDS, add_arguments
from batch_agent.testing import ScriptedServer

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
JOBS = sorted((ROOT / "docs" / "jobs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "design").glob("*.md"))]
EXAMPLES = [path.read_text() for path in (ROOT / "examples").glob("*.py")]  # test_examples.py runs them
AS_A_NEWCOMER = os.environ.get("BATCH_AGENT_TEST_DOCS") == "1"
SOME_FAILED = 2  # exit status of a run with failed rows
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
NEEDS = re.compile(r"<!-- needs: (\w.*) -->")
FILE_NAME = re.compile(r"# (\w[\w/-]*\.\w+)\n")


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    language: str
    text: str
    runs: bool

    @property
    def file(self) -> str | None:
        name = FILE_NAME.match(self.text)
        return name[1] if name else None


def blocks_of(page: Path) -> Iterator[Block]:
    tokens = MarkdownIt().disable("inline").parse(page.read_text())  # paragraphs take most of the time
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "fence" and token.map is not None:
            note = before.content if before is not None and before.type == "html_block" else ""
            lacking = [name for name in (NEEDS.findall(note) or [""])[0].split() if find_spec(name) is None]
            yield Block(token.map[0] + 1, token.info, token.content, not lacking and not NOT_RUN.search(note))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that the tests run: test_examples.py has the examples."""
    blocks = [block for block in blocks_of(page) if block.runs and block.text not in EXAMPLES]
    return blocks if any(block.language in ("python", "sh") and block.file is None for block in blocks) else []


async def run_block(block: Block, place: Path) -> None:
    if block.file is not None:
        (place / block.file).write_text(block.text.partition("\n")[2])
    elif block.language == "python":
        await asyncio.to_thread(run_python, block, place)
    elif block.language == "sh" and (commands := commands_of(block.text)):
        for arguments in commands:
            outcome = await batch_agent(place, *arguments)
            good = (0, SOME_FAILED) if AS_A_NEWCOMER else (0,)  # the embedded model is small
            assert outcome.code in good, f"{arguments}\n{outcome.stderr}"
    elif block.language == "sh":
        await run_shell(block.text, place)


def run_python(block: Block, place: Path) -> None:
    """The block as a program."""
    code = compile(block.text, f"line {block.line}", "exec", dont_inherit=True)
    with own_modules(place), chdir(place):
        sys.path.insert(0, str(place))
        exec(code, {"__name__": "__main__"})


def commands_of(text: str) -> list[list[str]]:
    """The commands of a block that is nothing but calls of ``batch-agent``; none where it needs a shell."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    commands = [words for words in lines if words]
    plain = all(words[0] == "batch-agent" and not {"|", ">", "<", "&&", "&"} & set(words) for words in commands)
    return [words[1:] for words in commands] if plain and "$" not in text else []


async def run_shell(line: str, place: Path) -> None:
    places = [Path(interpreter()).parent, Path(sys.executable).parent, os.environ["PATH"]]
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", line),
        cwd=place,
        env=os.environ | {"PATH": os.pathsep.join(map(str, places))},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, f"{line}\n{out.decode()}"


@pytest.mark.parametrize("page", [page for page in GUIDES if runnable(page)], ids=named)
async def test_the_code_of_a_page_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_AGENT_BACKEND", "")
    async with AsyncExitStack() as stack:
        if not AS_A_NEWCOMER:
            server = await stack.enter_async_context(ScriptedServer(models=["tiny"]))
            monkeypatch.setenv("BATCH_AGENT_BACKEND", server.backend_url)
            monkeypatch.setenv("BATCH_AGENT_CACHE", str(workplace / "cache"))
        for block in runnable(page):
            await run_block(block, workplace)


def test_every_block_says_what_it_is() -> None:
    for page in GUIDES:
        for block in blocks_of(page):
            where = f"{named(page)} line {block.line}"
            assert block.language in ("python", "sh", "console", "yaml", "jsonl", "text"), where
            assert block.language != "console" or not block.runs, f"{where}: what was typed and seen does not run"
            if block.language == "python" and page.name != "coming-from.md":  # which shows how others are called
                compile(block.text, where, "exec", dont_inherit=True)  # as a file: await is only in functions
            if block.language == "yaml":
                assert isinstance(yaml.safe_load(block.text), dict), where


def links_of(page: Path) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for child in token.children or ():
            if child.type == "link_open":
                yield str(child.attrGet("href"))


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (bool(anchor) and anchor not in anchors_of(target))


def test_every_link_within_the_repository_leads_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in links_of(page) if "://" not in link]
    assert [f"{named(page)}: {link}" for page, link in links if leads_nowhere(page, link)] == []


def test_the_page_of_a_job_shows_its_example_and_the_readme_names_it() -> None:
    linked = set(links_of(ROOT / "README.md"))
    for page in JOBS:
        program = (ROOT / "examples" / f"{page.stem}.py").read_text()
        assert program in [block.text for block in blocks_of(page)]
        assert 15 <= program.count("\n") <= 40
        assert named(page) in linked


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                yield from flags_of(nested)


def test_every_command_and_every_argument_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "commands.md").read_text()
    documented = set(re.findall(r"`[^`]*`", reference))
    words = {word.rstrip(",]") for code in documented for word in re.split(r"[ =\[`]", code)}
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        add_arguments(name, parser)
        assert re.search(rf"^## .*`batch-agent {name}\b", reference, re.MULTILINE)
        missing = set(flags_of(parser)) - words - {"-h", "--help"}
        assert not missing, f"docs/commands.md does not mention {sorted(missing)} of batch-agent {name}"


def test_the_tables_of_the_pages_are_those_that_docs_tables_writes() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    stale = [page.name for page in tables["PAGES"] if tables["filled"](page.read_text()) != page.read_text()]
    assert stale == [], "run python docs/tables.py"
