"""The gateway: an HTTP server on loopback. Programs send model requests through it as part of a row, with the row's
key.

A request is read in its dialect, sent through the row (``RowAccess.answer``: slot, order, outages, budget, record) and
answered in the same dialect. The text of a streamed answer is written while it arrives (``live.py``). Everything else
is sent only when the answer is complete and recorded, so a client never acts on an answer that a resumed run would not
know.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, Self

import orjson
from aiohttp import web

from batch_agent.backends.http.wire import json_of
from batch_agent.compiler.plan import tool_text
from batch_agent.compiler.tokens import content_tokens, estimate_tokens
from batch_agent.door import Door, RequestRefused, given_key, json_response, read_body, read_object
from batch_agent.errors import BackendError, BatchAgentError, Interrupted, RateLimited, Rejected, SpecError, Timeout
from batch_agent.gateway.chat import ChatDialect
from batch_agent.gateway.client_request import BadRequest, ClientDialect, ClientRequest, Envelope, RequestReader
from batch_agent.gateway.live import LiveAnswer, may_stream
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.gateway.responses import ResponsesDialect
from batch_agent.messages import JsonObject, Message, Reply

FIRST_SECONDS = 15.0  # before the response starts without an answer
EVERY_SECONDS = 10.0
COMMENT, SPACE = b": keep-alive\n\n", b" "


class Waiting:
    """The response to a client while its answer is pending. ``response`` is the one that was started, if any.
    ``keeps_alive``: data is sent although there is no answer yet.

    If a server is down, the request waits, and the client must not time out meanwhile. So after a few seconds the
    response starts: a stream gets comments, a JSON document gets spaces before its first brace; every reader ignores
    both. An answer that comes sooner gets its proper status.
    """

    def __init__(self, request: web.BaseRequest, *, streamed: bool, keeps_alive: bool = True) -> None:
        self._request = request
        self._streamed = streamed
        self._keeps_alive = keeps_alive
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None

    async def __aenter__(self) -> Self:
        if self._keeps_alive:
            self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self.put, self._sign)
        return self

    async def __aexit__(self, kind: object, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._queue.put_nowait(None)
            if kind is not None:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def begun(self) -> bool:
        return self._task is not None

    @property
    def _sign(self) -> bytes:
        return COMMENT if self._streamed else SPACE

    def put(self, data: bytes) -> None:
        """Write data, and start the response if it has not begun."""
        self._queue.put_nowait(data)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="batch-agent gateway response")

    async def _write(self) -> None:
        kind = "text/event-stream" if self._streamed else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        await response.prepare(self._request)
        self.response = response
        while True:
            try:
                async with asyncio.timeout(EVERY_SECONDS if self._keeps_alive else None):
                    pieces = [await self._queue.get()]
            except TimeoutError:
                pieces = [self._sign]
            while not self._queue.empty():
                pieces.append(self._queue.get_nowait())
            if data := b"".join(filter(None, pieces)):
                await response.write(data)
            if pieces[-1] is None:
                return


MAX_BODY_BYTES = 64 * 1024 * 1024
PATIENCE_SECONDS = 30.0
LISTING_SECONDS = 5.0  # for a server to list its models
FINAL = {"x-should-retry": "false"}  # clients of OpenAI and Anthropic read this beside the status
RETRIED = frozenset({401, 403, 408, 409, 425, 429})  # statuses that have another meaning here, or that clients retry
CHAT = ChatDialect()
DIALECTS: dict[str, ClientDialect] = {
    "/chat/completions": CHAT,
    "/responses": ResponsesDialect(),
    "/messages": MessagesDialect(),
    "/messages/count_tokens": MessagesDialect(),
}


class RowAccess(Protocol):
    """The row that a key belongs to."""

    @property
    def model(self) -> str:
        """Return the run's model, the default for requests."""

    @property
    def wires(self) -> frozenset[str]:
        """Return the wires in which the backend accepts a request unchanged."""

    async def models(self) -> Sequence[str]: ...

    async def answer(self, request: ClientRequest, live: LiveAnswer | None) -> Reply:
        """Return the recorded answer. ``live`` follows the request while its answer arrives, if it is sent. Raises
        JobError or SpecError."""


@dataclass(slots=True, eq=False)
class Guest:
    row: RowAccess
    tasks: set[asyncio.Task[object]] = field(default_factory=set)  # its running requests
    answers: dict[str, Message] = field(default_factory=dict)  # answers with tool calls, by the id of their first call


