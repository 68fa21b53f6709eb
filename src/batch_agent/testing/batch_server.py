"""``BatchServer``: the batch APIs of OpenAI and Anthropic on a real socket, for trying a batch run without a provider.

Scripts and replies are those of ScriptedServer; a request is answered when its job is done. Strict on purpose: a client
that passes here sends nothing that the APIs are known to refuse.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

import orjson
from aiohttp import BodyPartReader, web

from batch_agent.backends.http.wire import mapping, objects_of
from batch_agent.door import PATIENCE_SECONDS, Handler, RequestRefused, json_response, read_body, read_object
from batch_agent.messages import JsonObject
from batch_agent.testing.messages_server import MessagesRequest, MessagesServer
from batch_agent.testing.messages_server import error_object as messages_error
from batch_agent.testing.replies import Body, Fail, Hang, Say
from batch_agent.testing.wire import Request, Script, Wire, check_request, error_object, track_of

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
OPEN = ("in_progress", "finalizing")
MOST_BYTES = 256 * 1024 * 1024
MOST_REQUESTS = {CHAT: 50_000, MESSAGES: 100_000}
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(slots=True, eq=False)
class BatchJob:
    """A job as the server has it. ``status`` is in OpenAI's words, for both APIs."""

    id: str
    requests: dict[str, Request]  # by their custom id
    metadata: JsonObject = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    polls: int = 0  # how often its state was asked for
    status: str = "in_progress"
    wrong: str = ""  # why it failed as a whole
    answers: dict[str, tuple[int, JsonObject]] = field(default_factory=dict)  # status and body; others expired


