"""What the tests of the pool share."""

import asyncio
import json

from batch_agent.messages import ToolCall
from batch_agent.tools import Tool


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall("id", name, json.dumps(arguments))


class Counter:
    """An async tool's inside: counts its runs, and lets them end when told."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.release = asyncio.Event()

    async def __call__(self, n: int) -> str:
        self.runs += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return f"{n} in run {self.runs}"

    def tool(self, **options: object) -> Tool:
        async def look(n: int = 0) -> str:
            return await self(n)

        return Tool.define(look, **options)  # type: ignore[call-overload]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
