"""MCP servers for tests, made with the official SDK: ``python servers.py stdio|http [PORT_FILE]``.

What a server should remember across its deaths is in the directory NOTES names: one line per call that ran.
"""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import BaseModel

NOTES = Path(os.environ.get("NOTES", "/dev/null"))
READS = ToolAnnotations(read_only_hint=True)
server = MCPServer("testing")


def note(text: str) -> int:
    """Writes a line and returns how many of its kind there are now."""
    with NOTES.open("a") as file:
        file.write(f"{text}\n")
    return NOTES.read_text().splitlines().count(text)


class Weather(BaseModel):
    city: str
    degrees: float


@server.tool(annotations=READS)
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word} looked up {note(f'look_up {word}')} times"


@server.tool()
def add_line(text: str) -> str:
    """Add a line."""
    note(f"add_line {text}")
    return f"added {text}"


@server.tool(annotations=READS)
def weather(city: str) -> Weather:
    """The weather."""
    return Weather(city=city, degrees=21.5)


@server.tool(annotations=READS)
def gallery() -> CallToolResult:
    """Pictures and links."""
    return CallToolResult(
        content=[
            TextContent(type="text", text="two pictures"),
            ImageContent(type="image", data="aGVsbG8=", mime_type="image/png"),
            ResourceLink(type="resource_link", uri="https://example.org/a", name="a", description="the first"),
            EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///notes", text="a note")),
            EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///blob", blob="aGVsbG8=")),
        ]
    )


@server.tool(annotations=READS)
def paint() -> CallToolResult:
    """Paint a picture of 2 by 3 pixels."""
    data = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\2\0\0\0\3\x08\2\0\0\0abcd").decode()
    return CallToolResult(
        content=[
            TextContent(type="text", text="a painting"),
            ImageContent(type="image", data=data, mime_type="image/png"),
        ]
    )


@server.tool(annotations=READS)
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


@server.tool(annotations=READS)
def say_much(size: int) -> str:
    """Says much."""
    return "x" * size


@server.tool()
async def sleep_long(label: str) -> str:
    """Sleeps until it is cancelled."""
    note(f"began {label}")
    try:
        await anyio.sleep_forever()
    finally:
        note(f"ended {label}")
    return ""


@server.tool()
async def with_progress(steps: int, seconds: float, ctx: Context) -> str:
    """Reports progress."""
    for step in range(steps):
        await anyio.sleep(seconds)
        await ctx.report_progress(step, steps)
    return "done"


@server.tool()
def die_writing(text: str) -> str:
    """Writes, and dies before it answers."""
    note(f"die_writing {text}")
    sys.stderr.write("I am dying\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool(annotations=READS)
def process_ids() -> str:
    """The server's process id, and that of a child of its own that ignores the end of its input."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return f"{os.getpid()} {child.pid}"


@server.tool(name="dotted.name/x", annotations=READS)
def dotted() -> str:
    """A name that models cannot use."""
    return "dots"


@server.tool(annotations=READS)
async def flood(lines: int, ctx: Context) -> str:
    """Sends many log lines before its answer."""
    for number in range(lines):
        await ctx.report_progress(number)
    return "flooded"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        import socket

        import uvicorn

        listening = socket.create_server(("127.0.0.1", int(sys.argv[2])))
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        app = server.streamable_http_app(stateless_http="stateless" in sys.argv, json_response="json" in sys.argv)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