class BatchServer(MessagesServer):
    """``BatchServer(script)`` serves both APIs; ``openai_url`` and ``anthropic_url`` are backends at it.

    A job is done at its ``polls``-th poll. With ``expires_after`` only that many requests of a job are answered, and
    the rest expire; ``Hang`` in the script expires one. With ``invalid`` every job of OpenAI's API fails with that
    message. ``jobs`` lists the submitted jobs. ``refuse_next`` lists statuses for the next HTTP requests, one each;
    ``drop_next`` is the number of submissions that are accepted and never answered. A reply's ``latency`` is ignored.
    """

    paths: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        script: Script | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Sequence[str] | None = None,
        api_key: str | None = None,
        polls: int = 1,
        expires_after: int | None = None,
        invalid: str = "",
    ) -> None:
        super().__init__(script, host=host, port=port, models=models, api_key=api_key)
        self.polls = polls
        self.expires_after = expires_after
        self.invalid = invalid
        self.jobs: list[BatchJob] = []
        self.refuse_next: list[int] = []
        self.drop_next = 0
        self._files: dict[str, bytes] = {}

    @property
    def openai_url(self) -> str:
        """Return the backend URL of OpenAI's batch API here."""
        return f"openai-batch://{self.address}/v1?tls=false&gather=0.05&look=0.01"

    @property
    def anthropic_url(self) -> str:
        """Return the backend URL of Anthropic's batch API here."""
        return f"anthropic-batch://{self.address}?tls=false&gather=0.05&look=0.01"

    @property
    def backend_url(self) -> str:
        return self.openai_url

    def table(self) -> dict[str, Mapping[str, Handler]]:
        table: dict[str, dict[str, Handler]] = {
            "/v1/models": {"GET": self._list_models},
            "/v1/files": {"POST": self._upload},
            "/v1/files/*": {"GET": self._download},
            "/v1/batches": {"POST": self._create, "GET": self._list},
            "/v1/batches/*": {"GET": self._retrieve, "POST": self._cancel},
            f"{MESSAGES}/batches": {"POST": self._create, "GET": self._list},
            f"{MESSAGES}/batches/*": {"GET": self._retrieve, "POST": self._cancel},
        }
        return {path: {method: self._guarded(handler) for method, handler in at.items()} for path, at in table.items()}

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(http: web.BaseRequest) -> web.StreamResponse:
            if self.refuse_next:
                raise RequestRefused(self.refuse_next.pop(0), "not now")
            self.check_key(http)
            return await handler(http)

        return answer

    def refuse(self, request: web.BaseRequest, refused: RequestRefused) -> web.Response:
        write = messages_error if request.path.startswith(MESSAGES) else error_object
        return json_response(write(refused.status, str(refused)), refused.status)

    # A request of a job

    def check(self, request: Request) -> None:
        if request.streamed:
            raise RequestRefused(400, "stream: not supported in a batch")
        if isinstance(request, MessagesRequest):
            super().check(request)
        else:
            check_request(request, self._models)

    def wire(self, request: Request) -> Wire:
        if isinstance(request, MessagesRequest):
            return super().wire(request)
        return Wire(request, model=request.model, fingerprint="scripted")

    async def _reply(self, request: Request) -> tuple[int, JsonObject] | None:
        """Return status and body of the answer; None if the request expires."""
        wire = self.wire(request)
        try:
            self.check(request)
        except RequestRefused as refused:
            return refused.status, wire.error(refused.status, str(refused), refused.param)
        reply = await self.respond(request)
        if isinstance(reply, Hang):
            return None
        if not isinstance(reply, Say | Fail | Body):
            raise TypeError(
                f"a batch job is answered by Say, CallTools, Fail, Body or Hang, not {type(reply).__name__}"
            )
        track = track_of(reply, wire)
        return track.status, orjson.loads(b"".join(track.parts))

    # Jobs

    async def _create(self, http: web.BaseRequest) -> web.Response:
        asked = read_object(await read_body(http, PATIENCE_SECONDS, MOST_BYTES))
        job = self._of_messages(asked, http) if _is_messages(http) else self._of_chats(asked, http)
        for request in job.requests.values():
            self.arrive(request)
        self.jobs.append(job)
        self._changed()
        if self.drop_next and http.transport is not None:
            self.drop_next -= 1
            http.transport.abort()
        return json_response(self._told(job, http))

    def _of_chats(self, asked: JsonObject, http: web.BaseRequest) -> BatchJob:
        if unknown := asked.keys() - {"input_file_id", "endpoint", "completion_window", "metadata"}:
            raise RequestRefused(400, f"Unknown parameter: {min(unknown)!r}.")
        if asked.get("completion_window") != "24h" or asked.get("endpoint") != CHAT:
            raise RequestRefused(400, f"completion_window must be '24h', and endpoint {CHAT!r} here")
        metadata = mapping(asked.get("metadata"))
        if len(metadata) > 16 or any(len(name) > 64 or len(str(text)) > 512 for name, text in metadata.items()):
            raise RequestRefused(400, "metadata: at most 16 pairs, of 64 and 512 characters")
        content = self._files.get(str(asked.get("input_file_id")))
        if content is None:
            raise RequestRefused(404, "no such file")
        job = BatchJob(f"batch_{len(self.jobs)}", {}, metadata, wrong=self.invalid)
        lines = [line for line in content.splitlines() if line]
        try:
            rows = [read_object(line) for line in lines]
        except RequestRefused as error:
            rows = []
            job.wrong = f"a line of the file is not a JSON object: {error}"
        ids = [str(row.get("custom_id")) for row in rows]
        bodies = [mapping(row.get("body")) for row in rows]
        if any(row.get("url") != CHAT or row.get("method") != "POST" for row in rows):
            job.wrong = f"each line needs the method POST and the url {CHAT}"
        elif len({str(body.get("model")) for body in bodies}) > 1:
            job.wrong = "all requests of a file must name the same model"
        job.wrong = job.wrong or _wrong_ids(ids, CHAT)
        if job.wrong:
            job.status = "failed"
        for number, (own, body, line) in enumerate(zip(ids, bodies, lines, strict=False), self.received):
            raw = line[line.find(b'"body":') + 7 : -1]
            job.requests[own] = Request(number, CHAT, body, http.headers, raw)
        return job

    def _of_messages(self, asked: JsonObject, http: web.BaseRequest) -> BatchJob:
        rows = objects_of(asked.get("requests"))
        if asked.keys() != {"requests"} or not rows or any(row.keys() != {"custom_id", "params"} for row in rows):
            raise RequestRefused(400, "requests: a list of custom_id and params")
        ids = [str(row["custom_id"]) for row in rows]
        if wrong := _wrong_ids(ids, MESSAGES):
            raise RequestRefused(400, wrong)
        if any(_ID.fullmatch(own) is None for own in ids):
            raise RequestRefused(400, f"custom_id: must match {_ID.pattern}")
        requests = {
            own: MessagesRequest(number, MESSAGES, mapping(row["params"]), http.headers, orjson.dumps(row["params"]))
            for number, (own, row) in enumerate(zip(ids, rows, strict=True), self.received)
        }
        return BatchJob(f"msgbatch_{len(self.jobs)}", {**requests})

    async def _list(self, http: web.BaseRequest) -> web.Response:
        """Answer with a page of jobs, newest first."""
        cursor, most = ("after_id", 1000) if _is_messages(http) else ("after", 100)
        jobs = self.jobs[::-1]
        start = next((place for place, job in enumerate(jobs, 1) if job.id == http.query.get(cursor)), 0)
        end = start + min(most, int(http.query.get("limit", "20")))
        listed = [self._told(job, http) for job in jobs[start:end]]
        return json_response({"object": "list", "data": [*listed], "has_more": end < len(jobs)})

    async def _retrieve(self, http: web.BaseRequest) -> web.Response:
        job = self._job(http)
        if http.path.endswith("/results"):
            return _lines([_message_line(own, job.answers.get(own)) for own in _shuffled(job)])
        await self.poll(job)
        return json_response(self._told(job, http))

    async def _cancel(self, http: web.BaseRequest) -> web.Response:
        job = self._job(http)
        if job.status == "in_progress":
            job.status = "cancelled"
        return json_response(self._told(job, http))

    async def poll(self, job: BatchJob) -> None:
        """Count a poll of the job, and answer its requests at the last one."""
        job.polls += 1
        self._changed()
        if job.status != "in_progress" or job.polls < self.polls:
            return
        job.status = "finalizing"
        for own in list(job.requests)[: self.expires_after]:
            if (answer := await self._reply(job.requests[own])) is not None:
                job.answers[own] = answer
        job.status = "completed" if len(job.answers) == len(job.requests) else "expired"

    def _job(self, http: web.BaseRequest) -> BatchJob:
        names = http.path.split("/")
        found = next((job for job in self.jobs if job.id in names), None)
        if found is None:
            raise RequestRefused(404, "no such job")
        return found

    def _told(self, job: BatchJob, http: web.BaseRequest) -> JsonObject:
        """Return the job in the form of its API."""
        if _is_messages(http):
            return _message_batch(job)
        told: JsonObject = {"id": job.id, "object": "batch", "endpoint": CHAT, "status": job.status}
        told |= {"metadata": job.metadata, "created_at": int(job.created_at), "completion_window": "24h"}
        if job.wrong:
            told["errors"] = {"object": "list", "data": [{"code": "invalid", "message": job.wrong}]}
        good = sum(status == 200 for status, _ in job.answers.values())
        if job.status in ("completed", "expired"):
            told["output_file_id"] = f"{job.id}-output" if good else None
            told["error_file_id"] = f"{job.id}-error" if good < len(job.requests) else None
        return told

    # Files

    async def _upload(self, http: web.BaseRequest) -> web.Response:
        parts: dict[str | None, tuple[str | None, bytes]] = {}
        if http.content_type == "multipart/form-data":
            async for part in await http.multipart():
                if isinstance(part, BodyPartReader):
                    parts[part.name] = part.filename, bytes(await part.read())
        name, content = parts.get("file", (None, b""))
        if parts.get("purpose", (None, b""))[1] != b"batch" or name is None:
            raise RequestRefused(400, "a file and the purpose batch are needed")
        own = f"file-{len(self._files)}"
        self._files[own] = content
        told: JsonObject = {"id": own, "object": "file", "purpose": "batch", "filename": name, "bytes": len(content)}
        return json_response({**told, "created_at": int(time.time()), "status": "processed"})

    async def _download(self, http: web.BaseRequest) -> web.Response:
        name, _, kind = http.path.removeprefix("/v1/files/").removesuffix("/content").rpartition("-")
        job = next((job for job in self.jobs if job.id == name), None)
        if job is None:
            raise RequestRefused(404, "no such file")
        lines = [(own, job.answers.get(own)) for own in _shuffled(job)]
        good = [(own, answer) for own, answer in lines if answer is not None and answer[0] == 200]
        return _lines([_chat_line(*line) for line in lines if (line in good) == (kind == "output")])


