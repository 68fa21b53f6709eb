"""The documentation is true: its code runs, its links lead somewhere, nothing that users can say is left out.

A page's blocks are run in order, in a directory of their own that has the examples, against a server that says the
least a well-behaved model could say. A block that begins with ``# name.ext`` is that file. One that cannot run here
says why in a comment before it: ``<!-- not run: needs a GPU -->``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from batch_agent.backends.local import weights
from batch_agent.cli.main import COMMANDS, add_arguments
from batch_agent.errors import SpecError
from batch_agent.testing import ScriptedServer

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
JOBS = sorted((ROOT / "docs" / "jobs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "design").glob("*.md"))]
EXAMPLES = [path.read_text() for path in (ROOT / "examples").glob("*.py")]  # test_examples.py runs them
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
FILE_NAME = re.compile(r"# (\w[\w/-]*\.\w+)\n")
RUN_PYTHON = """
import ast, asyncio, inspect, pathlib, sys
path = sys.argv.pop(1)
code = compile(pathlib.Path(path).read_text(), path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
value = eval(code, {"__name__": "__main__"})
if inspect.iscoroutine(value):
    asyncio.run(value)
"""


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
    tokens = MarkdownIt().parse(page.read_text())
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "fence" and token.map is not None:
            marked = before is not None and before.type == "html_block" and NOT_RUN.search(before.content)
            yield Block(token.map[0] + 1, token.info, token.content, not marked)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


async def run(command: list[str], place: Path, **variables: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=place,
        env=os.environ | {"PATH": path} | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, f"{command[-1]}\n{out.decode()}"


async def run_block(block: Block, place: Path, **variables: str) -> None:
    if block.file is not None:
        (place / block.file).write_text(block.text.partition("\n")[2])
    elif block.language == "python":
        program = place / "block.py"
        program.write_text(block.text)
        await run([sys.executable, "-c", RUN_PYTHON, str(program)], place, **variables)
    elif block.language == "sh":
        await run(["bash", "-euo", "pipefail", "-c", block.text], place, **variables)


@pytest.mark.parametrize("page", GUIDES, ids=named)
async def test_the_code_of_a_page_runs(page: Path, workplace: Path) -> None:
    async with ScriptedServer(models=["tiny"]) as server:
        for block in blocks_of(page):
            if block.runs and block.text not in EXAMPLES:
                place = {"BATCH_AGENT_BACKEND": server.backend_url, "BATCH_AGENT_CACHE": str(workplace / "cache")}
                await run_block(block, workplace, **place)


@pytest.mark.real
async def test_the_readmes_first_program_runs_as_it_stands_on_the_embedded_model(workplace: Path) -> None:
    pytest.importorskip("openvino_genai", reason="the embedded engine is not installed: pip install openvino-genai")
    try:
        weights.fetch()
    except SpecError as error:
        pytest.skip(f"no weights: {error}")
    program = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    await run_block(program, workplace, BATCH_AGENT_BACKEND="")


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in ("python", "sh", "console", "yaml", "jsonl", "text"), f"line {block.line}"
        assert block.language != "console" or not block.runs, f"line {block.line}: what was typed and seen does not run"
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), f"line {block.line}"


def links_of(page: Path) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for child in token.children or ():
            if child.type == "link_open":
                yield str(child.attrGet("href"))


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for link in links_of(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", JOBS, ids=named)
def test_the_page_of_a_job_shows_its_example_and_the_readme_names_it(page: Path) -> None:
    program = (ROOT / "examples" / f"{page.stem}.py").read_text()
    assert program in [block.text for block in blocks_of(page)]
    assert 15 <= program.count("\n") <= 40
    assert named(page) in links_of(ROOT / "README.md")


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                yield from flags_of(nested)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_argument_is_in_the_reference(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(name, parser)
    reference = (ROOT / "docs" / "commands.md").read_text()
    assert re.search(rf"^## .*`batch-agent {name}\b", reference, re.MULTILINE)
    documented = set(re.findall(r"`[^`]*`", reference))
    words = {word.rstrip(",]") for code in documented for word in re.split(r"[ =\[`]", code)}
    missing = set(flags_of(parser)) - words - {"-h", "--help"}
    assert not missing, f"docs/commands.md does not mention {sorted(missing)} of batch-agent {name}"
