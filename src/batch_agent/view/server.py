"""The server of the page: static files, the record as JSON, live updates as server-sent events, and control."""

from __future__ import annotations

import asyncio
import csv
import io
import math
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import IO, cast
from urllib.parse import quote

from aiohttp import web

from batch_agent.door import PATIENCE_SECONDS, Door, Handler, RequestRefused, read_body, read_object, routes
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import to_json
from batch_agent.files.tables import CSV, Record, as_text, columns_of, write_records
from batch_agent.messages import JsonObject
from batch_agent.record.control import NotAlive
from batch_agent.view.compare import compare, differing_rows
from batch_agent.view.record import Query
from batch_agent.view.review import PAGE, PAGE_POLICY, PATHS, ReviewApi
from batch_agent.view.runs import ShownRun, ShownRuns
from batch_agent.view.security import HEADERS, Guard, add_headers, static_file

MOST_ROWS = 500  # per page
MOST_SPANS = 30_000
MOST_BODY_BYTES = 1024 * 1024
LARGEST_NUMBER = 2**53  # of an offset: SQLite takes 64 bits
SOON = 0.03  # seconds that a page waits for the index


class ViewServer:
    def __init__(self, runs: ShownRuns, host: str = "127.0.0.1", port: int = 0, *, review: str = "") -> None:
        """``review``: the address is the link for the reviewers of the run with this key."""
        self._runs = runs
        self._host = host
        self._port = port
        self._reviewed = review
        self._review = ReviewApi(runs.place)
        self._guard = Guard(self._routes(), is_review)
        self._streams: set[asyncio.Task[object]] = set()

    async def serve(self, ready: Callable[[str], Awaitable[None]]) -> None:
        """Call ``ready`` with the address of the page, and serve until it returns."""
        door = self._guard.door = Door(self._handle, _refused, host=self._host, port=self._port)
        try:
            await door.__aenter__()
            await ready(self._address(door.port))
        finally:
            for task in self._streams:
                task.cancel()
            await door.__aexit__()
            await self._review.close()
            await self._runs.close()

    def _address(self, port: int) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "") else self._host
        host = f"[{host}]" if ":" in host else host
        if self._reviewed:
            return f"http://{host}:{port}{self._link(self._reviewed)}"
        named = [quote(key, safe="") for key in self._runs.first]
        place = f"#/run/{named[0]}" if len(named) == 1 else f"#/compare/{named[0]}/{named[1]}" if named else ""
        return f"http://{host}:{port}/?token={self._guard.token}{place}"

    def _link(self, key: str) -> str:
        """Return the link for the reviewers of a run, without the host."""
        return f"{PAGE}?run={quote(key, safe='')}&token={self._guard.review_token(key)}"

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._guard.handle(request)
        except (BatchAgentError, ValueError, OverflowError) as error:  # of our own code, about what was asked for
            alive = not isinstance(error, NotAlive)
            response = _json({"error": str(error), "alive": alive}, 400 if alive else 409)
        return response if response.prepared else add_headers(response)

    def _routes(self) -> Handler:
        shown = {
            "/": self._page,
            "/static/*": self._static,
            "/api/runs": self._list,
            "/api/run": self._overview,
            "/api/rows": self._rows,
            "/api/row": self._row,
            "/api/timeline": self._timeline,
            "/api/compare": self._compare,
            "/api/export": self._export,
            "/api/events": self._events,
            "/api/follow": self._follow,
            "/api/link": self._review_link,
            PAGE: self._review_page,
        }
        acts = {"/api/control": {"POST": self._control}}
        return routes({**{path: {"GET": get} for path, get in shown.items()}, **acts, **self._review.routes()})

    # Files

    async def _page(self, request: web.BaseRequest) -> web.Response:
        return static_file("index.html")

    async def _static(self, request: web.BaseRequest) -> web.Response:
        return static_file(request.path.removeprefix("/static/"))

    async def _review_page(self, request: web.BaseRequest) -> web.Response:
        self._runs.place(request.query.get("run", "").partition("/")[0])  # raises SpecError if there is none
        page = static_file("review.html")
        page.headers["Content-Security-Policy"] = PAGE_POLICY
        return page

    async def _review_link(self, request: web.BaseRequest) -> web.Response:
        """Send the link for reviewers; they cannot reach this themselves."""
        key = request.query.get("run", "")
        self._runs.place(key.partition("/")[0])
        return _json({"link": self._link(key)})

    # The record

    async def _list(self, request: web.BaseRequest) -> web.Response:
        found = await asyncio.get_running_loop().run_in_executor(None, self._runs.in_short)
        return _json({"runs": [*found], "named": [*self._runs.first]})

    async def _overview(self, request: web.BaseRequest) -> web.Response:
        run = self._run(request)
        await run.indexed(SOON)
        return _json(await run.do(run.record.overview))

    async def _rows(self, request: web.BaseRequest) -> web.Response:
        run, query = self._run(request), _query(request.query)
        await run.indexed(SOON)
        sort, descending = _sorting(request.query)
        offset = _number(request, "offset", 0)
        limit = min(MOST_ROWS, _number(request, "limit", 50))
        return _json(await run.do(lambda: run.record.rows(query, sort, descending, offset, limit)))

    async def _row(self, request: web.BaseRequest) -> web.Response:
        run, row = self._run(request), request.query.get("row", "")
        await run.indexed(SOON)
        return _json(await run.do(lambda: run.record.row(row)))

    async def _timeline(self, request: web.BaseRequest) -> web.Response:
        run = self._run(request)
        since, until = _seconds(request, "from"), _seconds(request, "to")
        return _json(await run.do(lambda: run.record.timeline(since, until, MOST_SPANS)))

    async def _compare(self, request: web.BaseRequest) -> web.Response:
        one = self._runs.of(request.query.get("a", ""))
        other = self._runs.of(request.query.get("b", ""))
        offset = _number(request, "offset", 0)
        limit = min(MOST_ROWS, _number(request, "limit", 50))
        return _json(await compare(one, other, offset, limit))

    async def _export(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send the rows of the current filter, all pages, as a file."""
        asked, kind = request.query, request.query.get("format", "csv")
        with tempfile.TemporaryFile() as file:
            if "b" in asked:
                one, other = self._runs.of(asked.get("a", "")), self._runs.of(asked["b"])
                name = f"{one.record.run.title}-{other.record.run.title}.csv"
                write_flat(await differing_rows(one, other), file)
            else:
                run = self._run(request)
                query = _query(asked)
                sort, descending = _sorting(asked)
                name = f"{run.record.run.title}.{kind}"

                def write() -> None:
                    write_rows(partial(run.record.index.records, query, sort, descending), kind, file)

                await run.do(write)
            named = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
            headers = {**HEADERS, "Content-Type": "application/octet-stream", "Content-Disposition": named}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            file.seek(0)
            while block := file.read(1 << 20):
                await response.write(block)
        return response

    # Live updates

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._stream(request, self._run(request).news())

    async def _follow(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._stream(request, self._run(request).conversations(request.query.get("row", "")))

    async def _stream(self, request: web.BaseRequest, news: AsyncGenerator[JsonObject, None]) -> web.StreamResponse:
        """Send each update as a server-sent event, and ``end`` after the last one."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
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

    async def _control(self, request: web.BaseRequest) -> web.Response:
        asked = read_object(await read_body(request, PATIENCE_SECONDS, MOST_BODY_BYTES))
        return _json(await self._run(request).steer(asked))

    def _run(self, request: web.BaseRequest) -> ShownRun:
        return self._runs.of(request.query.get("run", ""))


def is_review(path: str) -> bool:
    """Return whether reviewers reach this path."""
    return path in (PAGE, PATHS, "/static/review-page.js", "/static/app.css") or path.startswith(f"{PATHS}/")


def _query(asked: Mapping[str, str]) -> Query:
    return Query(asked.get("state", ""), asked.get("error", ""), asked.get("q", ""), asked.get("cell", ""))


def _sorting(asked: Mapping[str, str]) -> tuple[str, bool]:
    return asked.get("sort", "index"), asked.get("dir") == "desc"


def _number(request: web.BaseRequest, name: str, otherwise: int) -> int:
    text = request.query.get(name, "")
    if not text.isdecimal():
        return otherwise
    return min(int(text), LARGEST_NUMBER) if len(text) < 20 else LARGEST_NUMBER


def _seconds(request: web.BaseRequest, name: str) -> float | None:
    text = request.query.get(name)
    if text is None:
        return None
    seconds = float(text)
    if not math.isfinite(seconds):
        raise RequestRefused(400, f"{name} must be a number of seconds, not {text}")
    return seconds


def _json(value: JsonObject, status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def _refused(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    """Return an error as the page reads it: JSON, or text for a person in front of a browser."""
    if request.path.startswith("/api/"):
        return cast(web.Response, add_headers(_json({"error": str(refused), "alive": True}, refused.status)))
    answer = web.Response(status=refused.status, text=f"{refused.status}: {refused}\n")
    return cast(web.Response, add_headers(answer))


def write_rows(records: Callable[[], Iterable[Record]], kind: str, stream: IO[bytes]) -> None:
    """Write rows as ``csv`` or ``jsonl``. A table needs two passes."""
    if kind == "jsonl":
        stream.writelines(to_json(record) + b"\n" for record in records())
    elif kind == "csv":
        write_records(records(), columns_of(records()), stream, CSV)
    else:
        raise SpecError("the formats are csv and jsonl")


def write_flat(rows: Iterable[Record], stream: IO[bytes]) -> None:
    """Write rows that all have the same fields as CSV."""
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        if not number:
            writer.writerow(row)
        writer.writerow(["" if cell is None else as_text(cell) for cell in row.values()])
    text.flush()
    text.detach()
