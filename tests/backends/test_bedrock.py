"""bedrock:// beyond the contract: addresses, credentials, cache points, and boto as the judge of the peer."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from tests.backends.test_bedrock_contract import frames, in_pieces, own_credentials, whole  # noqa: F401  a fixture

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.bedrock.converse import BedrockBackend
from batch_agent.backends.registry import open_backend
from batch_agent.documents import MEDIA_TYPES
from batch_agent.errors import SpecError
from batch_agent.messages import Conversation, Document, Image, Message, ToolSpec, Usage
from batch_agent.testing.contract.backend import CALLS
from batch_agent.testing.contract.peer import Say
from batch_agent.testing.contract.wire import Exchange, WireServer, answer

CLAUDE = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"


def client(server: WireServer) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(retries={"max_attempts": 1}, connect_timeout=5, read_timeout=5)
    return boto3.client(
        "bedrock-runtime", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{server.port}", config=config
    )


async def test_botos_own_client_takes_the_peers_answers_for_real_ones() -> None:
    say = Say("Let me look.", CALLS, Usage(12, 8, 5), reasoning="Hm.", sealed="sig")

    def converse(server: WireServer) -> tuple[Any, Any]:
        runtime, asked = client(server), [{"role": "user", "content": [{"text": "Hello"}]}]
        entire = runtime.converse(modelId=CLAUDE, messages=asked)
        events = list(runtime.converse_stream(modelId=CLAUDE, messages=asked)["stream"])
        return entire, events

    async with WireServer(answer(whole(say)), frames(*in_pieces(say))) as server:
        entire, events = await asyncio.to_thread(converse, server)
        ours = [exchange.path for exchange in server.requests]
    uses = [block["toolUse"] for block in entire["output"]["message"]["content"] if "toolUse" in block]
    assert [use["toolUseId"] for use in uses] == ["call_a", "call_b"]
    text = "".join(e["contentBlockDelta"]["delta"].get("text", "") for e in events if "contentBlockDelta" in e)
    assert text == "Let me look."
    assert events[-1]["metadata"]["usage"]["cacheReadInputTokens"] == 8
    backend = BedrockBackend("http://127.0.0.1:1", "us-east-1")
    request = ModelRequest(RequestShape(CLAUDE), Conversation(), "0")
    assert ours == [backend.route_of(request, streamed).url.raw_path for streamed in (False, True)]


async def test_agents_with_tools_run_on_it() -> None:
    @Tool.define(cacheable=True)
    def look_up(key: str) -> str:
        """Look up."""
        return f"value of {key}"

    async def converse(exchange: Exchange) -> None:
        last = exchange.json["messages"][-1]["content"][-1]
        if "toolResult" in last:
            await frames(*in_pieces(Say(last["toolResult"]["content"][0]["text"])))(exchange)
        else:
            call = CALLS[0].__class__("call_1", "look_up", json.dumps({"key": last["text"]}))
            await frames(*in_pieces(Say("", [call])))(exchange)

    async with WireServer(converse) as server:
        backend = f"bedrock://us-east-1/{CLAUDE}?endpoint_url=http://127.0.0.1:{server.port}"
        results = await BatchAgent.run(task="{input}", inputs=["a", "b"], tools=[look_up], backend=backend)
    assert [result.output for result in results] == ["value of a", "value of b"]


async def test_throttling_is_a_limit_of_rates_and_the_row_is_asked_again() -> None:
    kind = {"x-amzn-ErrorType": "ThrottlingException:http://internal.amazon.com/"}
    script = answer({"message": "Too many requests"}, 429, kind), answer(whole(Say("fine")))
    async with WireServer(*script) as server:
        backend = f"bedrock://us-east-1/m?endpoint_url=http://127.0.0.1:{server.port}"
        results = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend)
    assert (results[0].output, results[0].attempts) == ("fine", 2)


async def test_many_requests_are_in_flight_at_once() -> None:
    everybody = asyncio.Barrier(200)

    async def converse(exchange: Exchange) -> None:
        async with asyncio.timeout(20):
            await everybody.wait()
        await answer(whole(Say("fine")))(exchange)

    async with WireServer(converse) as server:
        backend = f"bedrock://us-east-1/m?endpoint_url=http://127.0.0.1:{server.port}"
        rows = [str(n) for n in range(200)]
        results = await BatchAgent.run(task="{input}", inputs=rows, backend=backend, max_inflight=200)
    assert all(results)


def body_of(model: str, system: str, *, tools: bool = True, turns: int = 1) -> dict[str, Any]:
    backend = BedrockBackend("http://h", "us-east-1", model=model)
    spec = (ToolSpec("search", "Search.", {"type": "object", "properties": {}}),) if tools else ()
    messages = [Message("system", system)] if system else []
    for turn in range(turns):
        messages += [Message("user", f"question {turn} " * 2000), Message("assistant", "answer")]
    request = ModelRequest(RequestShape(model, tools=spec), Conversation(messages[:-1]), "0", turns_left=3)
    body: dict[str, Any] = json.loads(backend.body_of(request))
    return body


def points(value: object) -> int:
    return json.dumps(value).count("cachePoint")


@pytest.mark.parametrize(
    ("model", "system", "expected"),
    [
        (CLAUDE, "long " * 2000, (0, 1, 2)),
        (CLAUDE, "short", (0, 0, 2)),
        (CLAUDE, "", (0, 0, 2)),
        ("amazon.nova-pro-v1:0", "long " * 2000, (0, 1, 2)),
        ("meta.llama3-70b-instruct-v1:0", "long " * 2000, (0, 0, 0)),
        ("anthropic.claude-3-haiku-20240307-v1:0", "long " * 2000, (0, 0, 0)),
    ],
)
def test_cache_points_stand_behind_what_is_long_enough_where_the_model_keeps_it(
    model: str, system: str, expected: tuple[int, int, int]
) -> None:
    body = body_of(model, system, turns=2)
    assert (points(body["toolConfig"]), points(body.get("system", [])), points(body["messages"])) == expected
    assert points(body) <= 4


@pytest.mark.parametrize(
    ("url", "model", "path"),
    [
        ("bedrock://us-east-1", CLAUDE, f"/model/{CLAUDE.replace(':', '%3A')}/converse"),
        (
            "bedrock://us-east-1/arn:aws:bedrock:us-east-1:1234:inference-profile/us.x",
            None,
            "/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A1234%3Ainference-profile%2Fus.x/converse",
        ),
    ],
)
async def test_ids_of_models_and_profiles_are_a_part_of_the_path(url: str, model: str | None, path: str) -> None:
    backend, named = open_backend(url, model=model, api_key=None)
    assert isinstance(backend, BedrockBackend)
    name = named or (await backend.models())[0]
    request = ModelRequest(RequestShape(name), Conversation(), "0")
    route = backend.route_of(request, False)
    assert str(route.url) == f"https://bedrock-runtime.us-east-1.amazonaws.com{path}"


def test_a_provider_before_the_models_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    backend, model = open_backend(None, model=f"bedrock/{CLAUDE}", api_key=None)
    assert (backend.name, model) == ("bedrock://eu-central-1", CLAUDE)
    assert backend.capabilities.native_schema


@pytest.mark.parametrize(
    ("url", "environ", "why"),
    [
        ("bedrock://", {}, "needs a region"),
        ("bedrock://us-east-1/m?colour=red", {}, "no option 'colour'"),
        ("bedrock://us-east-1/m?endpoint_url=http://h", {"AWS_BEARER_TOKEN_BEDROCK": "t"}, "over https only"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(url: str, environ: dict[str, str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        open_backend(url, model=None, api_key=None, environ=environ)


def test_without_boto_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "botocore":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.delitem(sys.modules, "batch_agent.backends.bedrock.converse")
    with pytest.raises(SpecError, match="pip install boto3"):
        open_backend("bedrock://us-east-1/model")
    assert open_backend("bedrock://us-east-1/model", sends=False)[0].name == "bedrock://us-east-1"


async def test_missing_credentials_are_known_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SpecError, match="no AWS credentials"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend="bedrock://us-east-1/m")


async def test_files_are_document_blocks_that_botos_own_client_takes() -> None:
    kinds = ("application/pdf", MEDIA_TYPES["docx"], "text/html")
    files = tuple(Document(f"data:{kind};base64,Zm9v", name="../a b_c.x") for kind in kinds)
    async with WireServer(answer(whole(Say("fine"))), answer(whole(Say("fine")))) as server:
        async with BedrockBackend(f"http://127.0.0.1:{server.port}", "us-east-1") as backend:
            talk = Conversation([Message("user", ("Read.", *files))])
            await backend.infer(ModelRequest(RequestShape("m"), talk, "0"))
        ours = server.requests[0].json["messages"]
        blocks = [{"format": kind, "name": "document", "source": {"bytes": b"foo"}} for kind in ("pdf", "docx", "html")]
        asked = [{"role": "user", "content": [{"text": "Read."}, *({"document": block} for block in blocks)]}]
        await asyncio.to_thread(lambda: client(server).converse(modelId="m", messages=asked))
        theirs = server.requests[1].json["messages"]
    without_marks = [block for block in ours[0]["content"] if "cachePoint" not in block]
    assert without_marks == theirs[0]["content"]


async def test_an_image_at_an_address_fails_its_row_in_words() -> None:
    async with WireServer(answer(whole(Say("fine")))) as server:
        backend = f"bedrock://us-east-1/m?endpoint_url=http://127.0.0.1:{server.port}"
        rows = [{"photo": Image("https://h/a.png")}]
        results = await BatchAgent.run(task="{photo}", inputs=rows, backend=backend)
    assert "does not fetch images" in str(results[0].error)
    assert server.requests == []
