"""Tools of an MCP server. The server lists them once, when the tools are made.

The requests of a run contain the tools, so they must be known before the run starts and must not change. They are
sorted by name: many servers list them in random order, but the order is part of each request and compared by resume.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from batch_agent.blocking import THREADS
from batch_agent.compiler.schema import no_retrieval
from batch_agent.errors import BadArguments, SpecError, ToolError
from batch_agent.messages import Content, JsonObject, ToolSpec
from batch_agent.tools.base import Tool
from batch_agent.tools.mcp.address import McpServer, read_servers, require_sdk
from batch_agent.tools.schema import Arguments, Signature

if TYPE_CHECKING:
    from jsonschema_rs import Validator
    from mcp.types import Tool as ToolOffer

    from batch_agent.tools.mcp.connection import McpConnection


SERVER_NAME = "{server}"  # placeholder in a prefix
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64  # that the common wire formats accept

PROBLEMS_SHOWN = 8


def mcp_tools(
    server: McpServer, only: Collection[str] | None, prefix: str, reads: Collection[str], timeout: float | None
) -> list[Tool]:
    """Return the tools of a server, which is started or connected to for the list. Raises SpecError."""
    offers = _listed(server)
    names = [offer.name for offer in offers]
    _check_names("only", only or (), names, server)
    _check_names("reads", reads, names, server)
    if only is not None:
        offers = [offer for offer in offers if offer.name in only]
    tools = [_tool(server, offer, prefix, offer.name in reads, timeout) for offer in offers]
    return sorted(tools, key=lambda tool: tool.name)


def mcp_file_tools(
    path: Path, servers: Collection[str] | None, prefix: str, reads: Collection[str], timeout: float | None
) -> list[Tool]:
    """Return the tools of all servers, or of the given ones, of an ``mcpServers`` file."""
    known = read_servers(path)
    for name in servers or ():
        if name not in known:
            raise SpecError(f"{path} has no server {name!r}; it has {', '.join(known) or 'none'}")
    tools: dict[str, tuple[str, Tool]] = {}
    unseen = set(reads)
    for name, server in known.items():
        if servers is not None and name not in servers:
            continue
        offers = _listed(server)
        here = {offer.name for offer in offers} & set(reads)
        unseen -= here
        own_prefix = prefix.replace(SERVER_NAME, _NOT_IN_NAMES.sub("_", name))
        for offer in offers:
            tool = _tool(server, offer, own_prefix, offer.name in here, timeout)
            if tool.name in tools:
                raise SpecError(
                    f"{path}: {tools[tool.name][0]} and {name} both have a tool {tool.name!r}; "
                    f'give prefix="{SERVER_NAME}_", or choose the servers to use, servers=[...]'
                )
            tools[tool.name] = (name, tool)
    if unseen:
        raise SpecError(f"reads: no server of {path} has a tool {sorted(unseen)[0]!r}")
    return [tools[name][1] for name in sorted(tools)]


def _check_names(option: str, given: Collection[str], names: Sequence[str], server: McpServer) -> None:
    if isinstance(given, str):
        raise SpecError(f"{option} is the text {given!r}: give a list, [{given!r}]")
    for name in given:
        if name not in names:
            listed = ", ".join(sorted(names)) or "none"
            raise SpecError(f"{option}: the MCP server {server.label} has no tool {name!r}; it has {listed}")


def _tool(server: McpServer, offer: ToolOffer, prefix: str, reads: bool, timeout: float | None) -> Tool:
    name = _NOT_IN_NAMES.sub("_", f"{prefix}{offer.name}")
    if not 0 < len(name) <= _LONGEST_NAME:
        raise SpecError(
            f"the MCP server {server.label} has a tool {name!r}, but a name must have 1 to {_LONGEST_NAME} "
            "characters: omit it with only=[...], or give a shorter prefix"
        )
    try:
        signature = SchemaSignature.of(cast("JsonObject", dict(offer.input_schema)))
    except SpecError as error:
        raise SpecError(
            f"the MCP server {server.label} has a tool {offer.name!r} that cannot be offered: {error}; "
            "omit it with only=[...]"
        ) from None
    hints = offer.annotations
    only_reads = reads or (hints is not None and hints.read_only_hint is True)
    return Tool(
        spec=ToolSpec(name, offer.description or offer.title or "", signature.json_schema),
        function=_function(server, offer.name, only_reads),
        signature=signature,
        name=name,
        is_async=True,
        cacheable=only_reads,
        effect="read" if only_reads else "write",
        declared=True,
        timeout=timeout,
        resource=server,
    )


def _function(server: McpServer, name: str, reads: bool) -> Callable[..., Awaitable[Content]]:
    async def call(
        session: McpConnection | None = None, alive: Callable[[], None] = lambda: None, /, **given: Any
    ) -> Content:
        from batch_agent.tools.mcp.connection import Stderr, content_of, open_client

        if session is not None:
            return content_of(name, await session.call(name, given, reads=reads, alive=alive))
        async with open_client(server, Stderr()) as client:  # a call outside a run has its own session
            return content_of(name, await client.call_tool(name, given))

    call.__name__ = name
    return call


def _listed(server: McpServer) -> list[ToolOffer]:
    require_sdk("a tool of an MCP server")
    from batch_agent.tools.mcp.connection import Stderr, offers_of, open_client, reason_of

    async def listed() -> list[ToolOffer]:
        async with open_client(server, Stderr()) as client, asyncio.timeout(server.connect_timeout):
            return await offers_of(client)

    # In a thread with its own loop: tools are made in synchronous code, possibly inside a running loop.
    try:
        return THREADS.submit(lambda: asyncio.run(listed())).result()
    except ToolError as error:
        raise SpecError(str(error)) from None
    except TimeoutError:
        raise SpecError(f"the MCP server {server.label} does not list its tools") from None
    except Exception as error:  # noqa: BLE001
        raise SpecError(f"the MCP server {server.label} does not list its tools: {reason_of(error)}") from None


@dataclass(frozen=True, slots=True)
class SchemaSignature(Signature):
    """The arguments that a JSON schema allows. They are passed to the tool unchanged."""

    validator: Validator | None = field(default=None, repr=False)

    @classmethod
    def of(cls, schema: JsonObject) -> SchemaSignature:
        """Return the signature of a JSON schema. Raises SpecError if it is not the schema of an object."""
        if schema.get("type", "object") != "object":
            raise SpecError(f"its arguments must be an object, but its schema has the type {schema.get('type')!r}")
        shown: JsonObject = {key: value for key, value in schema.items() if key != "$schema"}
        shown = {"type": "object", "properties": {}, **shown}
        import jsonschema_rs  # here, because few runs have such a tool

        try:
            validator = jsonschema_rs.validator_for({**schema}, retriever=no_retrieval)
        except ValueError as error:
            raise SpecError(f"its schema cannot be used: {str(error).splitlines()[0]}") from None
        return cls({}, True, False, shown, validator=validator)

    def parse(self, text: str) -> Arguments:
        raw = self._read(text)
        problems = []
        for error in self.validator.iter_errors(raw) if self.validator is not None else ():
            where = ".".join(map(str, error.instance_path))
            problems.append(f"{where}: {error.message}" if where else error.message)
            if len(problems) == PROBLEMS_SHOWN:
                break
        if problems:
            raise BadArguments(self._explain("the arguments do not fit", problems))
        return Arguments(raw, raw)

    def identity(self, arguments: Arguments) -> str:
        return json.dumps(arguments.raw, sort_keys=True)

    def _expected(self) -> str:
        return json.dumps(self.json_schema)[:2000]
