import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from batch_agent.errors import SpecError, ToolError
from batch_agent.tools import Tool, web_search
from batch_agent.tools.builtin.search import MAX_BYTES

KEY = "sk-very-secret-key"
VARIABLES = ("BRAVE_SEARCH_API_KEY", "SERPAPI_KEY", "SERPAPI", "TAVILY_API_KEY")


class Services:
    """The three services on one loopback server, in the JSON they really speak."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.respond: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.endpoints: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.respond is not None:
            return await self.respond(request)
        match request.path:
            case "/res/v1/web/search":
                assert request.headers["X-Subscription-Token"] == KEY
                self.seen.append(f"brave {request.query['q']} {request.query['count']}")
                results = [{"title": "B", "url": "https://b.example", "description": "from brave"}]
                return web.json_response({"type": "search", "web": {"type": "search", "results": results}})
            case "/search.json":
                assert request.query["api_key"] == KEY
                self.seen.append(f"serpapi {request.query['q']} {request.query['num']}")
                found = [{"position": 1, "title": "S", "link": "https://s.example", "snippet": "from serpapi"}]
                return web.json_response({"search_metadata": {"status": "Success"}, "organic_results": found})
            case "/search":
                assert request.headers["Authorization"] == f"Bearer {KEY}"
                body = await request.json()
                self.seen.append(f"tavily {body['query']} {body['max_results']}")
                items = [{"title": "T", "url": "https://t.example", "content": "from tavily", "score": 0.9}]
                return web.json_response({"query": body["query"], "results": items})
        return web.Response(status=404)


@pytest.fixture
async def services(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Services]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    services = Services()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", services.handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    services.endpoints = {
        "brave": str(server.make_url("/res/v1/web/search")),
        "serpapi": str(server.make_url("/search.json")),
        "tavily": str(server.make_url("/search")),
    }
    yield services
    await server.close()


@pytest.mark.parametrize(
    ("variable", "service"),
    [
        ("BRAVE_SEARCH_API_KEY", "brave"),
        ("SERPAPI_KEY", "serpapi"),
        ("SERPAPI", "serpapi"),
        ("TAVILY_API_KEY", "tavily"),
    ],
)
async def test_the_service_whose_key_is_set_answers(
    services: Services, monkeypatch: pytest.MonkeyPatch, variable: str, service: str
) -> None:
    monkeypatch.setenv(variable, KEY)
    text = await web_search(endpoints=services.endpoints)("bees & flowers", count=3)
    letter = service[0]
    assert text == f"1. {letter.upper()}\nhttps://{letter}.example\nfrom {service}"
    assert services.seen == [f"{service} bees & flowers 3"]


async def test_without_a_key_the_error_says_how_to_set_one(services: Services) -> None:
    with pytest.raises(ToolError, match="BRAVE_SEARCH_API_KEY, SERPAPI_KEY, TAVILY_API_KEY"):
        await Tool.web_search("bees")
    assert services.seen == []


async def test_an_empty_key_is_no_key(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAVE_SEARCH_API_KEY", " ")
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    await web_search(endpoints=services.endpoints)("bees")
    assert services.seen == ["tavily bees 5"]


@pytest.mark.parametrize("body", ["{}", '{"web": null}', '{"web": {"results": []}}', "[]", '{"web": {"results": [3]}}'])
async def test_an_answer_without_results_says_so(
    services: Services, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setenv("BRAVE_SEARCH_API_KEY", KEY)

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=body)

    services.respond = respond
    assert await web_search(endpoints=services.endpoints)("bees") == "No results."


@pytest.mark.parametrize("packed", [False, True])
async def test_an_answer_that_arrives_in_pieces_is_read_to_its_end(
    services: Services, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setenv("BRAVE_SEARCH_API_KEY", KEY)
    body = json.dumps({"web": {"results": [{"title": "B", "url": "u", "description": "x" * 100_000}]}}).encode()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Encoding": "gzip"} if packed else {})
        await response.prepare(request)
        data = gzip.compress(body) if packed else body
        for start in range(0, len(data), len(data) // 3):
            await response.write(data[start : start + len(data) // 3])
            await asyncio.sleep(0.01)
        return response

    services.respond = respond
    assert (await web_search(endpoints=services.endpoints)("bees")).endswith("x" * 100_000)


async def test_an_answer_without_end_is_given_up(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAVE_SEARCH_API_KEY", KEY)

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text="[" + "1," * MAX_BYTES)

    services.respond = respond
    with pytest.raises(ToolError, match="brave answered with more than 2,000,000 bytes"):
        await web_search(endpoints=services.endpoints)("bees")


def chain(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("variable", ["BRAVE_SEARCH_API_KEY", "SERPAPI_KEY", "TAVILY_API_KEY"])
@pytest.mark.parametrize("how", ["echo", "redirect", "not JSON", "drop"])
async def test_a_key_is_in_no_message_log_or_exception(
    services: Services,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    how: str,
) -> None:
    monkeypatch.setenv(variable, KEY)
    caplog.set_level(logging.DEBUG)

    async def respond(request: web.Request) -> web.Response:
        match how:
            case "echo":
                return web.Response(status=401, text=f"wrong key {KEY} in {request.headers} {request.url}")
            case "redirect":
                return web.Response(status=302, headers={"Location": str(request.url)})
            case "not JSON":
                return web.Response(text=f"<html>{KEY}")
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    services.respond = respond
    with pytest.raises(ToolError) as caught:
        await web_search(endpoints=services.endpoints)("bees")
    for error in chain(caught.value):
        assert KEY not in str(error) and KEY not in repr(error)
    assert KEY not in "".join(record.getMessage() for record in caplog.records if record.name != "aiohttp.access")
    assert "search service" in str(caught.value)


async def test_a_service_that_cannot_be_reached_is_an_error(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERPAPI", KEY)
    with pytest.raises(ToolError, match="serpapi could not be reached") as caught:
        await web_search(endpoints={"serpapi": "http://127.0.0.1:1/"})("bees")
    assert caught.value.__context__ is None


def test_an_unknown_service_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="brave, serpapi, tavily"):
        web_search(endpoints={"altavista": "http://x"})


def test_a_search_is_cacheable_and_its_count_is_bounded() -> None:
    assert Tool.web_search.cacheable
    count = Tool.web_search.spec.parameters["properties"]["count"]  # type: ignore[index, call-overload]
    assert (count["minimum"], count["maximum"], count["default"]) == (1, 20, 5)
