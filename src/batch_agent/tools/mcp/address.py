"""Addresses of MCP servers: a command to start, or a URL. Parses addresses and ``mcpServers`` files; starts nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from batch_agent.errors import SpecError

if TYPE_CHECKING:
    from batch_agent.tools.base import Spawn
    from batch_agent.tools.mcp.connection import McpConnection

STDIO = "stdio:"
FORMS = '"stdio:COMMAND", a list of arguments, or "https://HOST/mcp"'
CONNECT_SECONDS = 60.0  # for a server to start and list its tools; npx may have to download it first
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_TYPES = (None, "stdio", "http", "streamable-http", "streamableHttp")


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server: ``command`` (over its standard input and output) or ``url`` (streamable HTTP).

    Equal servers share one session in a run. ``headers`` and ``environment`` may hold secrets and are never printed.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    directory: str | None = None
    connect_timeout: float = CONNECT_SECONDS

    @property
    def label(self) -> str:
        """The name of the server in messages: the start of its command, or its URL without query and password."""
        if self.url:
            address, _, _ = self.url.partition("?")
            scheme, _, rest = address.partition("://")
            return f"{scheme}://{rest.rpartition('@')[2]}"
        shown = shlex.join(self.command)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."

    def open(self, spawn: Spawn) -> McpConnection:
        """Open the session that the tools of the server share in a run."""
        from batch_agent.tools.mcp.connection import McpConnection

        return McpConnection(self, spawn)


def require_sdk(purpose: str) -> None:
    try:
        from mcp import Client  # noqa: F401
    except ImportError:
        raise SpecError(f"{purpose} needs the package mcp, 2.3 or later; install it with: pip install mcp") from None


def server_of(
    server: str | Sequence[str],
    *,
    headers: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    connect_timeout: float = CONNECT_SECONDS,
) -> McpServer:
    """Return the server of an address. Raises SpecError if it is invalid."""
    url = ""
    words = [*server] if not isinstance(server, str) else []
    if not isinstance(server, str):
        if not words or not all(isinstance(word, str) for word in words):
            raise SpecError(f"an MCP server as a list must be a command and its arguments, all text, not {server!r}")
    elif server.startswith(("http://", "https://")):
        url = server
    elif server.startswith(STDIO):
        try:
            words = shlex.split(server.removeprefix(STDIO))
        except ValueError as error:
            raise SpecError(f"{server!r} cannot be split into words: {error}") from None
        if not words:
            raise SpecError(f"{server!r} names no command: write stdio:COMMAND ARGUMENTS")
    else:
        raise SpecError(f"{server!r} is not an MCP server: give {FORMS}")
    if headers and not url:
        raise SpecError("headers are for MCP servers with a URL; a command takes env")
    if env and url:
        raise SpecError("env is for MCP servers that are a command; a URL takes headers")
    if type(connect_timeout) not in (int, float) or not 0 < connect_timeout < float("inf"):
        raise SpecError(f"connect_timeout is {connect_timeout!r}; it must be a number of seconds above 0")
    given = _pairs("headers", headers), _pairs("env", env)
    return McpServer(tuple(words), url, *given, None if cwd is None else os.fspath(cwd), connect_timeout)


def read_servers(path: Path, *, env: Mapping[str, str] | None = None) -> dict[str, McpServer]:
    """Return the servers of an ``mcpServers`` file by name, with ``${VARIABLE}`` from ``env``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}") from None
    servers = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise SpecError(f'{path} has no "mcpServers": {{"name": {{"command": ..., "args": [...]}}}}')
    found: dict[str, McpServer] = {}
    for name, entry in servers.items():
        if isinstance(entry, dict) and entry.get("disabled") is True:
            continue
        try:
            found[name] = _entry(entry, os.environ if env is None else env, path.parent)
        except SpecError as error:
            raise SpecError(f"{path}: server {name!r}: {error}") from None
    return found


def _entry(entry: object, variables: Mapping[str, str], directory: Path) -> McpServer:
    if not isinstance(entry, dict):
        raise SpecError("must be a mapping with command and args, or url")
    kind, url, command, arguments = (entry.get(key) for key in ("type", "url", "command", "args"))
    if kind not in _TYPES:
        raise SpecError(f"type {kind!r} is not supported; use stdio or http (streamable HTTP)")
    if (url is None) == (command is None):
        raise SpecError("needs either command or url")

    def fill(value: object) -> str:
        return expanded(value, variables)

    headers = {str(name): fill(value) for name, value in _mapping(entry, "headers").items()}
    environment = {str(name): fill(value) for name, value in _mapping(entry, "env").items()}
    if url is not None:
        return server_of(fill(url), headers=headers)
    if arguments is not None and not isinstance(arguments, list):
        raise SpecError("args must be a list")
    cwd = directory / fill(entry["cwd"]) if "cwd" in entry else None
    return server_of([fill(command), *map(fill, arguments or ())], env=environment, cwd=cwd)


def _mapping(entry: Mapping[str, object], key: str) -> Mapping[object, object]:
    value = entry.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SpecError(f"{key} must be a mapping of names to text")
    return value


def expanded(value: object, variables: Mapping[str, str]) -> str:
    """Return a text with ``${VARIABLE}`` and ``${VARIABLE:-default}`` replaced. Raises SpecError if one is not set."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SpecError(f"{value!r} must be text")

    def fill(match: re.Match[str]) -> str:
        found = variables.get(match[1], match[2])
        if found is None:
            raise SpecError(f"the environment variable {match[1]} is not set")
        return found

    return _VARIABLE.sub(fill, str(value))


def _pairs(option: str, values: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    if values is None:
        return ()
    if not isinstance(values, Mapping):
        raise SpecError(f"{option} must be a mapping of names to text")
    for name, value in values.items():
        if {type(name), type(value)} != {str}:
            raise SpecError(f"{option}: {name!r} must be text")
    return tuple(values.items())
