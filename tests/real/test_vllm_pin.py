"""``batch_agent.vllm_pin`` inside a real vLLM server with a cache of 80 blocks. ``python -m tests.real vllm-pin``
starts one on a CPU and runs this; or, for one that is there, of which ``--num-gpu-blocks-override 80 --block-size 32
--max-model-len 1024 --max-num-batched-tokens 256``, ``pin_seconds`` of 3600 and VLLM_SERVER_DEV_MODE=1 make it fit:
BATCH_AGENT_TEST_VLLM_PIN=vllm://127.0.0.1:8000 python -m pytest tests/real/test_vllm_pin.py
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

import batch_agent
from batch_agent import BatchAgent, Tool

URL = os.environ.get("BATCH_AGENT_TEST_VLLM_PIN", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not URL, reason="set BATCH_AGENT_TEST_VLLM_PIN to a real vLLM server with the connector"),
]
LONG = 3600  # seconds of a pin that does not expire here
CONTEXT = 480  # tokens of an agent's context, about 15 blocks


class Server:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._base = f"http://{URL.partition('://')[2]}"

    async def ask(self, text: str, order: object = None) -> dict[str, object]:
        """The usage of one short answer, with what the connector says of the order."""
        body: dict[str, object] = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0,
        }
        if order is not None:
            body["kv_transfer_params"] = {"batch_agent": order}
        async with self._session.post(f"{self._base}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        said = (answer.get("kv_transfer_params") or {}).get("batch_agent")
        return {"cached": cached, "prompt": answer["usage"]["prompt_tokens"], "said": said}

    async def cached(self, text: str) -> int:
        answer = await self.ask(text)
        assert isinstance(answer["cached"], int)
        return answer["cached"]

    async def flood(self) -> None:
        """Other requests, that together need more than the cache has."""
        for _ in range(8):
            await self.ask(context())

    async def reset(self) -> bool:
        url = f"{self._base}/reset_prefix_cache?reset_external=true"
        async with self._session.post(url) as response:
            return response.status == 200

    async def usage(self) -> float:
        async with self._session.get(f"{self._base}/metrics") as response:
            lines = (await response.text()).splitlines()
        [usage] = [line.split()[-1] for line in lines if line.startswith("vllm:kv_cache_usage_perc")]
        return float(usage)


def context() -> str:
    """A text of its own, which shares nothing with another."""
    return f"{secrets.token_hex(4)} " + "look at the trees and the rocks again " * (CONTEXT // 8)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as session:
        server = Server(session)
        await server.reset()  # releases all pins
        yield server


async def test_a_pinned_context_survives_what_evicts_another(server: Server) -> None:
    pinned, other = context(), context()
    answer = await server.ask(pinned, {"pin": "agent", "seconds": LONG})
    await server.ask(other)
    assert isinstance(answer["said"], dict) and answer["said"]["pinned_tokens"] > 400
    await server.flood()
    assert await server.cached(pinned) > 400
    assert await server.cached(other) < 100


async def test_a_pin_expires(server: Server) -> None:
    pinned = context()
    await server.ask(pinned, {"pin": "agent", "seconds": 0.5})
    await asyncio.sleep(0.6)
    await server.flood()
    assert await server.cached(pinned) < 100


async def test_a_released_context_is_evicted(server: Server) -> None:
    pinned = context()
    await server.ask(pinned, {"pin": "agent", "seconds": LONG})
    await server.ask("hello", {"release": ["agent"]})
    await server.flood()
    assert await server.cached(pinned) < 100


async def test_pins_keep_to_their_share_and_large_requests_are_answered_all_the_same(server: Server) -> None:
    for number in range(6):
        await server.ask(context(), {"pin": f"agent {number}", "seconds": LONG})
    assert 0.3 < await server.usage() <= 0.8
    long = "all the words of a long request " * 110
    answers = await asyncio.gather(*(server.ask(f"{secrets.token_hex(4)} {long}") for _ in range(4)))
    assert all(isinstance(answer["prompt"], int) and answer["prompt"] > 700 for answer in answers)


@pytest.mark.parametrize("order", ["pin", 7, [], {"pin": 5}, {"pin": "a", "seconds": "x"}, {"release": "a"}, {}])
async def test_a_malformed_order_is_ignored(server: Server, order: object) -> None:
    assert (await server.ask("hello", order))["said"] is None


async def test_a_reset_of_the_connectors_cache_releases_all_pins(server: Server) -> None:
    await server.ask(context(), {"pin": "agent", "seconds": LONG})
    assert await server.usage() > 0.1
    await server.reset()
    await server.ask("hello")
    assert await server.usage() < 0.1


async def test_agents_whose_contexts_overflow_the_cache_are_answered_with_pins(server: Server) -> None:
    @Tool.define(cacheable=False)
    async def read(city: str) -> str:
        """Read what is known of a city.

        Args:
            city: the city's name
        """
        await asyncio.sleep(0.2)
        return "There are trees and rocks. " * 40

    results = await BatchAgent.run(
        task="What is known of {input}? " + "Look at it carefully. " * 40,
        inputs=["Paris", "Lyon", "Nice", "Lille", "Brest", "Nantes"],
        tools=[read],
        backend=URL,
        kvflow=True,
        model="smollm2",
        tool_choice="required",
        max_turns=3,
        max_tokens=100,
        temperature=0,
    )
    for result in results:
        assert "tool" in [message.role for message in result.messages]
        assert result.error is None or result.error.stage != "backend"


@pytest.mark.skipif("BATCH_AGENT_TEST_VLLM_PYTHON" not in os.environ, reason="needs the environment of vLLM")
def test_whatever_is_ordered_every_request_ends_and_every_block_is_given_back() -> None:
    python, here = Path(os.environ["BATCH_AGENT_TEST_VLLM_PYTHON"]), Path(__file__).parent
    command = [python, here / "pin_stress.py", python.parents[2] / "model"]
    environ = os.environ | {"PYTHONPATH": str(Path(batch_agent.__file__).parents[1])}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "every request ended" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
