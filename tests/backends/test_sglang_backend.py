"""sglang:// on a real socket, against a server that says what SGLang 0.5.21 says by its source."""

from __future__ import annotations

import pytest

from batch_agent.backends.base import Facts, Load, ModelRequest, RequestShape
from batch_agent.backends.engines.sglang import LIST, SglangBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, ContextOverflow, Rejected, SpecError, Truncated, Unavailable
from batch_agent.messages import Conversation, Message, Reply, ToolSpec, Usage
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 32768}]}
SAMPLING = {"max_new_tokens", "temperature", "top_p", "stop", "sampling_seed", "json_schema"}


def sglang(server: WireServer, options: str = "") -> SglangBackend:
    backend, _ = open_backend(f"sglang://127.0.0.1:{server.port}{options}", model="m", api_key=None, environ={})
    assert isinstance(backend, SglangBackend)
    return backend


def serving(**answers: Step) -> Step:
    """By the path, without the slashes; what is not named is not there."""

    async def step(exchange: Exchange) -> None:
        name = exchange.path.partition("?")[0].replace("/", "_").strip("_")
        await answers.get(name, answer({"detail": "Not Found"}, 404))(exchange)

    return step


# How busy it is


def rank(number: int, running: int, waiting: int, usage: float) -> dict:
    counts = {"dp_rank": number, "num_running_reqs": running, "num_waiting_reqs": waiting}
    return {**counts, "token_usage": usage, "max_total_num_tokens": 1000, "cache_hit_rate": 0.5}


async def test_how_busy_it_is_is_told_by_its_loads_over_all_ranks() -> None:
    loads = answer({"version": "0.5.21", "loads": [rank(0, 3, 0, 0.5), rank(1, 4, 2, 0.25)]})
    async with WireServer(serving(v1_loads=loads)) as server, sglang(server) as backend:
        assert await backend.load() == Load(running=7, waiting=2, kv_usage=0.375, kv_tokens=2000)


async def test_an_older_server_tells_it_in_its_metrics_and_is_not_asked_for_loads_again() -> None:
    told = (
        b'sglang:num_running_reqs{model_name="m"} 3\nsglang:num_queue_reqs{model_name="m"} 1\n'
        b'sglang:token_usage{model_name="m"} 0.5\nsglang:prompt_tokens_total{model_name="m"} 100\n'
        b'sglang:cached_tokens_total{model_name="m"} 40\nsglang:time_to_first_token_seconds_sum 2.5\n'
        b"sglang:time_to_first_token_seconds_count 5\nsglang:num_requests_total 4\n"
    )
    async with WireServer(serving(metrics=answer(told, kind="text/plain"))) as server, sglang(server) as backend:
        for _ in range(2):
            assert await backend.load() == Load(3, 1, 0.5, None, None, 100, 40, 4)
    assert [exchange.path for exchange in server.requests] == ["/v1/loads?include=core", "/metrics", "/metrics"]


async def test_an_older_server_tells_the_size_of_its_cache_with_its_options() -> None:
    info = {"max_total_num_tokens": 1000, "internal_states": [{}, {}], "enable_hierarchical_cache": True}
    told = b"sglang:num_running_reqs 3\nsglang:generation_tokens_total 70\n"
    tiered = told + b"sglang:hicache_host_total_tokens 5000\n"
    for metrics, size, unknown in ((told, 2000, True), (tiered, 5000, False)):
        script = serving(server_info=answer(info), metrics=answer(metrics, kind="text/plain"))
        async with WireServer(script) as server, sglang(server) as backend:
            await backend.facts("m")
            assert await backend.load() == Load(running=3, kv_tokens=size, offloads=unknown, generated=70)


async def test_a_second_tier_counts_instead_of_the_cache_if_its_size_is_known() -> None:
    loads = {"loads": [{"num_running_reqs": 1, "max_total_num_tokens": 1000}]}
    info = {"max_total_num_tokens": 1000, "enable_hierarchical_cache": True, "hicache_ratio": 2.0}
    for more, size, unknown in (({}, 2000, False), ({"hicache_size": 30}, 1000, True)):
        script = serving(server_info=answer({**info, **more}), v1_loads=answer(loads))
        async with WireServer(script) as server, sglang(server) as backend:
            await backend.facts("m")
            assert await backend.load() == Load(running=1, kv_tokens=size, offloads=unknown)


async def test_a_server_that_is_busy_or_tells_nothing_is_an_error() -> None:
    async with WireServer(answer(b"", 503)) as server, sglang(server) as backend:
        with pytest.raises(Unavailable):
            await backend.load()
        assert len(server.requests) == 1
    async with WireServer(serving()) as server, sglang(server) as backend:
        with pytest.raises(BackendError):
            await backend.load()


# What a request has of its own