class Gateway:
    """Listens while entered. ``admit`` gives a row its key, ``dismiss`` ends the key and its requests."""

    def __init__(self, *, patience: float = PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._door = Door(self._handle, _refused, patience=patience)
        self._guests: dict[str, Guest] = {}
        self._reader = RequestReader()

    async def __aenter__(self) -> Self:
        await self._door.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for key in list(self._guests):
            self.dismiss(key)
        await self._door.__aexit__(*exception)

    @property
    def url(self) -> str:
        """Return the address up to and without ``/v1``."""
        return self._door.url

    def admit(self, row: RowAccess) -> str:
        key = f"row-{secrets.token_urlsafe(24)}"
        self._guests[key] = Guest(row)
        return key

    def dismiss(self, key: str) -> None:
        guest = self._guests.pop(key, None)
        for task in () if guest is None else tuple(guest.tasks):
            task.cancel()

    def env(self, key: str) -> dict[str, str]:
        """Return the environment variables with address and key that clients read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_AUTH_TOKEN": key,
        }

    # One request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = _path(request)
        guest = self._guests.get(given_key(request))
        if guest is None:
            raise RequestRefused(401, "this key is unknown, or its row has ended")
        if request.method == "GET" and (path == "/models" or path.startswith("/models/")):
            return await self._models(guest.row, path.removeprefix("/models").strip("/"))
        dialect = DIALECTS.get(path)
        if dialect is None:
            raise RequestRefused(404, f"{request.path} does not exist")
        if request.method != "POST":
            raise RequestRefused(405, f"{request.path} accepts only POST")
        if "Content-Encoding" in request.headers:
            raise RequestRefused(415, "compressed bodies are not accepted")
        body = read_object(await read_body(request, self._patience, MAX_BODY_BYTES))
        asked = self._reader.read(dialect, body, guest.row.model)
        if path.endswith("/count_tokens"):
            return json_response({"input_tokens": _estimated_tokens(asked)})
        if asked.lost and dialect.wire not in guest.row.wires:
            lost = "; ".join(dict.fromkeys(asked.lost))
            raise BadRequest(f"the run's backend has another wire format, which cannot represent: {lost}")
        if betas := request.headers.get("anthropic-beta"):
            asked.headers = {"anthropic-beta": betas}
        task = asyncio.current_task()
        assert task is not None
        guest.tasks.add(task)
        try:
            return await self._answer(guest, asked, request)
        finally:
            guest.tasks.discard(task)

    async def _answer(self, guest: Guest, asked: ClientRequest, request: web.BaseRequest) -> web.StreamResponse:
        dialect = asked.dialect
        if guest.answers:
            asked.messages = [_as_answered(message, guest.answers) for message in asked.messages]
        failure: RequestRefused | None = None
        reply: Reply | None = None
        envelope = Envelope(secrets.token_hex(12), int(time.time()), asked.shape.model)
        live = None
        own = dialect.wire in guest.row.wires
        async with Waiting(request, streamed=asked.stream) as waiting:
            if may_stream(asked, own=own):
                live = LiveAnswer(asked, envelope, waiting.put, own=own)
            try:
                reply = await guest.row.answer(asked, live)
                if live is not None:
                    live.finish(reply)
            except BatchAgentError as error:
                failure = RequestRefused(_status(error), str(error))
        if reply is None:
            assert failure is not None
            if waiting.response is None:
                raise failure
            return await _fail_late(waiting.response, request, asked, failure)
        if reply.tool_calls:
            guest.answers[reply.tool_calls[0].id] = reply.message()
        if live is not None and waiting.response is not None:
            return waiting.response
        document = dialect.document(reply, asked, envelope)
        body = b"".join(dialect.events(document, asked)) if asked.stream else orjson.dumps(document)
        if waiting.response is None:
            kind = "text/event-stream" if asked.stream else "application/json"
            return web.Response(body=body, content_type=kind, headers={"Cache-Control": "no-cache"})
        await waiting.response.write(body)
        return waiting.response

    async def _models(self, row: RowAccess, name: str) -> web.Response:
        served: Sequence[str] = ()
        with suppress(BackendError, TimeoutError):  # the run's model is known anyway
            async with asyncio.timeout(LISTING_SECONDS):
                served = await row.models()
        cards = [_card(model) for model in dict.fromkeys([row.model, *served]) if model]
        if name:
            found = [card for card in cards if card["id"] == name]
            if not found:
                raise RequestRefused(404, f"the model {name!r} is not served here")
            return json_response(found[0])
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
        return json_response({"object": "list", "data": [*cards], "has_more": False, **ends})


async def _fail_late(
    response: web.StreamResponse, request: web.BaseRequest, asked: ClientRequest, failure: RequestRefused
) -> web.StreamResponse:
    """Report a failure after the response has begun with status 200: with an event, or by breaking the connection."""
    if asked.stream:
        await response.write(asked.dialect.error_event(failure))
    elif request.transport is not None:
        request.transport.abort()
    return response


def _path(request: web.BaseRequest) -> str:
    path = request.path
    while path.startswith("/v1/"):  # some clients append it to an address that already has it
        path = path[3:]
    return path.rstrip("/")


def _estimated_tokens(asked: ClientRequest) -> int:
    """Return the estimated tokens of a prompt. A picture counts with its usual size."""
    tools = sum(estimate_tokens(tool_text(tool)) for tool in asked.shape.tools)
    calls = sum(estimate_tokens(call.name + call.arguments) for said in asked.messages for call in said.tool_calls)
    return tools + calls + sum(content_tokens(said.content) for said in asked.messages)


def _as_answered(message: Message, answers: Mapping[str, Message]) -> Message:
    """Return an answer in a request as the model originally gave it: with the parts that only its wire can read, and
    with unchanged arguments, so that the server's prefix cache matches."""
    known = answers.get(message.tool_calls[0].id) if message.tool_calls else None
    return known if known is not None and _said(known) == _said(message) else message


def _said(message: Message) -> object:
    return message.content, [(call.id, call.name, json_of(call.arguments)) for call in message.tool_calls]


def _status(error: BatchAgentError) -> int:
    """Return the status of a failed request. If a retry cannot help, it is a status that clients do not retry."""
    match error:
        case Interrupted():
            return 402
        case Rejected() | SpecError():
            told = error.status if isinstance(error, Rejected) else None
            return told if told is not None and 400 <= told < 500 and told not in RETRIED else 400
        case Timeout():
            return 504
        case RateLimited():
            return 503
        case BackendError():
            return 502
    return 403


def _refused(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    dialect = DIALECTS.get(_path(request), CHAT)
    return json_response(dialect.error(refused), refused.status, FINAL)


def _card(name: str) -> JsonObject:
    """Return a model's entry in the list, valid for both APIs."""
    openai: JsonObject = {"id": name, "object": "model", "created": 0, "owned_by": "batch-agent"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
