"""Codex (``codex exec``) as a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import orjson

from batch_agent.runtimes.base import LOGIN, CommandLineRuntime, Permissions, Place
from batch_agent.runtimes.events import ReadEvent, read_codex

SANDBOXES: dict[Permissions, Sequence[str]] = {
    "read": ("--sandbox", "read-only"),
    "write": ("--sandbox", "workspace-write"),
    "full": ("--dangerously-bypass-approvals-and-sandbox",),
}
KEY = "BATCH_AGENT_ROW_KEY"
PATIENCE_MS = 24 * 3600 * 1000  # so that the client waits while a server is down; comments do not count as events


@dataclass(frozen=True)
class CodexRuntime(CommandLineRuntime):
    codex_bin: str = "codex"

    name: ClassVar[str] = "Codex"
    package: ClassVar[str] = "@openai/codex"
    memory_mib: ClassVar[int] = 200
    read_event: ClassVar[ReadEvent] = staticmethod(read_codex)

    @property
    def binary(self) -> str:
        return self.codex_bin

    def command(self, program: str, place: Place) -> Sequence[str]:
        """Return the command line; its last argument makes it read the prompt from standard input."""
        own = ("-c", 'approval_policy="never"', *(("--model", place.model) if place.model else ()))
        login = own if self.backend == LOGIN else ()
        fixed = (program, "exec", "--json", "--skip-git-repo-check")
        return [*fixed, *SANDBOXES[self.permissions], *login, *self.extra_args, "-"]

    def login(self) -> Mapping[str, str] | None:
        folder = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
        return {"CODEX_HOME": str(folder)} if (folder / "auth.json").exists() else None

    def prepare(self, place: Place) -> Mapping[str, str]:
        if self.backend == LOGIN:
            return self.login() or {}
        home = place.home / ".codex"
        home.mkdir(exist_ok=True)
        quoted = [orjson.dumps(text).decode() for text in (place.model, place.url)]
        (home / "config.toml").write_text(
            f"""model = {quoted[0]}
model_provider = "batch"
approval_policy = "never"
check_for_update_on_startup = false

[features]
multi_agent = false

[model_providers.batch]
name = "batch"
base_url = {quoted[1]}
wire_api = "responses"
env_key = "{KEY}"
request_max_retries = 2
stream_max_retries = 2
stream_idle_timeout_ms = {PATIENCE_MS}

[analytics]
enabled = false
"""
        )
        return {"CODEX_HOME": str(home), KEY: place.key}
