"""The review on the page: each run's review in a thread of its own, and the part of the API that reviewers reach.

What a reviewer gets of a row in the audit is made by ``PeopleReview``, which leaves out all that the models said; this
module adds nothing of the record to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from aiohttp import web
from pydantic import JsonValue

from batch_agent.door import PATIENCE_SECONDS, Handler, RequestRefused, read_body, read_object
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.record.address import RunPlace
from batch_agent.record.people import PeopleReview, Shown
from batch_agent.trust.review import QUEUES, EventKind, Queue
from batch_agent.view.security import HEADERS

T = TypeVar("T")
MOST_BODY_BYTES = 1024 * 1024
PAGE, PATHS = "/review", "/api/review"
# A PDF file is shown in a frame of the page, by the browser's own viewer.
FRAMED_POLICY = "default-src 'none'; style-src 'unsafe-inline'; object-src 'self'; frame-ancestors 'self'"
FRAMED = {**HEADERS, "X-Frame-Options": "SAMEORIGIN", "Content-Security-Policy": FRAMED_POLICY}
PAGE_POLICY = f"{HEADERS['Content-Security-Policy']}; frame-src 'self'"


class ShownReview:
    """The review of a run, in its own thread."""

    def __init__(self, place: RunPlace, stage: str) -> None:
        self._place, self._stage = place, stage
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-review")
        self._review: PeopleReview | None = None

    async def do(self, function: Callable[[PeopleReview], T]) -> T:
        """Call a function with the review as it is now."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(self._opened()))

    def _opened(self) -> PeopleReview:
        """Return the review; another one if the schema or the options of the run have changed."""
        if self._review is not None and self._review.outdated:
            self._review.close()
            self._review = None
        if self._review is None:
            self._review = PeopleReview.open(self._place, self._stage)
        return self._review

    async def close(self) -> None:
        def close() -> None:
            if self._review is not None:
                self._review.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown(wait=False)


class ReviewApi:
    """The requests of reviewers. ``place_of`` finds a run by its key; a stage of it is KEY/STAGE."""

    def __init__(self, place_of: Callable[[str], RunPlace]) -> None:
        self._place_of = place_of
        self._reviews: dict[str, ShownReview] = {}

    def routes(self) -> dict[str, dict[str, Handler]]:
        posts: dict[str, Handler] = {"next": self._next, "judge": self._judge, "undo": self._undo, "leave": self._leave}
        gets: dict[str, Handler] = {PATHS: self._overview, f"{PATHS}/file": self._file}
        return {
            **{path: {"GET": handler} for path, handler in gets.items()},
            **{f"{PATHS}/{name}": {"POST": handler} for name, handler in posts.items()},
        }

    async def close(self) -> None:
        for review in self._reviews.values():
            await review.close()

    def _of(self, request: web.BaseRequest) -> ShownReview:
        key = request.query.get("run", "")
        if key not in self._reviews:
            whole, _, stage = key.partition("/")
            self._reviews[key] = ShownReview(self._place_of(whole), stage)
        return self._reviews[key]

    async def _overview(self, request: web.BaseRequest) -> web.Response:
        who = request.query.get("who", "")

        def tell(review: PeopleReview) -> JsonObject:
            review.prepare()
            return {
                "run": "/".join(filter(None, (review.whole.title, review.stage))),
                "form": review.form.to_json(),
                **_numbers(review, who),
            }

        return _json(await self._of(request).do(tell))

    async def _next(self, request: web.BaseRequest) -> web.Response:
        asked = await _body(request)
        who, queue = _who(asked), _queue(asked)
        return _json(await self._of(request).do(lambda review: _with(review, who, review.next(who, queue))))

    async def _judge(self, request: web.BaseRequest) -> web.Response:
        asked = await _body(request)
        who = _who(asked)
        only = _queue(asked, "only")
        row = asked.get("row")
        queue = _queue(asked)
        kind, digest = asked.get("kind"), asked.get("input")
        if not isinstance(row, int) or isinstance(row, bool) or queue is None:
            raise RequestRefused(400, "row must be the number of a row, and queue audit or repair")
        if kind not in ("answer", "none", "skip") or not isinstance(digest, str):
            raise RequestRefused(400, "kind must be answer, none or skip, and input the text that came with the row")

        def judge(review: PeopleReview) -> JsonObject:
            verdict = review.judge(who, row, queue, cast(EventKind, kind), asked.get("output"), digest)
            return {"disputed": verdict.kind == "disputed", **_with(review, who, review.next(who, only))}

        return _json(await self._of(request).do(judge))

    async def _undo(self, request: web.BaseRequest) -> web.Response:
        who = _who(asked := await _body(request))
        only = _queue(asked, "only")
        undone = await self._of(request).do(
            lambda review: _with(review, who, review.undo(who) or review.next(who, only))
        )
        return _json(undone)

    async def _leave(self, request: web.BaseRequest) -> web.Response:
        who = _who(await _body(request))
        await self._of(request).do(lambda review: review.free_row(who))
        return _json({})

    async def _file(self, request: web.BaseRequest) -> web.Response:
        row, number, who = (request.query.get(name, "") for name in ("row", "number", "who"))
        if not (row.isdecimal() and number.isdecimal() and len(row) < 19 and len(number) < 9):
            raise RequestRefused(400, "row and number must be numbers")
        file = await self._of(request).do(lambda review: review.file(int(row), int(number), who))
        try:
            data = await asyncio.get_running_loop().run_in_executor(None, file.path.read_bytes)
        except OSError as error:
            raise RequestRefused(404, f"{file.path.name} cannot be read: {error.strerror}") from None
        return web.Response(body=data, content_type=file.kind, headers=FRAMED)


async def _body(request: web.BaseRequest) -> JsonObject:
    return read_object(await read_body(request, PATIENCE_SECONDS, MOST_BODY_BYTES))


def _who(asked: JsonObject) -> str:
    who = asked.get("who")
    if not isinstance(who, str):
        raise RequestRefused(400, "who must be the name of the reviewer")
    return who


def _queue(asked: JsonObject, name: str = "queue") -> Queue | None:
    queue = asked.get(name)
    if queue is not None and queue not in QUEUES:
        raise RequestRefused(400, f"{name} must be audit or repair")
    return queue


def _with(review: PeopleReview, who: str, shown: Shown | None) -> JsonObject:
    if shown is not None:
        return {"row": row_json(shown), **_numbers(review, who)}
    return {"row": None, "models_have_work": review.models_have_work, **_numbers(review, who)}


def row_json(shown: Shown) -> JsonObject:
    """Return a row as a reviewer gets it."""
    row = shown.row
    said: JsonObject = {"row": row.row, "id": row.id, "queue": row.queue, "input": row.input, "value": shown.value}
    return {**said, "files": [each.to_json() for each in shown.files], "model": shown.model, "until": shown.until}


def _numbers(review: PeopleReview, who: str) -> JsonObject:
    """Return what is left, and how well people agree."""
    return {
        "left": {queue: cast(JsonValue, each._asdict()) for queue, each in review.left(who).items()},
        "lines": [*review.lines(who)],
        "works": review.whole.view().state in ("starting", "running"),
    }


def _json(value: JsonObject) -> web.Response:
    return web.Response(body=to_json(value), content_type="application/json")
