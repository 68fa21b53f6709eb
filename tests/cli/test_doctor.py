"""``batch-agent doctor`` tells what would work, and its exit status whether the default does."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from batch_agent.cli.main import main
from batch_agent.messages import Usage
from batch_agent.testing import Say, ScriptedServer

HAS_ENGINE = importlib.util.find_spec("openvino_genai") is not None


@pytest.fixture(autouse=True)
def bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "cache"))
    for name in ("BATCH_AGENT_BACKEND", "BATCH_AGENT_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The exit status, the record, and what it says of the default backend."""
    status = main(["doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    return status, record, record["default"]


def test_the_default_is_the_embedded_engine_and_works_where_it_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record, default = examine(capsys)
    assert default["backend"] == "local://"
    assert (default["works"], status) == (HAS_ENGINE, 0 if HAS_ENGINE else 1)
    assert record["cache"] == {"path": str(tmp_path / "cache"), "bytes": 0}
    assert not (tmp_path / "cache").exists(), "it only looks"
    assert record["cores"]["usable"] >= record["cores"]["physical"] >= 1
    assert record["packages"]["aiohttp"]


async def test_the_server_that_the_variable_names_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedServer(models=["tiny"]) as server:
        monkeypatch.setenv("BATCH_AGENT_BACKEND", server.backend_url)
        status, _, default = await asyncio.to_thread(examine, capsys)
    assert (status, default["works"], default["note"]) == (0, True, "serves tiny")
    assert default["because"] == "set by BATCH_AGENT_BACKEND"


@pytest.mark.parametrize(
    ("backend", "says"),
    [("vllm://me:secret@127.0.0.1:9", "refused"), ("vlm://me:secret@host", "vllm"), ("me:secret@host", "not a URL")],
)
def test_a_default_that_cannot_work_is_status_1_with_the_reason_and_no_secret(
    backend: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCH_AGENT_BACKEND", backend)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "does not work" in out
    assert says in out
    assert "secret" not in out


async def test_every_service_with_a_key_or_an_address_is_asked_and_no_key_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedServer(models=["tiny"]) as server:
        for name in ("OPENAI", "GROQ", "OLLAMA"):
            monkeypatch.setenv(f"{name}_BASE_URL", f"{server.url}/v1" if not server.url.endswith("/v1") else server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        monkeypatch.setenv("GROQ_API_KEY", "sk-secret")
        monkeypatch.setenv("DEEPSEEK_API_KEY", "sk-secret")
        monkeypatch.setenv("DEEPSEEK_BASE_URL", "http://127.0.0.1:9/v1")
        await asyncio.to_thread(main, ["doctor"])
    out = capsys.readouterr().out
    for name in ("openai", "groq", "ollama"):
        assert re.search(rf"{name}://\s+works: accepts the key and serves tiny", out), name
    assert re.search(r"deepseek://\s+does not work: .*refused", out)
    assert re.search(r"anthropic://\s+does not work: there is no key", out)
    assert "mistral" not in out and "sk-secret" not in out


async def test_a_backend_or_a_fleet_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedServer(models=["tiny"]) as server:
        place = server.url.partition("://")[2].partition("/")[0]
        hosts = tmp_path / "hosts.txt"
        hosts.write_text(f"{place}\n127.0.0.1:9\n")
        for words, says in (
            ([server.backend_url], "serves tiny"),
            (["--backend", f"fleet://{hosts}"], "1 of 2 servers answer, serving tiny; vllm://127.0.0.1:9: "),
        ):
            assert await asyncio.to_thread(main, ["doctor", *words]) == 0
            assert says in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["doctor", "--backend", "vllm://127.0.0.1:9"]) == 1


@pytest.mark.parametrize(("cached", "says"), [(180, "share 90% of their prompt"), (0, "have no cache hits")])
async def test_an_engine_is_tried_for_whether_it_shares_prefixes(
    cached: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Say("A", finish_reason="length", usage=Usage(200, cached, 1))
    metrics = "vllm:num_requests_running 0\nvllm:prefix_cache_hits_total 7\n"
    async with ScriptedServer(lambda request: told, models=["tiny"], metrics=lambda: metrics) as server:
        monkeypatch.setenv("BATCH_AGENT_BACKEND", server.backend_url)
        status, _, default = await asyncio.to_thread(examine, capsys)
    assert (status, default["works"]) == (0, True)
    assert says in default["note"]


async def test_what_an_engine_lacks_for_agents_is_said_with_the_flag_and_its_worth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = Say("A", finish_reason="length", usage=Usage(200, 0, 1))
    hits = iter(range(0, 9_000, 150))
    cache = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True"}'

    def metrics() -> str:
        return f"vllm:num_requests_running 0\nvllm:prefix_cache_hits_total {next(hits)}\n{cache} 1\n"

    async with ScriptedServer(lambda request: told, models=["tiny"], metrics=metrics) as server:
        arguments = ["doctor", "--json", "--backend", server.backend_url, "--agents", "24", "--context", "1000"]
        assert await asyncio.to_thread(main, arguments) == 0
    default = json.loads(capsys.readouterr().out)["default"]
    assert default["because"] == "given on the command line"
    flags = [each["flag"] for each in default["advice"]]
    assert any("--enable-prompt-tokens-details" in flag for flag in flags)
    assert any("--kv-offloading-size" in flag for flag in flags)
    [small] = [each for each in default["advice"] if "1,600 tokens" in each["lack"]]
    assert "24,000" in small["lack"]
    assert all(each["worth"] for each in default["advice"])
