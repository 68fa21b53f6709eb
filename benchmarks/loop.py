"""The baseline: the aiohttp loop that a good engineer writes by hand for this one job. See ``agent_loop``.

One session without a connection limit, bodies and answers through orjson. Streamed answers are read as they arrive and
cut into lines here, which is cheaper than aiohttp's own line iterator.
"""

from __future__ import annotations

import aiohttp
import orjson

from benchmarks.agent_loop import Message, StreamedMessage, run_agents
from benchmarks.workload import Review, Work, contend, request_body


async def run(work: Work) -> list[Review]:
    url = f"{work.url}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def ask(messages: list[Message]) -> Message:
            body = orjson.dumps(request_body(messages, tools=work.turns == 2, stream=work.stream))
            async with session.post(url, data=body) as response:
                response.raise_for_status()
                if work.stream:
                    return await _streamed(response)
                message: Message = orjson.loads(await response.read())["choices"][0]["message"]
                return message

        return await run_agents(work, ask)


async def _streamed(response: aiohttp.ClientResponse) -> Message:
    answer, rest = StreamedMessage(), b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                answer.add(orjson.loads(line[6:]))
    return answer.message()


if __name__ == "__main__":
    contend(run)
