"""What engines tell at /metrics, in each engine's own words."""

from __future__ import annotations

import pytest

from batch_agent.fleet.probe import read_told, tokens_per_second

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 680.0
vllm:generation_tokens_total{engine="0",model_name="m"} 5000.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 197.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"} 2.0
http_requests_total{handler="none",method="POST",status="4xx"} 9.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 5
sglang:num_queue_reqs{model_name="m"} 1
sglang:token_usage{model_name="m"} 0.5
sglang:prompt_tokens_total{model_name="m"} 200
sglang:cached_tokens_total{model_name="m"} 50
sglang:generation_tokens_total{model_name="m"} 70
"""
DYNAMO = """\
dynamo_frontend_inflight_requests{model="m"} 6
dynamo_frontend_router_queue_pending_requests 2
dynamo_frontend_output_sequence_tokens_sum{model="m"} 80
dynamo_frontend_requests_total{model="m",status="success"} 30
dynamo_frontend_requests_total{model="m",status="error"} 4
"""


def test_the_engines_behind_one_address_count_together() -> None:
    told = read_told(VLLM)
    assert told is not None
    assert (told.load.running, told.load.waiting, told.load.kv_usage) == (7, 2, 0.5)
    assert told.prefix_hit_rate == 0.68
    assert (told.generated_tokens, told.errors) == (5000, 2)


@pytest.mark.parametrize(
    ("text", "running", "waiting", "tokens", "errors"), [(SGLANG, 5, 1, 70, None), (DYNAMO, 4, 2, 80, 4)]
)
def test_other_engines_are_read_in_their_own_words(
    text: str, running: int, waiting: int, tokens: int, errors: int | None
) -> None:
    told = read_told(text)
    assert told is not None
    assert (told.load.running, told.load.waiting, told.generated_tokens, told.errors) == (
        running,
        waiting,
        tokens,
        errors,
    )


def test_what_is_no_engines_text_tells_nothing() -> None:
    assert read_told("<html>") is None
    assert read_told("process_cpu_seconds_total 12") is None


def test_tokens_are_counted_between_two_readings_of_one_life() -> None:
    before, after = read_told(SGLANG), read_told(SGLANG.replace('generation_tokens_total{model_name="m"} 70', "x 1"))
    assert before is not None
    assert after is not None
    later = read_told(SGLANG.replace(" 70\n", " 170\n"))
    assert later is not None
    assert tokens_per_second(before, later, 2.0) == 50.0
    assert tokens_per_second(later, before, 2.0) is None  # it has started anew
    assert tokens_per_second(before, after, 2.0) is None  # it does not count
    assert tokens_per_second(before, later, 0.0) is None
