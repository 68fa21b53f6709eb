"""JobServer: the batch APIs of OpenAI and Anthropic on a real socket, as strict as the real ones, with jobs of any
duration.

``script`` answers each request of a job, as in a ScriptedServer, in the format of its wire. A job is done at its
``looks``-th poll. With ``expires_after`` only that many requests of each are answered, and the rest expire.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

import orjson
from aiohttp import web

MAX_BODY_BYTES = 512 * 1024 * 1024
MOST_ID_CHARACTERS = 64

Script = Callable[[dict[str, Any]], dict[str, Any] | int]
"""Takes the body of a request and returns the body of its answer, or the status of its refusal."""


@dataclass(slots=True)
class ServedJob:
    id: str
    requests: dict[str, dict[str, Any]]
    lines: list[bytes] = field(default_factory=list)  # their original bodies
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    looked: int = 0
    status: str = "in_progress"
    done: list[str] = field(default_factory=list)  # answered custom ids, newest first


class JobServer:
    """``jobs`` lists the submitted jobs, in order. ``refuse`` lists statuses for the next requests, one each."""

    def __init__(self, script: Script, *, looks: int = 1, expires_after: int | None = None, invalid: str = "") -> None:
        self._script = script
        self._looks, self._expires_after, self._invalid = looks, expires_after, invalid
        self._files: dict[str, bytes] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.jobs: list[ServedJob] = []
        self.refuse: list[int] = []  # statuses for the next requests, one each
        self.refusal: dict[str, Any] = {"error": {"message": "no"}}  # the body beside a status of the script
        self.drop = 0  # number of submissions that are accepted and never answered

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._refusing])
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/files", self._upload),
                web.get("/v1/files/{id}/content", self._download),
                web.post("/v1/batches", self._create),
                web.get("/v1/batches", self._list),
                web.get("/v1/batches/{id}", self._retrieve),
                web.post("/v1/batches/{id}/cancel", self._cancel),
                web.post("/v1/messages/batches", self._create_messages),
                web.get("/v1/messages/batches", self._list_messages),
                web.get("/v1/messages/batches/{id}", self._retrieve_messages),
                web.get("/v1/messages/batches/{id}/results", self._results_of_messages),
                web.post("/v1/messages/batches/{id}/cancel", self._cancel_messages),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self._runner, self._port = runner, runner.addresses[0][1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _refusing(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        return _refusal(self.refuse.pop(0), "not now") if self.refuse else await handler(request)

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "test-model", "object": "model"}]})

    # OpenAI

    async def _upload(self, http: web.Request) -> web.Response:
        form = await http.post()
        file = form.get("file")
        if form.get("purpose") != "batch" or not isinstance(file, web.FileField):
            return _refusal(400, "a file and the purpose batch are needed")
        name = f"file-{len(self._files)}"
        self._files[name] = file.file.read()
        return web.json_response({"id": name, "object": "file", "purpose": "batch", "filename": file.filename})

    async def _create(self, http: web.Request) -> web.Response:
        asked = await http.json()
        if asked.keys() - {"input_file_id", "endpoint", "completion_window", "metadata"}:
            return _refusal(400, "unknown parameter")
        if asked.get("completion_window") != "24h" or asked.get("endpoint") != "/v1/chat/completions":
            return _refusal(400, "completion_window or endpoint is not one that is known")
        content = self._files.get(asked.get("input_file_id", ""))
        if content is None:
            return _refusal(404, "no such file")
        lines = [orjson.loads(line) for line in content.splitlines() if line]
        job = ServedJob(
            f"batch_{len(self.jobs)}",
            {line["custom_id"]: line["body"] for line in lines},
            [line[line.index(b'"body":') + 7 : -1] for line in content.splitlines() if line],
            asked["metadata"],
        )
        wrong = _wrong([line["custom_id"] for line in lines]) or self._invalid
        if wrong or any(line["url"] != asked["endpoint"] or line["method"] != "POST" for line in lines):
            job.status = "failed"
        self._take(job, http)
        return web.json_response(self._openai(job))

    async def _list(self, http: web.Request) -> web.Response:
        jobs, more = self._page(http, "after", most=100)
        listed = [self._openai(job) for job in jobs]
        return web.json_response({"object": "list", "data": listed, "has_more": more})

    async def _retrieve(self, http: web.Request) -> web.Response:
        job = self._job(http)
        self._look(job, ended="completed")
        return web.json_response(self._openai(job))

    async def _cancel(self, http: web.Request) -> web.Response:
        job = self._job(http)
        job.status = "cancelled"
        return web.json_response(self._openai(job))

    def _openai(self, job: ServedJob) -> dict[str, Any]:
        told: dict[str, Any] = {"id": job.id, "object": "batch", "status": job.status, "metadata": job.metadata}
        told["created_at"] = int(job.created_at)
        if job.status == "failed":
            told["errors"] = {"data": [{"code": "invalid", "message": self._invalid or "the file is not valid"}]}
        if job.status in ("completed", "expired"):
            told["output_file_id"] = f"{job.id}-output"
            told["error_file_id"] = f"{job.id}-error"
        return told

    async def _download(self, http: web.Request) -> web.Response:
        name, _, kind = http.match_info["id"].rpartition("-")
        job = next(job for job in self.jobs if job.id == name)
        lines = []
        for own in job.done if kind == "output" else [own for own in job.requests if own not in job.done]:
            answer = self._script(job.requests[own]) if kind == "output" else None
            lines.append({"id": f"r-{own}", "custom_id": own, **_openai_line(answer, self.refusal)})
        return web.Response(body=b"".join(orjson.dumps(line) + b"\n" for line in lines))

    # Anthropic

    async def _create_messages(self, http: web.Request) -> web.Response:
        asked = await http.json()
        requests = asked.get("requests")
        if asked.keys() != {"requests"} or not requests or any(r.keys() != {"custom_id", "params"} for r in requests):
            return _refusal(400, "requests: a list of custom_id and params")
        if wrong := _wrong([request["custom_id"] for request in requests]):
            return _refusal(400, wrong)
        job = ServedJob(f"msgbatch_{len(self.jobs)}", {request["custom_id"]: request["params"] for request in requests})
        self._take(job, http)
        return web.json_response(_anthropic(job))

    async def _list_messages(self, http: web.Request) -> web.Response:
        jobs, more = self._page(http, "after_id", most=1000)
        return web.json_response({"data": [_anthropic(job) for job in jobs], "has_more": more})

    async def _retrieve_messages(self, http: web.Request) -> web.Response:
        job = self._job(http)
        self._look(job, ended="ended")
        return web.json_response(_anthropic(job))

    async def _cancel_messages(self, http: web.Request) -> web.Response:
        job = self._job(http)
        job.status = "cancelled"
        return web.json_response(_anthropic(job))

    async def _results_of_messages(self, http: web.Request) -> web.Response:
        job = self._job(http)
        lines = [{"custom_id": own, "result": self._result(job, own)} for own in [*job.done, *job.requests]]
        unique = {line["custom_id"]: line for line in reversed(lines)}
        return web.Response(body=b"".join(orjson.dumps(line) + b"\n" for line in unique.values()))

    def _result(self, job: ServedJob, own: str) -> dict[str, Any]:
        if own not in job.done:
            return {"type": "expired"}
        answer = self._script(job.requests[own])
        if isinstance(answer, int):
            error = {"type": _ANTHROPIC_ERRORS.get(answer, "api_error"), "message": "no"}
            return {"type": "errored", "error": {"type": "error", "error": error}}
        return {"type": "succeeded", "message": answer}

    # Jobs

    def _take(self, job: ServedJob, http: web.Request) -> None:
        self.jobs.append(job)
        if self.drop:
            self.drop -= 1
            assert http.transport is not None
            http.transport.abort()

    def _page(self, http: web.Request, cursor: str, *, most: int) -> tuple[list[ServedJob], bool]:
        """Return a page, newest first, and whether there are more."""
        jobs, after = self.jobs[::-1], http.query.get(cursor)
        start = next((place for place, job in enumerate(jobs, 1) if job.id == after), 0)
        end = start + min(most, int(http.query.get("limit", "20")))
        return jobs[start:end], end < len(jobs)

    def _job(self, http: web.Request) -> ServedJob:
        found = next((job for job in self.jobs if job.id == http.match_info["id"]), None)
        if found is None:
            raise web.HTTPNotFound(text='{"error":{"message":"no such job"}}', content_type="application/json")
        return found

    def _look(self, job: ServedJob, *, ended: str) -> None:
        job.looked += 1
        if job.status == "in_progress" and job.looked >= self._looks:
            # In no order, like the real APIs.
            job.done = list(job.requests)[: self._expires_after][::-1]
            job.status = ended if len(job.done) == len(job.requests) or ended == "ended" else "expired"


_ANTHROPIC_ERRORS = {400: "invalid_request_error", 429: "rate_limit_error", 529: "overloaded_error"}


def _openai_line(answer: dict[str, Any] | int | None, refusal: dict[str, Any]) -> dict[str, Any]:
    if answer is None:
        return {"response": None, "error": {"code": "batch_expired", "message": "it could not be done in time"}}
    status, body = (answer, refusal) if isinstance(answer, int) else (200, answer)
    return {"response": {"status_code": status, "request_id": "q", "body": body}, "error": None}


def _anthropic(job: ServedJob) -> dict[str, Any]:
    ended = job.status != "in_progress"
    url = f"/v1/messages/batches/{job.id}/results" if ended else None
    status = "ended" if ended else "in_progress"
    made = datetime.fromtimestamp(job.created_at, UTC).isoformat()
    told = {"id": job.id, "type": "message_batch", "processing_status": status, "results_url": url, "created_at": made}
    counts = {"processing": 0 if ended else len(job.requests), "succeeded": len(job.done) if ended else 0}
    return {**told, "request_counts": {**counts, "expired": len(job.requests) - sum(counts.values())}}


def _wrong(ids: list[str]) -> str:
    if len(set(ids)) != len(ids):
        return "a custom_id comes twice"
    return "a custom_id is too long" if any(len(own) > MOST_ID_CHARACTERS for own in ids) else ""


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
