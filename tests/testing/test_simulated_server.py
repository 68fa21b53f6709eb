"""The simulated engine over HTTP, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import re

import aiohttp
import pytest

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.simulated import EngineModel
from batch_agent.errors import Rejected, SpecError
from batch_agent.messages import Conversation, Image, Message
from batch_agent.testing import ScriptedServer, SimulatedServer, serve_simulated, virtual_clock

LONG = "The same long preamble for everybody. " * 30


def chat(text: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
    return {"model": "simulated", "messages": messages, **fields}


async def post(client: aiohttp.ClientSession, server: SimulatedServer, body: dict[str, object]) -> tuple[int, dict]:
    async with client.post(f"{server.url}/chat/completions", json=body) as response:
        return response.status, await response.json()


@virtual_clock
async def test_the_second_request_finds_the_first_ones_prefix() -> None:
    async with SimulatedServer() as server, aiohttp.ClientSession() as client:
        _, first = await post(client, server, chat("one"))
        _, second = await post(client, server, chat("two"))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 250
    assert first["system_fingerprint"] == first["model"] == "simulated"


@virtual_clock
async def test_a_stream_comes_token_by_token_in_simulated_time() -> None:
    loop = asyncio.get_running_loop()
    model = EngineModel(step_seconds=1.0, answer_tokens=8)
    at: list[float] = []
    text = ""
    async with SimulatedServer(model) as server, aiohttp.ClientSession() as client:
        body = chat("hi", stream=True, stream_options={"include_usage": True})
        async with client.post(f"{server.url}/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                    text += choices[0]["delta"].get("content", "")
                    at.append(loop.time())
        _, whole = await post(client, server, chat("hi"))
    assert text == whole["choices"][0]["message"]["content"]
    assert len(at) == 1 + 7 + 1  # the role, seven tokens of text, the end
    gaps = [after - before for before, after in itertools.pairwise(at[1:-1])]
    assert all(gap == pytest.approx(1.0, abs=0.01) for gap in gaps)


@virtual_clock
async def test_tools_are_called_and_then_an_answer_is_given() -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body = chat("hi", tools=tools)
    async with SimulatedServer() as server, aiohttp.ClientSession() as client:
        _, first = await post(client, server, body)
        message = first["choices"][0]["message"]
        answer = {"role": "tool", "content": "seen", "tool_call_id": message["tool_calls"][0]["id"]}
        _, second = await post(client, server, {**body, "messages": [*body["messages"], message, answer]})
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert "q" in json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert second["choices"][0]["finish_reason"] == "stop"
    reached = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > reached - 32


@virtual_clock
async def test_a_list_of_prompts_runs_together_and_is_refused_as_a_whole() -> None:
    model = EngineModel(step_seconds=1.0, sequence_seconds=0, answer_tokens=4, max_queued=3)
    async with SimulatedServer(model) as server, aiohttp.ClientSession() as client:
        url = f"{server.url}/completions"
        async with client.post(url, json={"model": "simulated", "prompt": ["a", "b", "c"]}) as response:
            body = await response.json()
        took = asyncio.get_running_loop().time()
        async with client.post(url, json={"model": "simulated", "prompt": list("abcd")}) as response:
            refused = response.status, "Retry-After" in response.headers
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 12
    assert took == pytest.approx(4, abs=0.01)
    assert refused == (503, False)
    assert server.runner.engine.waiting == 0


@virtual_clock
async def test_refusals_have_the_status_of_a_real_server() -> None:
    async with SimulatedServer(EngineModel(context_tokens=256)) as server, aiohttp.ClientSession() as client:
        too_long = await post(client, server, chat("x" * 2000, stream=True))
        unknown = await post(client, server, chat("x") | {"model": "other"})
    assert (too_long[0], too_long[1]["error"]["param"]) == (400, "input_tokens")
    assert unknown[0] == 404


@virtual_clock
async def test_a_client_that_leaves_frees_its_place() -> None:
    async with SimulatedServer(EngineModel(step_seconds=1.0)) as server, aiohttp.ClientSession() as client:
        asking = asyncio.create_task(post(client, server, chat("hi")))
        await asyncio.sleep(3)
        engine = server.runner.engine
        assert len(engine.running) == 1
        asking.cancel()
        await server.wait_disconnects(1)
        assert (engine.running, engine.pool.held) == ([], 0)


@virtual_clock
async def test_metrics_have_vllms_names_and_say_simulated() -> None:
    model = EngineModel(reading_seconds=0, first_reading_seconds=0)
    async with SimulatedServer(model) as server, aiohttp.ClientSession() as client:
        await post(client, server, chat("one"))
        await post(client, server, chat("two"))
        async with client.get(server.url.removesuffix("/v1") + "/metrics") as response:
            text = await response.text()
        async with client.get(f"{server.url}/models") as response:
            card = (await response.json())["data"][0]
    values = {m[1]: float(m[2]) for m in re.finditer(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.MULTILINE)}
    assert values["prefix_cache_hits_total"] > 250
    assert values["prefix_cache_queries_total"] > 2 * 250
    assert (values["num_requests_running"], values["num_requests_waiting"], values["kv_cache_usage_perc"]) == (0, 0, 0)
    assert re.search(r'cache_config_info\{.*block_size="16",num_gpu_blocks="8192"', text)
    assert all("simulated" in line for line in text.splitlines() if line.startswith("# HELP"))
    assert (card["id"], card["max_model_len"]) == ("simulated", 32768)


@virtual_clock
async def test_metrics_are_late_as_those_of_real_engines_are() -> None:
    async with SimulatedServer() as server, aiohttp.ClientSession() as client:

        async def finished() -> float:
            async with client.get(server.url.removesuffix("/v1") + "/metrics") as response:
                return sum(map(float, re.findall(r"request_success_total\{.*\} (\S+)", await response.text())))

        clock = asyncio.get_running_loop().time
        began = clock()
        for sent in range(1, 26):
            await post(client, server, chat("one"))
            counted = await finished()
            assert counted == 0 if clock() - began < 18 else sent - 4 <= counted <= sent
            await asyncio.sleep(1.0)


async def test_serving_runs_until_cancelled_and_tells_where() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_simulated(host="127.0.0.1", port=0, engine=EngineModel.instant(), ready=ready.set_result)
    )
    async with asyncio.timeout(10), aiohttp.ClientSession() as client:
        url = await ready
        async with client.post(f"{url}/chat/completions", json=chat("hi")) as response:
            assert response.status == 200
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_a_taken_port_is_a_spec_error() -> None:
    async with ScriptedServer() as other:
        port = int(other.address.rpartition(":")[2])
        with pytest.raises(SpecError, match="choose another port"):
            await serve_simulated(host="127.0.0.1", port=port, engine=EngineModel(), ready=lambda url: None)


async def test_an_image_is_refused_as_a_text_model_refuses_it() -> None:
    message = Message("user", ("What is this?", Image("https://host/a.png")))
    async with SimulatedServer() as server, OpenAIBackend(server.url) as backend:
        with pytest.raises(Rejected, match="not a multimodal model"):
            await backend.infer(ModelRequest(RequestShape(model="simulated"), Conversation([message]), "job"))
