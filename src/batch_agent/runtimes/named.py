"""The command-line agents, as classes and by name, for spec files and the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import orjson

from batch_agent.backends.address import check_known
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.runtimes.base import (
    LOGIN,
    CommandLineRuntime,
    Permissions,
    Place,
    ReadEvent,
    read_claude,
    read_codex,
    read_opencode,
)

OFFLINE = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "SHARE", "DEFAULT_PLUGINS", "CLAUDE_CODE", "EXTERNAL_SKILLS")
OPENCODE_PERMISSIONS: dict[Permissions, JsonObject] = {
    "read": {"edit": "deny", "bash": "deny", "webfetch": "deny", "external_directory": "deny"},
    "write": {"edit": "allow", "bash": "deny", "webfetch": "deny", "external_directory": "deny"},
    "full": {"edit": "allow", "bash": "allow", "webfetch": "allow", "external_directory": "allow"},
}
CONTEXT, OUTPUT = 128_000, 32_000  # tokens that OpenCode may assume

CODEX_SANDBOXES: dict[Permissions, Sequence[str]] = {
    "read": ("--sandbox", "read-only"),
    "write": ("--sandbox", "workspace-write"),
    "full": ("--dangerously-bypass-approvals-and-sandbox",),
}
CODEX_KEY = "BATCH_AGENT_ROW_KEY"
PATIENCE_MS = 24 * 3600 * 1000  # so that it waits while a server is down; comments are no events

LOOKS = "Read,Grep,Glob,LS,TodoWrite"
CHANGES = f"{LOOKS},Edit,MultiEdit,Write,NotebookEdit"
CLAUDE_PERMISSIONS: dict[Permissions, Sequence[str]] = {
    "read": ("--tools", LOOKS, "--allowedTools", LOOKS),
    "write": ("--tools", CHANGES, "--allowedTools", CHANGES, "--permission-mode", "acceptEdits"),
    "full": ("--dangerously-skip-permissions",),
}
CLAUDE_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")),
)


@dataclass(frozen=True)
class OpenCodeRuntime(CommandLineRuntime):
    """OpenCode (``opencode run``) as a worker."""

    opencode_bin: str = "opencode"

    name: ClassVar[str] = "OpenCode"
    package: ClassVar[str] = "opencode-ai"
    memory_mib: ClassVar[int] = 600
    read_event: ClassVar[ReadEvent] = staticmethod(read_opencode)

    @property
    def binary(self) -> str:
        return self.opencode_bin

    def command(self, program: str, place: Place) -> Sequence[str]:
        """Return the command line. It has a title, because without one OpenCode would ask the model for a title."""
        name = place.model if self.backend == LOGIN else f"batch/{place.model}"
        model = ("--model", name) if name else ()
        return [program, "run", *model, "--format", "json", "--title", "batch", *self.extra_args]

    def login(self) -> Mapping[str, str] | None:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        return {"XDG_DATA_HOME": str(folder)} if (folder / "opencode" / "auth.json").exists() else None

    def prepare(self, place: Place) -> Mapping[str, str]:
        config: JsonObject = {
            "permission": OPENCODE_PERMISSIONS[self.permissions],
            "share": "disabled",
            "autoupdate": False,
        }
        offline = {f"OPENCODE_DISABLE_{name}": "1" for name in OFFLINE}
        login: Mapping[str, str] = {}
        if self.backend == LOGIN:
            del offline["OPENCODE_DISABLE_MODELS_FETCH"]
            login = self.login() or {}
        else:
            limit: JsonObject = {"context": CONTEXT, "output": OUTPUT}
            provider: JsonObject = {
                "npm": "@ai-sdk/openai-compatible",
                "name": "batch",
                "options": {"baseURL": place.url, "apiKey": place.key},
                "models": {place.model: {"name": place.model, "limit": limit}},
            }
            config |= {"provider": {"batch": provider}, "small_model": f"batch/{place.model}"}
        return {"OPENCODE_CONFIG_CONTENT": orjson.dumps(config).decode(), **offline, **login}


@dataclass(frozen=True)
class CodexRuntime(CommandLineRuntime):
    """Codex (``codex exec``) as a worker."""

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
        return [*fixed, *CODEX_SANDBOXES[self.permissions], *login, *self.extra_args, "-"]

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
env_key = "{CODEX_KEY}"
request_max_retries = 2
stream_max_retries = 2
stream_idle_timeout_ms = {PATIENCE_MS}

[analytics]
enabled = false
"""
        )
        return {"CODEX_HOME": str(home), CODEX_KEY: place.key}


@dataclass(frozen=True)
class ClaudeCodeRuntime(CommandLineRuntime):
    """Claude Code (``claude -p``) as a worker."""

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
        return [program, "-p", *form, *model, *CLAUDE_PERMISSIONS[self.permissions], *self.extra_args]

    def login(self) -> Mapping[str, str] | None:
        if token := os.environ.get("CLAUDE_CODE_OAUTH_TOKEN"):
            return {"CLAUDE_CODE_OAUTH_TOKEN": token}
        folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
        return {"CLAUDE_CONFIG_DIR": str(folder)} if (folder / ".credentials.json").exists() else None

    def prepare(self, place: Place) -> Mapping[str, str]:
        models = dict.fromkeys(CLAUDE_MODELS, place.model) if place.model else {}
        server = {
            "ANTHROPIC_BASE_URL": place.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": place.key,
            "ANTHROPIC_AUTH_TOKEN": "",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
        return {
            **({} if self.backend == LOGIN else {**server, **models}),
            "API_TIMEOUT_MS": str(PATIENCE_MS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
            **((self.login() or {}) if self.backend == LOGIN else {}),
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            **({"IS_SANDBOX": "1"} if hasattr(os, "getuid") and os.getuid() == 0 else {}),
        }


RUNTIMES: Mapping[str, type[CommandLineRuntime]] = {
    "opencode": OpenCodeRuntime,
    "claude-code": ClaudeCodeRuntime,
    "codex": CodexRuntime,
}


def runtime_of(given: object) -> CommandLineRuntime | None:
    """Return the runtime given as an object, by name, or by a mapping with its name and options. None for anything
    else. Raises SpecError for an unknown name or option."""
    if isinstance(given, CommandLineRuntime):
        return given
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        return None
    options = dict(given)
    name = options.pop("name", None)
    kind = RUNTIMES.get(str(name).replace("_", "-"))
    if kind is None:
        raise SpecError(f"runtime: {name!r} is none of {', '.join(RUNTIMES)}")
    known = [field.name for field in fields(kind) if field.init]
    check_known(map(str, options), known, f"runtime: {name} has no option")
    return kind(**options)
