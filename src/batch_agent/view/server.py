"""The server of the page: static files, the record as JSON, live updates as server-sent events, and control."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.record.control import NotAlive
from batch_agent.view.bundle import STATIC, bundle
from batch_agent.view.compare import compare, differing_rows
from batch_agent.view.download import write_flat, write_rows
from batch_agent.view.query import Query
from batch_agent.view.runs import ShownRun, ShownRuns
from batch_agent.view.security import Guard, add_headers

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
MOST_ROWS = 500  # per page
MOST_SPANS = 30_000
SOON = 0.03  # seconds that a page waits for the index


class ViewServer:
    def __init__(self, runs: ShownRuns, host: str = "127.0.0.1", port: int = 0) -> None:
        self._runs, self._host, self._port = runs, host, port
        self._guard = Guard(host)
        self._streams: set[asyncio.Task[object]] = set()

    async def serve(self, ready: Callable[[str], Awaitable[None]]) -> None:
        """Call ``ready`` with the address of the page, and serve until it returns."""
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            try:
                await site.start()
            except OSError as error:
                raise SpecError(f"cannot listen on {self._host}:{self._port}: {error.strerror}") from None
            self._guard.port = runner.addresses[0][1]
            await ready(self._address())
        finally:
            for task in self._streams:
                task.cancel()
            await runner.cleanup()
            await self._runs.close()

    def _address(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "") else self._host
        host = f"[{host}]" if ":" in host else host
        named = [quote(key, safe="") for key in self._runs.first]
        place = f"#/run/{named[0]}" if len(named) == 1 else f"#/compare/{named[0]}/{named[1]}" if named else ""
        return f"http://{host}:{self._guard.port}/?token={self._guard.token}{place}"

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.check, _explaining])
        app.on_response_prepare.append(add_headers)
        get = app.router.add_get
        get("/", self._page)
        get("/static/{name}", self._static)
        get("/api/runs", self._list)
        get("/api/run", self._overview)
        get("/api/rows", self._rows)
        get("/api/row", self._row)
        get("/api/timeline", self._timeline)
        get("/api/compare", self._compare)
        get("/api/export", self._export)
        get("/api/events", self._events)
        get("/api/follow", self._follow)
        app.router.add_post("/api/control", self._control)
        return app

    # Files

    async def _page(self, request: web.Request) -> web.Response:
        return _file("index.html")

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.Response(text=bundle(), content_type=TYPES[".js"]) if name == "app.js" else _file(name)

    # The record

    async def _list(self, request: web.Request) -> web.Response:
        found = await asyncio.get_running_loop().run_in_executor(None, self._runs.in_short)
        return _json({"runs": [*found], "named": [*self._runs.first]})

    async def _overview(self, request: web.Request) -> web.Response:
        run = self._run(request)
        await run.indexed(SOON)
        return _json(await run.do(run.record.overview))

    async def _rows(self, request: web.Request) -> web.Response:
        run, query = self._run(request), _query(request.query)
        await run.indexed(SOON)
        sort, descending = _sorting(request.query)
        offset, limit = _number(request, "offset", 0), min(MOST_ROWS, _number(request, "limit", 50))
        return _json(await run.do(lambda: run.record.rows(query, sort, descending, offset, limit)))

    async def _row(self, request: web.Request) -> web.Response:
        run, row = self._run(request), request.query.get("row", "")
        await run.indexed(SOON)
        return _json(await run.do(lambda: run.record.row(row)))

    async def _timeline(self, request: web.Request) -> web.Response:
        run = self._run(request)
        since, until = (float(request.query[name]) if name in request.query else None for name in ("from", "to"))
        return _json(await run.do(lambda: run.record.timeline(since, until, MOST_SPANS)))

    async def _compare(self, request: web.Request) -> web.Response:
        one, other = self._runs.of(request.query.get("a", "")), self._runs.of(request.query.get("b", ""))
        offset, limit = _number(request, "offset", 0), min(MOST_ROWS, _number(request, "limit", 50))
        return _json(await compare(one, other, offset, limit))

    async def _export(self, request: web.Request) -> web.StreamResponse:
        """Send the rows of the current filter, all pages, as a file."""
        asked, kind = request.query, request.query.get("format", "csv")
        with tempfile.TemporaryFile() as file:
            if "b" in asked:
                one, other = self._runs.of(asked.get("a", "")), self._runs.of(asked["b"])
                name = f"{one.record.run.title}-{other.record.run.title}.csv"
                write_flat(await differing_rows(one, other), file)
            else:
                run, query, (sort, descending) = self._run(request), _query(asked), _sorting(asked)
                name = f"{run.record.run.title}.{kind}"

                def write() -> None:
                    write_rows(partial(run.record.index.records, query, sort, descending), kind, file)

                await run.do(write)
            named = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
            headers = {"Content-Type": "application/octet-stream", "Content-Disposition": named}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            file.seek(0)
            while block := file.read(1 << 20):
                await response.write(block)
        return response

    # Live updates

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, self._run(request).news())

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, self._run(request).conversations(request.query.get("row", "")))

    async def _stream(self, request: web.Request, news: AsyncGenerator[JsonObject, None]) -> web.StreamResponse:
        """Send each update as a server-sent event, and ``end`` after the last one."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await response.prepare(request)
            async for piece in news:
                await response.write(b"data: " + to_json(piece) + b"\n\n")
            await response.write(b"event: end\ndata: {}\n\n")
        except (ConnectionError, asyncio.CancelledError):
            pass  # the browser has disconnected, or the server stops
        finally:
            self._streams.discard(task)
            with suppress(RuntimeError):
                await news.aclose()
        return response

    async def _control(self, request: web.Request) -> web.Response:
        try:
            asked = from_json(await request.read())
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            raise SpecError("the body must be a JSON object")
        return _json(await self._run(request).steer(asked))

    def _run(self, request: web.Request) -> ShownRun:
        return self._runs.of(request.query.get("run", ""))


def _query(asked: Mapping[str, str]) -> Query:
    return Query(asked.get("state", ""), asked.get("error", ""), asked.get("q", ""))


def _sorting(asked: Mapping[str, str]) -> tuple[str, bool]:
    return asked.get("sort", "index"), asked.get("dir") == "desc"


def _number(request: web.Request, name: str, otherwise: int) -> int:
    text = request.query.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def _file(name: str) -> web.Response:
    path = STATIC / name
    if path.parent != STATIC or path.suffix not in TYPES or not path.is_file():
        raise web.HTTPNotFound
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


def _json(value: JsonObject, status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


@web.middleware
async def _explaining(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer our own errors as JSON with the reason."""
    try:
        return await handler(request)
    except (BatchAgentError, ValueError) as error:
        status = 409 if isinstance(error, NotAlive) else 400
        return _json({"error": str(error), "alive": not isinstance(error, NotAlive)}, status)
