"""The requests that ``doctor --thorough`` sends to hosted APIs, seen by the strict servers of ``batch_agent.testing``.

``python -m tests.cli.thorough_requests`` writes them to ``tests/cli/thorough/NAME.json``, for readers and for the test
that compares. Hosted APIs were not reached from here: these requests are what a user with a key sends.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from batch_agent.backends.registry import open_backend
from batch_agent.conformance.examination import examine
from batch_agent.conformance.finding import Report
from batch_agent.testing import CallTools, MessagesServer, Request, Say, ScriptedServer, ToolUse

FOLDER = Path(__file__).parent / "thorough"
KEY = "sk-recorded"
MODELS = {"openai": "gpt-4o-mini", "anthropic": "claude-sonnet-4-5"}
ARGUMENTS = {"look_up": {"word": "tree"}, "weather": {"city": "Paris", "days": 2}, "clock": {"city": "Tokyo"}}


def well(request: Request) -> Say:
    """The answer of a good model: it calls the tools that it is asked for, and follows a schema."""
    choice = request.tool_choice
    if request.tools and choice != "none" and request.turn == 0:
        wanted = [tool for tool in request.tools if choice in (None, "auto", "required", tool.name)]
        return CallTools(*(ToolUse(tool.name, ARGUMENTS[tool.name]) for tool in wanted))
    if request.schema is not None:
        bounded = "number" in json.dumps(request.schema)
        return Say('{"number": 5}' if bounded else '{"colour": "red", "sure": true}')
    if (request.max_tokens or 99) <= 8:
        return Say("one two", finish_reason="length")
    return Say("one two three four five")


def server_of(kind: str) -> AbstractAsyncContextManager[ScriptedServer]:
    make = MessagesServer if kind == "anthropic" else ScriptedServer
    return make(well, models=[MODELS[kind]], api_key=KEY)


async def examined(kind: str) -> tuple[Report, list[Request]]:
    async with server_of(kind) as server:
        environ = {f"{kind.upper()}_BASE_URL": server.url, f"{kind.upper()}_API_KEY": KEY}
        backend, model = open_backend(f"{kind}://", model=MODELS[kind], environ=environ)
        async with backend:
            report = await examine(backend, model or MODELS[kind], paid=True)
    return report, server.requests


def recorded(requests: list[Request]) -> list[str]:
    """Each different request once, as text; what changes from run to run is replaced."""
    lines = {f"{each.path} {json.dumps(each.body, sort_keys=True, ensure_ascii=False)}" for each in requests}
    changing = (
        (r"Trial \d+", "Trial N"),
        (r"batch-agent-[0-9a-f]{24}", "batch-agent-KEY"),
        (r"(You are a.*?guesses\. ?)+", r"\1"),
    )
    for pattern, instead in changing:
        lines = {re.sub(pattern, instead, line) for line in lines}
    return sorted(lines)


def main() -> None:
    for kind in MODELS:
        _, requests = asyncio.run(examined(kind))
        (FOLDER / f"{kind}.json").write_text(json.dumps(recorded(requests), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
