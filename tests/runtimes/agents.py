"""Runtimes with stand-ins for their programs, and a context that asks a scripted server through a gateway."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.gateway.rows import gateway_to

from batch_agent.messages import Usage
from batch_agent.runtimes import ClaudeCodeRuntime, CodexRuntime, CommandLineRuntime, OpenCodeRuntime
from batch_agent.testing import Say, ScriptedServer

KINDS: Mapping[str, type[CommandLineRuntime]] = {
    "opencode": OpenCodeRuntime,
    "claude": ClaudeCodeRuntime,
    "codex": CodexRuntime,
}


def runtime(kind: str, folder: Path, **options: Any) -> CommandLineRuntime:
    program = folder / "bin" / kind
    program.parent.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("fake_agent.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return KINDS[kind](**{f"{kind}_bin": str(program), "timeout": 60.0, **options})


class Context:
    """As much of an AgentContext as a runtime uses."""

    model = "m"

    def __init__(self, prompt: str, workdir: Path, url: str, key: str, env: Mapping[str, str]) -> None:
        self.prompt, self.workdir, self.base_url, self.api_key, self.env = prompt, workdir, url, key, env
        self.saved: dict[str, bytes] = {}

    def add_usage(self, usage: Usage) -> None:
        self.usage = usage

    def save(self, name: str, content: str | bytes | Path) -> Path:
        data = content.read_bytes() if isinstance(content, Path) else content
        self.saved[name] = data.encode() if isinstance(data, str) else data
        return self.workdir / name


@asynccontextmanager
async def context(folder: Path, answer: str, prompt: str = "do it") -> AsyncIterator[Context]:
    """The model answers ``answer``, which the stand-in does."""
    workdir = folder / "row"
    workdir.mkdir()
    async with (
        ScriptedServer(lambda request: Say(answer), models=["m"]) as server,
        gateway_to(server.backend_url) as (gateway, key, _),
    ):
        yield Context(prompt, workdir, f"{gateway.url}/v1", key, gateway.env(key))


def repository(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    (source / "a.txt").write_text("one\n")
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "first")
    return source


def git(source: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=source, check=True, capture_output=True, text=True).stdout
