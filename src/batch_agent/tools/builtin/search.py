"""web_search: one tool for three search services; the first one whose key is in the environment is used.

Keys are read at each call. They are sent in headers; SerpAPI accepts its key only in the URL. So exceptions of the HTTP
library, which may quote a URL, do not leave this module, and the key is removed from a service's error text.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
from pydantic import Field, JsonValue
from pydantic_core import from_json

from batch_agent.errors import SpecError, ToolError
from batch_agent.tools.base import Tool
from batch_agent.tools.builtin.http import read_body

_ERROR_CHARACTERS = 300
MAX_BYTES = 2_000_000
_PATIENCE = aiohttp.ClientTimeout(total=60)
_HEADERS = {"Accept-Encoding": "gzip"}


@dataclass(frozen=True, slots=True)
class _Request:
    method: str = "GET"
    headers: Mapping[str, str] | None = None
    params: Mapping[str, str] | None = None
    json: JsonValue = None


@dataclass(frozen=True, slots=True)
class _Service:
    """The request and the answer format of one service."""

    name: str
    variables: tuple[str, ...]
    endpoint: str
    request: Callable[[str, str, int], _Request]  # key, query, count
    results: tuple[str, ...]  # path to the list of results
    fields: tuple[str, str, str]  # title, address, extract

    def key(self) -> str | None:
        return next((value for name in self.variables if (value := os.environ.get(name, "").strip())), None)


def _brave(key: str, query: str, count: int) -> _Request:
    headers = {"X-Subscription-Token": key, "Accept": "application/json"}
    return _Request(headers=headers, params={"q": query, "count": str(count)})


def _serpapi(key: str, query: str, count: int) -> _Request:
    return _Request(params={"engine": "google", "q": query, "num": str(count), "api_key": key})


def _tavily(key: str, query: str, count: int) -> _Request:
    return _Request("POST", headers={"Authorization": f"Bearer {key}"}, json={"query": query, "max_results": count})


SERVICES = (
    _Service(
        "brave",
        ("BRAVE_SEARCH_API_KEY",),
        "https://api.search.brave.com/res/v1/web/search",
        _brave,
        ("web", "results"),
        ("title", "url", "description"),
    ),
    _Service(
        "serpapi",
        ("SERPAPI_KEY", "SERPAPI"),
        "https://serpapi.com/search.json",
        _serpapi,
        ("organic_results",),
        ("title", "link", "snippet"),
    ),
    _Service(
        "tavily",
        ("TAVILY_API_KEY",),
        "https://api.tavily.com/search",
        _tavily,
        ("results",),
        ("title", "url", "content"),
    ),
)


def web_search(*, endpoints: Mapping[str, str] | None = None) -> Tool[..., Coroutine[Any, Any, str]]:
    """Return the tool. ``endpoints`` replaces the URLs of services by name (brave, serpapi, tavily), for a gateway."""
    urls = {service.name: service.endpoint for service in SERVICES}
    if unknown := set(endpoints or ()) - set(urls):
        raise SpecError(f"no search service is called {unknown.pop()!r}; there are {', '.join(urls)}")
    urls.update(endpoints or {})

    @Tool.define(name="web_search", cacheable=True)
    async def search(query: str, count: Annotated[int, Field(ge=1, le=20)] = 5) -> str:
        """Search the web and return titles, addresses and extracts.

        Args:
            query: What to search for.
            count: How many results.
        """
        for service in SERVICES:
            if key := service.key():
                answer = await _ask(service, urls[service.name], key, query, count)
                return _listing(_results(service, answer), count)
        names = ", ".join(service.variables[0] for service in SERVICES)
        raise ToolError(f"web_search has no key: set one of {names} in the environment of the run")

    return search


async def _ask(service: _Service, url: str, key: str, query: str, count: int) -> JsonValue:
    request = service.request(key, query, count)
    failure = ""
    status, body = 0, b""
    try:
        async with (
            aiohttp.ClientSession(
                timeout=_PATIENCE, trust_env=True, headers=_HEADERS, auto_decompress=False
            ) as session,
            session.request(
                request.method,
                url,
                headers=request.headers,
                params=request.params,
                json=request.json,
                allow_redirects=False,
            ) as response,
        ):
            status, body = response.status, await read_body(response, MAX_BYTES + 1)
    except (aiohttp.ClientError, OSError, ValueError, zlib.error) as error:
        failure = type(error).__name__
    # Raised outside the handler, so that its context is not an exception that may quote the URL.
    if failure:
        raise ToolError(f"the search service {service.name} could not be reached ({failure})")
    if status != 200:
        said = body.decode(errors="replace").replace(key, "***")[:_ERROR_CHARACTERS]
        raise ToolError(f"the search service {service.name} answered {status}: {said}")
    if len(body) > MAX_BYTES:
        raise ToolError(f"the search service {service.name} answered with more than {MAX_BYTES:,} bytes")
    try:
        answer: JsonValue = from_json(body)
    except ValueError:
        raise ToolError(f"the search service {service.name} answered, but not with JSON") from None
    return answer


def _results(service: _Service, answer: JsonValue) -> list[tuple[str, str, str]]:
    for step in service.results:
        answer = answer.get(step) if isinstance(answer, dict) else None
    found = answer if isinstance(answer, list) else []
    title, address, extract = service.fields
    return [
        (str(item.get(title) or ""), str(item.get(address) or ""), str(item.get(extract) or ""))
        for item in found
        if isinstance(item, dict)
    ]


def _listing(results: Sequence[tuple[str, str, str]], count: int) -> str:
    if not results:
        return "No results."
    return "\n\n".join(
        f"{number}. {title}\n{address}\n{extract}".rstrip()
        for number, (title, address, extract) in enumerate(results[:count], start=1)
    )
