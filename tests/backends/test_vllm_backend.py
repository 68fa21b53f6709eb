"""vllm:// on a real socket, against a server that says what vLLM 0.32 was seen to say."""

from __future__ import annotations

import pytest

from backends.wire import WireServer, answer
from batch_agent.backends.base import Load, Measured
from batch_agent.backends.registry import open_backend
from batch_agent.backends.vllm import VllmBackend
from batch_agent.errors import BackendError

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
        assert backend.capabilities.load
        assert isinstance(backend, Measured)
        assert await backend.load() == Load(4, 2, 0.375, 3200, 7, 3000, 2500, 8, 1.5)
    assert server.requests[0].path == "/metrics"


async def test_what_an_older_server_calls_otherwise_is_found_and_what_it_does_not_say_is_not_known() -> None:
    told = (
        b'vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\nvllm:cache_config_info{num_gpu_blocks="None"} 1\n'
    )
    async with WireServer(answer(told, kind="text/plain")) as server, vllm(server) as backend:
        assert await backend.load() == Load(running=1, kv_usage=0.5)


@pytest.mark.parametrize("step", [answer(b"", 404), answer(b"up 1\n", kind="text/plain"), answer(b"", 503)])
async def test_a_server_that_does_not_say_how_busy_it_is_is_an_error(step) -> None:
    async with WireServer(step) as server, vllm(server) as backend:
        with pytest.raises(BackendError):
            await backend.load()
