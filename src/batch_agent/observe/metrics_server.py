"""``GET /metrics`` of a run, for Prometheus. Listens on loopback unless the address names another host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batch_agent.errors import SpecError
from batch_agent.observe.exposition import CONTENT_TYPE

if TYPE_CHECKING:
    from aiohttp import web

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
    from aiohttp import web  # imported only by a run with metrics

    host, port = read_place(place)
    app = web.Application()
    app.router.add_get("/metrics", metrics_handler(page))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = error.strerror or str(error)
            raise SpecError(f"metrics_port: cannot listen on {host}:{port}: {why}; 0 takes a free port") from None
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


def metrics_handler(page: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return an aiohttp handler that answers with the page."""

    async def metrics(request: web.Request) -> web.Response:
        return metrics_response(page())

    return metrics


def metrics_response(text: str) -> web.Response:
    from aiohttp import web

    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
