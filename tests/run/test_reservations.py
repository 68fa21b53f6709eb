"""Reservations come from what is sent: a limit holds whatever the request has beside the run's own options."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any, cast

import aiohttp
import orjson
import pytest

from batch_agent import AgentContext, BatchAgent, Image
from batch_agent.backends.base import ClientBody, ModelRequest, RequestShape
from batch_agent.backends.registry import open_backend
from batch_agent.compiler.prices import Prices, TokenPrices
from batch_agent.dispatch.prompt_sizes import PromptSizes, client_size
from batch_agent.messages import IMAGE_TOKENS, Conversation, Message, Sealed, Usage
from batch_agent.observe.statistics import Statistics
from batch_agent.testing import Request, Say, ScriptedBackend, ScriptedServer, virtual_clock


async def spent(script: Any, **options: Any) -> tuple[int, Statistics]:
    """The tokens that a run of many rows used, and its statistics."""
    backend = ScriptedBackend(script)
    options = {"task": "{input}", "inputs": map(str, range(100)), "model": "m", "max_inflight": 16, **options}
    async with BatchAgent.open(backend=backend, **options) as run:
        async for _ in run.results():
            pass
    statistics = run.statistics()
    return statistics.usage.prompt_tokens + statistics.usage.completion_tokens, statistics


def verbose(request: Request) -> Say:
    """A server that writes as much as the request allows, for each choice."""
    body = request.body
    allowed = max(int(body.get(name) or 0) for name in ("max_tokens", "max_completion_tokens"))
    return Say("ok", latency=1, usage=Usage(100, completion_tokens=allowed * int(body.get("n") or 1)))


@virtual_clock
async def test_a_limit_on_cost_holds_where_every_prompt_is_written_to_a_cache() -> None:
    prices = {"input": 3.0, "cached": 0.3, "cache_write": 6.0, "output": 15.0}
    used = Usage(2_000, completion_tokens=50, cache_write_tokens=1_900)
    rows = (f"{number:04} {'x' * 1_950}" for number in range(100))  # one token a byte
    _, statistics = await spent(
        lambda _: Say("ok", latency=1, usage=used), inputs=rows, prices=prices, max_cost=0.1, max_tokens=50
    )
    assert statistics.ended == "out of budget"
    assert statistics.cost is not None and 0.08 < statistics.cost <= 0.1


@pytest.mark.parametrize(
    "extra",
    [
        {"max_tokens": 2_000},
        {"max_completion_tokens": 2_000},
        {"max_completion_tokens": "2000"},
        {"max_tokens": 500, "n": 4},
        {"n": 20},
    ],
    ids=str,
)
@virtual_clock
async def test_a_limit_on_tokens_holds_for_what_extra_body_asks_for(extra: dict[str, Any]) -> None:
    tokens, statistics = await spent(verbose, extra_body=extra, max_tokens=100, max_total_tokens=5_000)
    assert statistics.ended == "out of budget"
    assert 0 < tokens <= 5_000


@virtual_clock
async def test_a_limit_that_extra_body_lifts_makes_the_run_learn_the_longest_answer() -> None:
    usage = Usage(100, completion_tokens=900)
    tokens, statistics = await spent(
        lambda _: Say("ok", latency=1, usage=usage),
        extra_body={"max_tokens": None},
        max_tokens=1,
        max_total_tokens=9_000,
    )
    assert statistics.ended == "out of budget" and tokens <= 9_000


@pytest.mark.parametrize(
    ("each", "options"),
    [
        (6_000, {}),  # without max_tokens
        (700, {"extra_body": {"n": 8}}),
        (0, {"max_tokens": 100, "extra_body": {"web_search_options": {}}}),  # the search adds to the prompt
    ],
    ids=["long answers", "many answers", "a search at the server"],
)
@virtual_clock
async def test_a_limit_on_tokens_holds_for_what_nothing_bounds(each: int, options: dict[str, Any]) -> None:
    choices = options.get("extra_body", {}).get("n", 1)
    usage = Usage(100, completion_tokens=each * choices) if each else Usage(6_000, completion_tokens=100)
    tokens, statistics = await spent(lambda _: Say("ok", latency=1, usage=usage), max_total_tokens=30_000, **options)
    assert statistics.ended == "out of budget" and 15_000 < tokens <= 30_000


async def test_the_limit_that_a_backend_sends_by_itself_is_reserved() -> None:
    backend, _ = open_backend("anthropic://127.0.0.1:1", model="claude-sonnet-4-5", api_key="k")
    shape = RequestShape("claude-sonnet-4-5")
    request, sizes = ModelRequest(shape, Conversation([Message("user", "hi")]), "1"), PromptSizes()
    sizes.limit(shape, backend.answer_limit(shape))
    sent = orjson.loads(cast(Any, backend).body_of(request))["max_tokens"]
    assert sizes.measure(request).max_tokens == sent > 1_000
    own = replace(shape, extra_body={"max_tokens": 7})
    sizes.limit(own, backend.answer_limit(own))
    assert sizes.measure(replace(request, shape=own)).max_tokens == 7


@pytest.mark.parametrize("each", [300, 7_000, 25_000])
@virtual_clock
async def test_a_limit_on_tokens_holds_for_pictures_by_address(each: int) -> None:
    tokens, statistics = await spent(
        lambda _: Say("ok", latency=1, usage=Usage(each, completion_tokens=10)),
        task="Describe {picture}",
        inputs=({"picture": Image(f"https://example.com/{n}.png")} for n in range(200)),
        max_tokens=10,
        max_total_tokens=30_000,
    )
    assert statistics.ended == "out of budget"
    assert 30_000 * 0.6 < tokens <= 30_000


@virtual_clock
async def test_pictures_do_not_slow_a_run_down_whose_limit_is_far_away() -> None:
    async def seconds(**limit: Any) -> float:
        begun = asyncio.get_running_loop().time()
        pictures = ({"picture": Image(f"https://example.com/{n}.png")} for n in range(160))
        await spent(
            lambda _: Say("ok", latency=1, usage=Usage(1_000, completion_tokens=10)),
            task="Describe {picture}",
            inputs=pictures,
            max_tokens=10,
            **limit,
        )
        return asyncio.get_running_loop().time() - begun

    assert await seconds(max_total_tokens=10_000_000) == await seconds()


# Through the gateway


PDF = "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.7 " + b"x" * 3_000).decode()
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}}
BODIES: dict[str, dict[str, Any]] = {
    "eight choices": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "n": 8},
    "a file": {"messages": [{"role": "user", "content": [{"type": "text", "text": "read"}, FILE]}], "max_tokens": 50},
    "a picture": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}
        ],
        "max_tokens": 50,
    },
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_limit_on_tokens_holds_for_what_clients_of_the_gateway_send(name: str) -> None:
    counted = 0

    def count(request: Request) -> Say:
        nonlocal counted
        files = str(request.body["messages"]).count("'file'") + str(request.body["messages"]).count("image_url'")
        usage = Usage(50 + 3_700 * files, completion_tokens=request.body["max_tokens"] * request.body.get("n", 1))
        counted += usage.prompt_tokens + usage.completion_tokens
        return Say("ok", latency=0.01, usage=usage)

    async def work(row: str, ctx: AgentContext) -> int:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ctx.api_key}"}) as session:
            body = {"model": ctx.model, "user": row, **BODIES[name]}
            async with session.post(f"{ctx.base_url}/chat/completions", json=body) as answer:
                return answer.status

    async with ScriptedServer(count, models=["m"]) as server:
        results = await BatchAgent.run(
            worker=work, inputs=[str(n) for n in range(10)], backend=server.backend_url, max_total_tokens=30_000
        )
    assert 15_000 < counted <= 30_000
    assert {result.error.type for result in results if result.error} == {"Interrupted"}


@pytest.mark.parametrize(
    ("part", "more", "count"),
    [
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * 80_000}}, {}, 1),
        ({"type": "file", "file": {"file_id": "file-1"}}, {}, 1),
        ({"type": "input_file", "file_url": "https://example.com/a.pdf"}, {}, 1),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 80_000}}, {}, 1),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}, {}, 1),
        ({"type": "document", "source": {"type": "text", "data": "plain"}}, {}, 0),
        ({"type": "text", "text": "hello"}, {}, 0),
        ({"type": "text", "text": ""}, {"tools": [{"type": "web_search"}, {"type": "function"}]}, 1),
        ({"type": "text", "text": ""}, {"previous_response_id": "resp_1"}, 1),
    ],
)
def test_each_file_of_a_body_counts_like_a_picture(part: dict[str, Any], more: dict[str, Any], count: int) -> None:
    size = client_size({"messages": [{"role": "user", "content": [part]}], **more}, None)
    assert size.attached == count * IMAGE_TOKENS
    assert size.prompt_bytes < 500


def test_the_data_of_a_file_is_no_text_but_all_else_of_a_body_is() -> None:
    fields = {"messages": [{"role": "user", "content": [FILE, {"type": "text", "text": "é" * 1_000}]}]}
    size = client_size(fields, 7)
    assert 2_000 < size.prompt_bytes < 2_300
    assert (size.max_tokens, size.choices) == (7, 1)


def test_the_most_that_tokens_can_cost_is_the_dearest_price_of_every_tier_they_can_be_in() -> None:
    prices = Prices("", (TokenPrices(3, 0.3, 3.75, 15), TokenPrices(6, 0.6, 7.5, 10, above=1_000)))
    assert prices.most(Usage(1_000, completion_tokens=100)) == pytest.approx((3_750 + 1_500) / 1e6)
    assert prices.most(Usage(1_001, completion_tokens=100)) == pytest.approx((1_001 * 7.5 + 1_000) / 1e6)
    assert Prices("", per_second=1.0).most(Usage(1_000)) == 0.0


def test_deeply_nested_fields_are_measured() -> None:
    nested: Any = "x"
    for _ in range(200):
        nested = [nested]
    assert client_size({"metadata": nested}, None).prompt_bytes > 200


def test_sealed_parts_of_a_conversation_count_until_a_server_has_counted_them() -> None:
    sealed = Sealed("responses", [{"type": "reasoning", "encrypted_content": "x" * 5_000}])
    asked = Conversation([Message("user", "hi"), Message("assistant", "ok", sealed=sealed), Message("user", "and?")])
    request, sizes = ModelRequest(RequestShape("m"), asked, "1"), PromptSizes()
    before = sizes.measure(request)
    assert before.prompt_bytes > 5_000
    sizes.learn(request, before, Usage(1_200, completion_tokens=1))
    assert sizes.measure(request).prompt_bytes < 1_000


def test_a_clients_own_body_is_what_is_measured() -> None:
    body = ClientBody("chat", {"messages": [{"role": "user", "content": "x" * 900}], "n": 3}, b"")
    request = ModelRequest(RequestShape("m", max_tokens=10), Conversation([]), "1", client=body)
    size = PromptSizes().measure(request)
    assert size.prompt_bytes > 900 and (size.max_tokens, size.choices) == (10, 3)
