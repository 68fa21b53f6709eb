"""The loop of ``agent_loop`` on Batch Agent's own HTTP client: what is left of a turn without the engine."""

from __future__ import annotations

import orjson

from batch_agent.backends.http.backend import HttpClient
from benchmarks.agent_loop import Message, StreamedMessage, run_agents
from benchmarks.workload import Review, Work, contend, request_body


async def run(work: Work) -> list[Review]:
    async with HttpClient(f"{work.url}/v1") as client:
        route = client.route("POST", "/chat/completions")

        async def ask(messages: list[Message]) -> Message:
            body = orjson.dumps(request_body(messages, tools=work.turns == 2, stream=work.stream))
            if work.stream:
                reader = _Lines()
                await client.send(route, body, reader.receive)
                return reader.answer.message()
            message: Message = orjson.loads(await client.send(route, body) or b"")["choices"][0]["message"]
            return message

        return await run_agents(work, ask)


class _Lines:
    """Cuts a stream into lines, as ``loop`` does."""

    def __init__(self) -> None:
        self.answer, self._rest = StreamedMessage(), b""

    def receive(self, data: bytes) -> bool:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self.answer.add(orjson.loads(line[6:]))
        return False


if __name__ == "__main__":
    contend(run)
