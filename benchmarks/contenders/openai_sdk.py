"""The loop of ``agent_loop`` with the openai SDK: one client, as its documentation shows it."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

import openai

from benchmarks.agent_loop import Message, StreamedMessage, run_agents
from benchmarks.workload import Review, Work, contend, request_body


async def run(work: Work) -> list[Review]:
    async with openai.AsyncOpenAI(base_url=f"{work.url}/v1", api_key="none", timeout=600) as client:

        async def ask(messages: list[Message]) -> Message:
            answer = await client.chat.completions.create(
                **request_body(messages, tools=work.turns == 2, stream=work.stream)
            )
            if work.stream:
                streamed = StreamedMessage()
                async for event in answer:
                    streamed.add(event.model_dump())
                return streamed.message()
            message: Message = answer.choices[0].message.model_dump(exclude_none=True)
            return message

        return await run_agents(work, ask)


if __name__ == "__main__":
    contend(run)
