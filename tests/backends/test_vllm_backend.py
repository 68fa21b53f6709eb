"""vllm:// on a real socket, against a server that says what vLLM 0.32 was seen to say."""

from __future__ import annotations

import pytest

from batch_agent.backends.base import Facts, Load, ModelRequest, RequestShape
from batch_agent.backends.engines.engine import Sharing
from batch_agent.backends.engines.vllm import LIST, VllmBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, ContextOverflow, Rejected, SpecError, Truncated, Unavailable
from batch_agent.messages import Conversation, Message, Reply, ToolSpec, Usage
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer, hang

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 3000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 2500.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 8.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="100"} 1.0
"""


def vllm(server: WireServer, options: str = "") -> VllmBackend:
    backend, _ = open_backend(f"vllm://127.0.0.1:{server.port}{options}", model="m", api_key=None, environ={})
    assert isinstance(backend, VllmBackend)
    return backend


async def test_how_busy_it_is_is_read_from_its_metrics() -> None:
    async with WireServer(answer(METRICS, kind="text/plain; version=0.0.4")) as server, vllm(server) as backend:
        assert backend.capabilities.reports_load
        assert await backend.load() == Load(4, 2, 0.375, 3200, 7, 3000, 2500, 5)
    assert server.requests[0].path == "/metrics"


async def test_the_size_of_the_cache_is_told_in_tokens_where_layers_differ_and_an_offload_tier_is_seen() -> None:
    told = (
        b"vllm:num_requests_running 1\nvllm:generation_tokens_total 50\n"
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="900",'
        b'kv_offloading_size="8.0"} 1\n'
    )
    async with WireServer(answer(told, kind="text/plain")) as server, vllm(server) as backend:
        assert await backend.load() == Load(running=1, kv_tokens=900, offloads=True, generated=50)


async def test_what_an_older_server_calls_otherwise_is_found_and_what_it_does_not_say_is_not_known() -> None:
    told = (
        b'vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\nvllm:cache_config_info{num_gpu_blocks="None"} 1\n'
    )
    async with WireServer(answer(told, kind="text/plain")) as server, vllm(server) as backend:
        assert await backend.load() == Load(running=1, kv_usage=0.5)


@pytest.mark.parametrize("step", [answer(b"", 404), answer(b"up 1\n", kind="text/plain"), answer(b"", 503)])
async def test_a_server_that_does_not_say_how_busy_it_is_is_an_error(step: Step) -> None:
    async with WireServer(step) as server, vllm(server) as backend:
        with pytest.raises(BackendError):
            await backend.load()


# What a request has of its own

SHAPE = RequestShape("m")
MODELS = {"object": "list", "data": [{"id": "other", "max_model_len": 1}, {"id": "m", "max_model_len": 4096}]}


def said(text: str, finish: str = "stop") -> dict:
    return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}


def by_path(**answers: Step | list[Step]) -> Step:
    """Answers by the last part of the path; a list one after another. What is not named is not there."""

    async def step(exchange: Exchange) -> None:
        name = exchange.path.partition("?")[0].rpartition("/")[2]
        found = answers.get(name, answer({"detail": "Not Found"}, 404))
        await (found.pop(0) if isinstance(found, list) else found)(exchange)

    return step


def info(policy: str) -> Step:
    return answer({"vllm_config": {"scheduler_config": {"policy": policy}}, "vllm_env": {}})


def turn(number: int, left: int, run: str = "r1") -> ModelRequest:
    return ModelRequest(
        SHAPE, Conversation([Message("user", "hi")]), "job", agent=7, priority=left, run=run, turn=number
    )


async def test_a_request_is_named_after_its_run_agent_and_turn_and_keeps_its_name_when_it_is_sent_again() -> None:
    async with WireServer(answer({"choices": [said("ok")]})) as server, vllm(server) as backend:
        for request in (turn(1, 3), turn(1, 3), turn(2, 2), turn(1, 3, run="")):
            await backend.infer(request)
    names = [exchange.headers.get("X-Request-Id") for exchange in server.requests]
    assert names == ["batchagent-r1-7-1", "batchagent-r1-7-1", "batchagent-r1-7-2", None]
    assert all("priority" not in exchange.json for exchange in server.requests)


@pytest.mark.parametrize(
    ("options", "server_info", "sent"),
    [
        ("", info("priority"), 3),
        ("", info("fcfs"), None),
        ("", answer({"detail": "Not Found"}, 404), None),
        ("?priority=true", info("fcfs"), 3),
        ("?priority=false", info("priority"), None),
    ],
)
async def test_a_priority_is_sent_where_the_server_was_seen_to_go_by_it(
    options: str, server_info: Step, sent: int | None
) -> None:
    chat = answer({"choices": [said("ok")]})
    serving = by_path(models=answer(MODELS), server_info=server_info, completions=chat)
    async with WireServer(serving) as server, vllm(server, options) as backend:
        assert await backend.facts("m") == Facts(context=4096)
        await backend.infer(turn(1, 3))
    assert server.requests[-1].json.get("priority") == sent


async def test_a_server_that_hangs_or_is_not_there_is_not_waited_for() -> None:
    async with WireServer(by_path(models=answer(MODELS), server_info=hang)) as server, vllm(server) as backend:
        backend.patience = 0.05
        assert await backend.facts("m") == Facts(context=4096)
        assert await backend.facts("nobody") == Facts()
    async with vllm(server) as backend:
        assert await backend.facts("m") == Facts()


async def test_a_salt_keeps_caches_apart_and_an_empty_one_is_refused_here() -> None:
    async with WireServer(answer({"choices": [said("ok")]})) as server:
        async with vllm(server, "?cache_salt=tenant%201") as backend:
            await backend.infer(turn(1, 3))
        with pytest.raises(SpecError, match="cache_salt is empty"):
            vllm(server, "?cache_salt=")
        with pytest.raises(SpecError, match="cache_salt"):
            vllm(server, "?cachesalt=a")
    assert server.requests[0].json["cache_salt"] == "tenant 1"


async def test_tokens_are_counted_as_the_server_renders_them_tools_included() -> None:
    look = ToolSpec("look", "Look.", {"type": "object"})
    async with WireServer(answer({"count": 41, "tokens": []})) as server, vllm(server) as backend:
        assert await backend.count_tokens("hello", RequestShape("m", tools=(look,), max_tokens=5)) == 41
        assert await backend.count_tokens([Message("system", "s"), Message("user", "u")]) == 41
    assert server.requests[0].path == "/tokenize"
    assert server.requests[0].json.keys() == {"model", "messages", "tools"}
    assert [message["role"] for message in server.requests[1].json["messages"]] == ["system", "user"]


# Lists of conversations


def listed(*texts: str) -> Step:
    choices = [{**said(text), "index": place} for place, text in enumerate(texts)]
    return answer({"choices": choices[::-1], "usage": {"prompt_tokens": 31, "completion_tokens": len(texts)}})


async def test_many_prompts_go_in_lists_and_come_back_in_their_order_with_all_that_they_took() -> None:
    async def echo(exchange: Exchange) -> None:
        await listed(*(conversation[-1]["content"] for conversation in exchange.json["messages"]))(exchange)

    async with WireServer(by_path(batch=echo)) as server, vllm(server, "?cache_salt=s") as backend:
        replies = await backend.generate_batch([f"prompt {n}" for n in range(LIST * 2 + 3)], SHAPE)
    assert [reply.text for reply in replies] == [f"prompt {n}" for n in range(LIST * 2 + 3)]
    assert sorted(len(exchange.json["messages"]) for exchange in server.requests) == [3, LIST, LIST]
    assert sum(reply.usage.prompt_tokens for reply in replies) == 3 * 31
    assert sum(reply.usage.completion_tokens for reply in replies) == LIST * 2 + 3
    assert {(exchange.path, exchange.json["cache_salt"]) for exchange in server.requests} == {
        ("/v1/chat/completions/batch", "s")
    }


async def test_one_bad_prompt_of_a_list_fails_alone() -> None:
    def refused(exchange: Exchange) -> bool:
        return b"too long" in exchange.body

    async def lists(exchange: Exchange) -> None:
        overflow = answer({"error": {"message": "maximum context length is 4096", "param": "input_tokens"}}, 400)
        count = len(exchange.json["messages"])
        await (overflow if refused(exchange) else listed(*["fine"] * count))(exchange)

    async def single(exchange: Exchange) -> None:
        overflow = answer({"error": {"message": "maximum context length is 4096", "param": "input_tokens"}}, 400)
        await (overflow if refused(exchange) else answer({"choices": [said("fine")]}))(exchange)

    async with WireServer(by_path(batch=lists, completions=single)) as server, vllm(server) as backend:
        replies = await backend.generate_batch(["a", "b", "c", "too long", "e", "f", "g"], SHAPE)
        assert backend.capabilities.batch
    kinds = [ContextOverflow if place == 3 else Reply for place in range(7)]
    assert [type(reply) for reply in replies] == kinds


async def test_an_answer_of_a_list_that_was_cut_fails_alone_and_says_what_it_took() -> None:
    choices = [said("whole"), {**said("cut", "length"), "index": 1}]
    lists = answer({"choices": choices, "usage": {"prompt_tokens": 8, "completion_tokens": 4}})
    async with WireServer(by_path(batch=lists)) as server, vllm(server) as backend:
        whole, cut = await backend.generate_batch(["a", "b"], SHAPE)
    assert isinstance(whole, Reply)
    assert isinstance(cut, Truncated)
    assert (cut.text, cut.usage) == ("cut", Usage(4, 0, 2))


async def test_a_server_without_lists_is_asked_for_each_and_not_for_a_list_again() -> None:
    async with WireServer(by_path(completions=answer({"choices": [said("ok")]}))) as server, vllm(server) as backend:
        for _ in range(2):
            replies = await backend.generate_batch(["a", "b", "c"], SHAPE)
            assert [reply.text for reply in replies] == ["ok"] * 3
        assert not backend.capabilities.batch
    assert [exchange.path.endswith("batch") for exchange in server.requests] == [True] + [False] * 6


async def test_a_model_that_is_not_there_does_not_mean_that_lists_are_not() -> None:
    missing = answer({"error": {"message": "The model does not exist", "type": "NotFoundError", "code": 404}}, 404)
    async with WireServer(by_path(batch=missing, completions=missing)) as server, vllm(server) as backend:
        replies = await backend.generate_batch(["a", "b"], SHAPE)
        assert [type(reply) for reply in replies] == [Rejected, Rejected]
        assert backend.capabilities.batch


async def test_a_server_that_is_down_fails_all_of_a_list_to_be_tried_again() -> None:
    async with WireServer(answer({"error": {"message": "full"}}, 503)) as server, vllm(server) as backend:
        replies = await backend.generate_batch(["a", "b"], SHAPE)
    assert [type(reply) for reply in replies] == [Unavailable, Unavailable]
    assert len(server.requests) == 1


# Whether prefixes are shared


def hits(count: int) -> bytes:
    return b"vllm:num_requests_running 0\nvllm:prefix_cache_hits_total %d\n" % count


async def sharing(*details: dict | None, metrics: list[bytes] | None = None) -> tuple[Sharing, list[dict]]:
    """Of a server that says this of two requests, and shows these metrics."""
    told = [{"prompt_tokens": 600, "completion_tokens": 1, "prompt_tokens_details": each} for each in details]
    shown = iter(metrics or [])
    bodies = []

    async def serve(exchange: Exchange) -> None:
        if exchange.path == "/metrics":
            text = next(shown, None)
            await answer(text or b"", 200 if text else 404, kind="text/plain")(exchange)
        else:
            bodies.append(exchange.json)
            await answer({"choices": [said("A", "length")], "usage": told[len(bodies) - 1]})(exchange)

    async with WireServer(serve) as server, vllm(server) as backend:
        return await backend.verify_prefix_sharing("m"), bodies


async def test_siblings_share_what_the_server_says_that_it_found() -> None:
    found, (first, second) = await sharing({"cached_tokens": 0}, {"cached_tokens": 570})
    assert (found, found.share) == (Sharing(600, 570), 0.95)
    assert first["messages"][0] == second["messages"][0]
    assert first["tools"] == second["tools"] != []
    assert first["messages"][1] != second["messages"][1]
    _, (third, _) = await sharing({"cached_tokens": 0}, {"cached_tokens": 570})
    assert third["messages"][0] != first["messages"][0], "an earlier trial must not be what is found"


async def test_a_server_that_tells_nothing_of_each_request_is_judged_by_its_counters() -> None:
    found, _ = await sharing(None, None, metrics=[hits(1000), hits(1560)])
    assert found == Sharing(600, 560, in_answer=False)
    found, _ = await sharing(None, None, metrics=[hits(1000), hits(1000)])
    assert found.share == 0
    found, _ = await sharing(None, None)
    assert found.share is None
