"""The loop of ``agent_loop`` with httpx: one client without limits, its own JSON and its own line iterator."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

import json

import httpx

from benchmarks.agent_loop import Message, StreamedMessage, run_agents
from benchmarks.workload import Review, Work, contend, request_body


async def run(work: Work) -> list[Review]:
    url = f"{work.url}/v1/chat/completions"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:

        async def ask(messages: list[Message]) -> Message:
            body = request_body(messages, tools=work.turns == 2, stream=work.stream)
            if work.stream:
                async with client.stream("POST", url, json=body) as response:
                    return await _streamed(response.raise_for_status())
            response = await client.post(url, json=body)
            message: Message = response.raise_for_status().json()["choices"][0]["message"]
            return message

        return await run_agents(work, ask)


async def _streamed(response: httpx.Response) -> Message:
    answer = StreamedMessage()
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            answer.add(json.loads(line[6:]))
    return answer.message()


if __name__ == "__main__":
    contend(run)