def _is_messages(http: web.BaseRequest) -> bool:
    return http.path.startswith(MESSAGES)


def _shuffled(job: BatchJob) -> list[str]:
    """Return the custom ids in another order than they were sent in, as both APIs do."""
    return list(job.requests)[::-1]


def _lines(lines: list[JsonObject]) -> web.Response:
    return web.Response(body=b"".join(orjson.dumps(line) + b"\n" for line in lines))


def _chat_line(own: str, answer: tuple[int, JsonObject] | None) -> JsonObject:
    head: JsonObject = {"id": f"batch_req_{own}", "custom_id": own}
    if answer is None:
        error: JsonObject = {"code": "batch_expired", "message": "This request could not be executed in time."}
        return {**head, "response": None, "error": error}
    response: JsonObject = {"status_code": answer[0], "request_id": f"req_{own}", "body": answer[1]}
    return {**head, "response": response, "error": None}


def _message_line(own: str, answer: tuple[int, JsonObject] | None) -> JsonObject:
    if answer is None:
        return {"custom_id": own, "result": {"type": "expired"}}
    status, body = answer
    kind, name = ("succeeded", "message") if status == 200 else ("errored", "error")
    return {"custom_id": own, "result": {"type": kind, name: body}}


def _message_batch(job: BatchJob) -> JsonObject:
    ended = job.status not in OPEN
    good = sum(status == 200 for status, _ in job.answers.values())
    counts: JsonObject = {
        "processing": 0 if ended else len(job.requests),
        "succeeded": good,
        "errored": len(job.answers) - good,
        "expired": len(job.requests) - len(job.answers) if job.status == "expired" else 0,
        "canceled": len(job.requests) if job.status == "cancelled" else 0,
    }
    made = datetime.fromtimestamp(job.created_at, UTC).isoformat()
    told: JsonObject = {"id": job.id, "type": "message_batch", "created_at": made, "request_counts": counts}
    url = f"{MESSAGES}/batches/{job.id}/results" if ended else None
    return {**told, "processing_status": "ended" if ended else "in_progress", "results_url": url}


def _wrong_ids(ids: Collection[str], endpoint: str) -> str:
    if len(ids) > MOST_REQUESTS[endpoint]:
        return f"a job has at most {MOST_REQUESTS[endpoint]:,} requests"
    return "a custom_id comes twice" if len(set(ids)) != len(ids) else ""
