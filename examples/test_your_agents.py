"""Test a pipeline of your own without a model: a scripted server speaks the real wire format on a real socket.

python examples/test_your_agents.py
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from batch_agent import BatchAgent, Tool
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedServer, ToolUse


class Answer(BaseModel):
    capital: str


@Tool.define(cacheable=True)
async def look_up(country: str) -> str:
    """Look up a country."""
    return {"France": "Paris", "Peru": "Lima"}.get(country, "unknown")


def model(request: Request) -> Say | Fail:
    """A model that calls the tool, is overloaded once, and then answers with what the tool said."""
    if request.number == 0:
        return Fail(429, headers={"Retry-After": "0"})
    if request.turn == 0:
        return CallTools(ToolUse("look_up", {"country": request.text.split()[-1]}))
    return Say(f'{{"capital": "{request.text}"}}')


async def main() -> None:
    async with ScriptedServer(model) as server:
        results = await BatchAgent.run(
            task="The capital of {input}",
            inputs=["France", "Peru", "France"],
            tools=[look_up],
            output_schema=Answer,
            backend=server.url,
            model="any",
        )
    print([result.output for result in results])
    assert [result.output for result in results] == [Answer(capital=city) for city in ("Paris", "Lima", "Paris")]
    assert sum(result.attempts for result in results) == 4


if __name__ == "__main__":
    asyncio.run(main())
