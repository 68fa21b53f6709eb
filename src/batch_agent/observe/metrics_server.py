"""``GET /metrics`` of a run, for Prometheus. Listens on loopback unless the address names another host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batch_agent.errors import SpecError
from batch_agent.observe.exposition import CONTENT_TYPE

if TYPE_CHECKING:
    from aiohttp import web

    from batch_agent.door import RequestRefused

LOOPBACK = "127.0.0.1"
MOST_PORT = 65535


def read_place(value: int | str) -> tuple[str, int]:
    """Return host and port of ``metrics_port``. Raises SpecError."""
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or int(port) > MOST_PORT or (isinstance(value, str) and ":" in value and not host):
        raise SpecError(f"metrics_port: must be a port from 0 to {MOST_PORT}, or HOST:PORT (got {value!r})")
    return host.strip("[]") or LOOPBACK, int(port)


@asynccontextmanager
async def serve_metrics(place: int | str, page: Callable[[], str]) -> AsyncIterator[str]:
    """Serve the page while entered; yields the URL. Raises SpecError if the port is in use."""
    from batch_agent.door import Door, routes  # it imports aiohttp, which only a run with metrics needs

    async def metrics(request: web.BaseRequest) -> web.Response:
        return metrics_response(page())

    host, port = read_place(place)
    door = Door(routes({"/metrics": {"GET": metrics}}), _refused, host=host, port=port)
    try:
        await door.__aenter__()
    except SpecError as error:
        raise SpecError(f"metrics_port: {error}") from None
    try:
        yield f"{door.url}/metrics"
    finally:
        await door.__aexit__()


def metrics_response(text: str) -> web.Response:
    from aiohttp import web

    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _refused(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    from aiohttp import web

    return web.Response(status=refused.status, text=f"{refused}\n")
