"""OpenCode (``opencode run``) as a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import orjson

from batch_agent.messages import JsonObject
from batch_agent.runtimes.base import LOGIN, CommandLineRuntime, Permissions, Place
from batch_agent.runtimes.events import ReadEvent, read_opencode

OFFLINE = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "SHARE", "DEFAULT_PLUGINS", "CLAUDE_CODE", "EXTERNAL_SKILLS")
PERMISSIONS: dict[Permissions, JsonObject] = {
    "read": {"edit": "deny", "bash": "deny", "webfetch": "deny", "external_directory": "deny"},
    "write": {"edit": "allow", "bash": "deny", "webfetch": "deny", "external_directory": "deny"},
    "full": {"edit": "allow", "bash": "allow", "webfetch": "allow", "external_directory": "allow"},
}
CONTEXT, OUTPUT = 128_000, 32_000  # tokens that it may assume


@dataclass(frozen=True)
class OpenCodeRuntime(CommandLineRuntime):
    opencode_bin: str = "opencode"

    name: ClassVar[str] = "OpenCode"
    package: ClassVar[str] = "opencode-ai"
    memory_mib: ClassVar[int] = 600
    read_event: ClassVar[ReadEvent] = staticmethod(read_opencode)

    @property
    def binary(self) -> str:
        return self.opencode_bin

    def command(self, program: str, place: Place) -> Sequence[str]:
        """Return the command line, with a title: otherwise it would ask the model for one."""
        name = place.model if self.backend == LOGIN else f"batch/{place.model}"
        model = ("--model", name) if name else ()
        return [program, "run", *model, "--format", "json", "--title", "batch", *self.extra_args]

    def login(self) -> Mapping[str, str] | None:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        return {"XDG_DATA_HOME": str(folder)} if (folder / "opencode" / "auth.json").exists() else None

    def prepare(self, place: Place) -> Mapping[str, str]:
        if self.backend == LOGIN:
            config: JsonObject = {"permission": PERMISSIONS[self.permissions], "share": "disabled", "autoupdate": False}
            offline = {f"OPENCODE_DISABLE_{name}": "1" for name in OFFLINE if name != "MODELS_FETCH"}
            return {"OPENCODE_CONFIG_CONTENT": orjson.dumps(config).decode(), **offline, **(self.login() or {})}
        limit: JsonObject = {"context": CONTEXT, "output": OUTPUT}
        provider: JsonObject = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "batch",
            "options": {"baseURL": place.url, "apiKey": place.key},
            "models": {place.model: {"name": place.model, "limit": limit}},
        }
        config = {
            "provider": {"batch": provider},
            "permission": PERMISSIONS[self.permissions],
            "small_model": f"batch/{place.model}",
            "share": "disabled",
            "autoupdate": False,
        }
        offline = {f"OPENCODE_DISABLE_{name}": "1" for name in OFFLINE}
        return {"OPENCODE_CONFIG_CONTENT": orjson.dumps(config).decode(), **offline}
