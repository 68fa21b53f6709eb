"""Claude Code (``claude -p``) as a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from batch_agent.runtimes.base import LOGIN, CommandLineRuntime, Permissions, Place
from batch_agent.runtimes.events import ReadEvent, read_claude

LOOKS = "Read,Grep,Glob,LS,TodoWrite"
CHANGES = f"{LOOKS},Edit,MultiEdit,Write,NotebookEdit"
PERMISSIONS: dict[Permissions, Sequence[str]] = {
    "read": ("--tools", LOOKS, "--allowedTools", LOOKS),
    "write": ("--tools", CHANGES, "--allowedTools", CHANGES, "--permission-mode", "acceptEdits"),
    "full": ("--dangerously-skip-permissions",),
}
MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")),
)
PATIENCE_MS = str(24 * 3600 * 1000)  # so that the client waits while a server is down


@dataclass(frozen=True)
class ClaudeCodeRuntime(CommandLineRuntime):
    claude_bin: str = "claude"

    name: ClassVar[str] = "Claude Code"
    package: ClassVar[str] = "@anthropic-ai/claude-code"
    memory_mib: ClassVar[int] = 350
    provider_keys: ClassVar[Sequence[str]] = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    read_event: ClassVar[ReadEvent] = staticmethod(read_claude)

    @property
    def binary(self) -> str:
        return self.claude_bin

    def command(self, program: str, place: Place) -> Sequence[str]:
        form = ("--output-format", "stream-json", "--verbose", "--no-session-persistence")
        model = ("--model", place.model) if place.model else ()
        return [program, "-p", *form, *model, *PERMISSIONS[self.permissions], *self.extra_args]

    def login(self) -> Mapping[str, str] | None:
        if token := os.environ.get("CLAUDE_CODE_OAUTH_TOKEN"):
            return {"CLAUDE_CODE_OAUTH_TOKEN": token}
        folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
        return {"CLAUDE_CONFIG_DIR": str(folder)} if (folder / ".credentials.json").exists() else None

    def prepare(self, place: Place) -> Mapping[str, str]:
        models = dict.fromkeys(MODELS, place.model) if place.model else {}
        server = {
            "ANTHROPIC_BASE_URL": place.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": place.key,
            "ANTHROPIC_AUTH_TOKEN": "",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
        return {
            **({} if self.backend == LOGIN else {**server, **models}),
            "API_TIMEOUT_MS": PATIENCE_MS,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
            **((self.login() or {}) if self.backend == LOGIN else {}),
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            **({"IS_SANDBOX": "1"} if hasattr(os, "getuid") and os.getuid() == 0 else {}),
        }
