"""Interactive requests: of people, who wait for the answer. They go before all lines, whole or streamed.

A backend with the client's own wire passes its stream through, byte by byte. From any other backend the text arrives
piece by piece, and is written as events of the client's wire; tool calls and usage follow at the end.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from batch_agent.backends.base import ModelRequest
from batch_agent.dispatch.cancellation import first_error
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy
from batch_agent.door import RequestRefused, json_response, read_body, read_object
from batch_agent.errors import BatchAgentError, JobError
from batch_agent.gateway.client_request import BadRequest, ClientDialect, ClientRequest, RequestReader
from batch_agent.gateway.live import LiveAnswer
from batch_agent.messages import Conversation, Reply
from batch_agent.scheduler.ordering import FIRST, AgentForecast
from batch_agent.serve.asking import (
    ClientCall,
    envelope,
    for_clients,
    model_request,
    read_request,
    refused,
    start_nothing,
    status_of,
)
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.models import ServedModels
from batch_agent.serve.turnstile import Turnstile

MAX_BODY_BYTES = 64 * 1024 * 1024
MOST_RETRIES = 2
PATIENCE_SECONDS = 60.0  # that an outage is waited out
BYTES_PER_TOKEN = 4


class Interactive:
    def __init__(self, models: ServedModels, dispatcher: Dispatcher, turnstile: Turnstile, patience: float) -> None:
        self._models, self._dispatcher, self._turnstile, self._patience = models, dispatcher, turnstile, patience
        self._reader = RequestReader()
        self.requests = 0
        self.failures = 0

    async def answer(self, request: web.BaseRequest, dialect: ClientDialect, tenant: Tenant) -> web.StreamResponse:
        """Answer one request. Raises RequestRefused."""
        if "Content-Encoding" in request.headers:
            raise RequestRefused(415, "compressed bodies are not accepted")
        body = read_object(await read_body(request, self._patience, MAX_BODY_BYTES))
        model = body.get("model")
        if isinstance(model, str) and model and not self._models.knows(model):
            await self._models.models()
            if not self._models.knows(model):
                told = f"The model '{model}' does not exist or you do not have access to it."
                raise RequestRefused(404, told, param="model", code="model_not_found")
        try:
            asked = read_request(self._reader, self._models, dialect, body)
        except BadRequest as error:
            raise RequestRefused(400, str(error), param=error.param) from None
        if betas := request.headers.get("anthropic-beta"):
            asked.headers = {"anthropic-beta": betas}
        self.requests += 1
        try:
            if asked.stream:
                return await self._streamed(request, asked, tenant)
            reply = await self._ask(asked, tenant)
        except RequestRefused:
            self.failures += 1
            raise
        return json_response(dialect.document(reply, asked, envelope(asked)), headers={"Cache-Control": "no-cache"})

    async def _ask(
        self,
        asked: ClientRequest,
        tenant: Tenant,
        stream: _Stream | None = None,
    ) -> Reply:
        """Return the answer. Raises RequestRefused."""
        turnstile, governor = self._turnstile, self._turnstile.governor
        if not turnstile.account(tenant.name).has_tokens:
            raise RequestRefused(429, "the tokens of this day are used up", code="insufficient_quota")
        clock = asyncio.get_running_loop().time
        question = model_request(asked, ModelRequest(asked.shape, Conversation(asked.messages), "interactive"))
        call = _PersonCall(self._models, question, self._turnstile)
        if stream is not None and stream.live is not None:
            stream.live.follow(question)
            call.on_tool_call = start_nothing  # so that the backend streams
        elif stream is not None:
            question.relay = stream.put
        wait_until = clock() + PATIENCE_SECONDS
        policy = Policy(MOST_RETRIES, wait_until=wait_until, wanted=lambda _: stream is None or not stream.begun)
        before = turnstile.inflight
        governor.began(clock(), before)
        turnstile.touch()
        try:
            progress = AgentForecast(FIRST, model=asked.shape.model)
            ticket = self._dispatcher.slots.claim(progress, FIRST)
            reply = await self._dispatcher.ask(call, policy, ticket=ticket)
        except JobError as error:
            raise RequestRefused(status_of(error), for_clients(str(error))) from None
        except BatchAgentError as error:
            raise RequestRefused(400, str(error)) from None
        finally:
            if not call.admitted:
                governor.admitted()
            governor.ended(clock())
            turnstile.touch()
        if (refusal := refused(reply)) is not None:
            raise RequestRefused(*refusal)
        usage = reply.usage
        turnstile.spend(tenant.name, usage.prompt_tokens + usage.completion_tokens)
        governor.answered(clock() - call.sent_at, usage.completion_tokens, before, turnstile.inflight, clock())
        return reply

    async def _streamed(self, request: web.BaseRequest, asked: ClientRequest, tenant: Tenant) -> web.StreamResponse:
        own = asked.dialect.wire in self._models.of(asked.shape.model).backend.wires
        stream = _Stream(request, asked, raw=own)
        refusal: RequestRefused | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(stream.write())
                try:
                    stream.finish(await self._ask(asked, tenant, stream))
                except RequestRefused as error:
                    refusal = error
                    if stream.begun:
                        stream.put(asked.dialect.error_event(error.status, str(error)))
                finally:
                    stream.close()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        if refusal is not None and not stream.begun:
            raise refusal
        return stream.response


class _PersonCall(ClientCall):
    """Tells when the request is sent."""

    __slots__ = ("_turnstile", "admitted", "sent_at")

    def __init__(self, backend: ServedModels, request: ModelRequest, turnstile: Turnstile) -> None:
        super().__init__(backend, request)
        self._turnstile, self.admitted, self.sent_at = turnstile, False, asyncio.get_running_loop().time()

    async def send(self, endpoint: str) -> Reply:
        self._turnstile.note_sent(endpoint)
        if not self.admitted:
            self.admitted = True
            self._turnstile.governor.admitted()
        return await super().send(endpoint)


class _Stream:
    """A streamed answer. Pieces are put in a queue, and written by one task while more arrive."""

    def __init__(self, request: web.BaseRequest, asked: ClientRequest, *, raw: bool) -> None:
        self._request, self._asked = request, asked
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.live = None if raw else LiveAnswer(asked, envelope(asked), self.put)
        self.begun = False
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)

    def put(self, data: bytes) -> None:
        if data:
            self.begun = True
            self._queue.put_nowait(data)

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def write(self) -> None:
        while (data := await self._queue.get()) is not None:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)

    def finish(self, reply: Reply) -> None:
        """Write the rest of the answer."""
        if self.live is not None:
            self.live.finish(reply)
        elif not self.begun:
            asked = self._asked
            for event in asked.dialect.events(asked.dialect.document(reply, asked, envelope(asked)), asked):
                self.put(event)