@pytest.mark.parametrize(
    ("info", "options", "sent"),
    [
        ({"enable_priority_scheduling": True}, "", -3),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, "", 3),
        ({"enable_priority_scheduling": False}, "", None),
        ({"enable_priority_scheduling": True}, "?priority=false", None),
        ({}, "?priority=true", -3),
        ({"enable_priority_scheduling": True, "radix_eviction_policy": "priority"}, "", 1),
        ({"enable_priority_scheduling": False, "radix_eviction_policy": "priority"}, "", 1),
        ({"radix_eviction_policy": "priority", "abort_on_priority_when_disabled": True}, "", None),
        ({}, "", None),
    ],
)
async def test_a_priority_is_sent_where_the_server_goes_by_it_and_with_the_sign_that_it_reads(
    info: dict, options: str, sent: int | None
) -> None:
    chat = answer({"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]})
    script = serving(server_info=answer(info), v1_models=answer(MODELS), v1_chat_completions=chat)
    async with WireServer(script) as server, sglang(server, options) as backend:
        assert await backend.facts("m") == Facts(context=32768)
        await backend.infer(
            ModelRequest(RequestShape("m"), Conversation([Message("user", "hi")]), "j", priority=3, run="r")
        )
    assert server.requests[-1].json.get("priority") == sent
    assert "rid" not in server.requests[-1].json


async def test_a_key_keeps_caches_apart() -> None:
    chat = answer({"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]})
    async with WireServer(chat) as server, sglang(server, "?extra_key=tenant") as backend:
        await backend.infer(ModelRequest(RequestShape("m"), Conversation([Message("user", "hi")]), "j"))
    assert server.requests[0].json["extra_key"] == "tenant"


async def test_cached_tokens_are_read_and_where_nothing_is_said_of_them_nothing_was_cached() -> None:
    replies = []
    for details in ({"cached_tokens": 90}, None):
        usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": details}
        chat = answer({"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}], "usage": usage})
        async with WireServer(chat) as server, sglang(server) as backend:
            asked = ModelRequest(RequestShape("m"), Conversation([Message("user", "hi")]), "j")
            replies.append((await backend.infer(asked)).usage)
    assert replies == [Usage(100, 90, 5), Usage(100, 0, 5)]


# Lists of text


def native(exchange: Exchange) -> list[dict] | None:
    """What a strict server says to a list; None: an unknown sampling key, which is a 500."""
    body = exchange.json
    if not body["sampling_params"].keys() <= SAMPLING:
        return None
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 8, "completion_tokens": 2, "cached_tokens": 4}
    return [{"text": f"after {text}", "meta_info": meta} for text in body["text"]]


async def generate(exchange: Exchange) -> None:
    told = native(exchange)
    if told is None:
        await answer({"error": {"message": "unknown key"}}, 500)(exchange)
    elif any("too long" in text for text in exchange.json["text"]):
        message = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
        await answer({"error": {"message": message}}, 400)(exchange)
    else:
        await answer(told)(exchange)


async def test_texts_go_on_in_lists_with_what_each_of_them_took() -> None:
    shape = RequestShape("m", max_tokens=5, temperature=0.5, top_p=0.9, seed=3, stop=("x",), schema={"type": "object"})
    async with WireServer(serving(generate=generate)) as server, sglang(server, "?extra_key=k") as backend:
        replies = await backend.generate_texts([f"text {n}" for n in range(LIST + 2)], shape)
    assert [reply.text for reply in replies] == [f"after text {n}" for n in range(LIST + 2)]
    assert {reply.usage for reply in replies} == {Usage(8, 4, 2)}
    assert sorted(len(exchange.json["text"]) for exchange in server.requests) == [2, LIST]
    assert server.requests[0].json["extra_key"] == "k"


async def test_one_bad_text_fails_alone_and_an_answer_that_was_cut_too() -> None:
    async with WireServer(serving(generate=generate)) as server, sglang(server) as backend:
        replies = await backend.generate_texts(["a", "b", "too long", "d", "e"])
    assert [type(reply) for reply in replies] == [Reply, Reply, ContextOverflow, Reply, Reply]
    cut = [{"text": "t", "meta_info": {"finish_reason": {"type": "length"}, "completion_tokens": 2}}] * 2
    async with WireServer(answer(cut)) as server, sglang(server) as backend:
        assert [type(reply) for reply in await backend.generate_texts(["a", "b"])] == [Truncated, Truncated]


async def test_a_server_without_lists_of_text_refuses_each_and_tools_do_not_go_with_text() -> None:
    async with WireServer(serving()) as server, sglang(server) as backend:
        assert [type(reply) for reply in await backend.generate_texts(["a", "b"])] == [Rejected, Rejected]
        with pytest.raises(SpecError, match="tools"):
            await backend.generate_texts(["a"], RequestShape("m", tools=(ToolSpec("f", "", {}),)))
