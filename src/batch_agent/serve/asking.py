"""Reads and sends the requests of clients: lines of batches, and requests of people (``Interactive``).

If a model refuses a request, the server is not at fault. Here the refusal is an answer, so that bad requests of one
client do not stop the requests of others.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web
from pydantic import JsonValue

from batch_agent.agent.context import AgentContext, agent_of
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.http.wire import json_of
from batch_agent.compiler.tokens import BYTES_PER_TOKEN, estimate_tokens
from batch_agent.dispatch.dispatcher import Dispatcher, ModelCall
from batch_agent.dispatch.policy import Policy
from batch_agent.door import PATIENCE_SECONDS, RequestRefused, json_response, read_body, read_object
from batch_agent.errors import (
    BackendError,
    BatchAgentError,
    ContextOverflow,
    JobError,
    RateLimited,
    Rejected,
    Timeout,
    Unavailable,
)
from batch_agent.gateway.chat import FINISHES, ChatDialect
from batch_agent.gateway.client_request import (
    BadRequest,
    ClientDialect,
    ClientRequest,
    Envelope,
    RequestKind,
    RequestReader,
    number,
    own_document,
    sse,
    string,
    texts,
    whole,
)
from batch_agent.gateway.gateway import Waiting
from batch_agent.gateway.live import LiveAnswer
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.gateway.responses import ResponsesDialect
from batch_agent.messages import Conversation, JsonObject, Message, Reply, Sealed
from batch_agent.observe.exposition import Histogram
from batch_agent.scheduler.blame import concern_of
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.ordering import FIRST, AgentForecast
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.ledger import DayUsed
from batch_agent.serve.line_scheduler import LineScheduler
from batch_agent.serve.logs import note
from batch_agent.serve.models import ServedModels
from batch_agent.serve.numbers import NAME
from batch_agent.serve.upstreams import ModelServers, again_after, for_clients
from batch_agent.spec import BatchSpec

CHAT = ChatDialect()


class _PlainDialect:
    """A wire of OpenAI's API without a conversation."""

    wire = ""

    def error(self, refused: RequestRefused) -> JsonObject:
        return CHAT.error(refused)

    def error_event(self, refused: RequestRefused) -> bytes:
        return CHAT.error_event(refused)

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        own = own_document(reply, self.wire)
        assert own is not None, "only a backend of the same wire gets such a request"
        return own


class CompletionsDialect(_PlainDialect):
    """Completions of a prompt, without messages (``/v1/completions``). One prompt is also written as a message to a
    backend with another wire."""

    wire = "completions"

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        lost = [name for name in ("echo", "suffix", "logprobs", "logit_bias") if body.get(name)]
        lost += [name for name in ("n", "best_of") if body.get(name) not in (None, 1)]
        shape = RequestShape(
            model=string(body.get("model"), "model") or model,
            max_tokens=whole(body, "max_tokens"),
            temperature=number(body, "temperature"),
            top_p=number(body, "top_p"),
            stop=texts(body.get("stop"), "stop"),
        )
        return RequestKind(shape, lost)

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return [Message("user", prompt)]
        if not prompt:
            raise BadRequest("prompt must be a text, or a list of prompts", "prompt")
        lost.append("a prompt that is not one text")
        return [Message("user", "")]

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        if (own := own_document(reply, self.wire)) is not None:
            return own
        finish = FINISHES.get(reply.finish_reason, reply.finish_reason)
        usage = reply.usage
        return {
            "id": f"cmpl-{envelope.name}",
            "object": "text_completion",
            "created": envelope.created,
            "model": envelope.model,
            "choices": [{"index": 0, "text": reply.text, "logprobs": None, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        head = {name: value for name, value in document.items() if name not in ("choices", "usage")}
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            assert isinstance(choice, dict)
            yield sse({**head, "choices": [{**choice, "finish_reason": None}]})
            yield sse({**head, "choices": [{**choice, "text": ""}]})
        options = request.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield sse({**head, "choices": [], "usage": document.get("usage")})
        yield b"data: [DONE]\n\n"


class EmbeddingsDialect(_PlainDialect):
    """Embeddings of texts (``/v1/embeddings``), only for a backend with the same wire."""

    wire = "embeddings"

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        shape = RequestShape(model=string(body.get("model"), "model") or model)
        return RequestKind(shape, ["embeddings"])

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        given: JsonValue = body.get("input")
        if not given:
            raise BadRequest("input must be a text, or a list of texts", "input")
        first = next((text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str)), "")
        return [Message("user", first)]

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        raise BadRequest("embeddings are not streamed", "stream")


MESSAGES = MessagesDialect()
DIALECTS: Mapping[str, ClientDialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": CompletionsDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/embeddings": EmbeddingsDialect(),
    "/v1/messages": MESSAGES,
}


REFUSED = "refusal"  # the finish reason and the seal of an answer that is a refusal
PRIORITY = 1000  # of lines, on an engine that schedules by priority: above any number of turns


def read_request(
    reader: RequestReader, models: ServedModels, dialect: ClientDialect, body: JsonObject
) -> ClientRequest:
    """Return a client's request. Raises RequestRefused if it is wrong, or if the model's backend cannot represent
    it."""
    asked = reader.read(dialect, body, "")
    model = asked.shape.model
    if not model:
        raise BadRequest("you must provide a model parameter", "model")
    if not models.knows(model):
        told = f"The model '{model}' does not exist or you do not have access to it."
        raise RequestRefused(404, told, param="model", code="model_not_found")
    if asked.lost and dialect.wire not in models.of(model).backend.wires:
        lost = "; ".join(dict.fromkeys(asked.lost))
        raise BadRequest(f"the backend of the model {model!r} has another wire format, which cannot represent: {lost}")
    return asked


# Tokens of the day: what a request may use, before it is sent (``ledger.py``).

UNKNOWN_ANSWER = 4096  # tokens of an answer whose request does not limit it, if its tenant had no longer one
LEAST_ANSWER = 16  # tokens that must be left for such an answer
PROMPT_FIELDS = ("messages", "input", "prompt", "system", "instructions", "tools", "functions", "response_format")
BYTES_OF_A_PICTURE = b'"' + b"x" * 4000 + b'"'  # about a thousand tokens, whatever its size in the body
_ENCODED = re.compile(rb'"(?:data:[^",]*,)?[A-Za-z0-9+/=_-]{1000,}"')


@dataclass(frozen=True, slots=True)
class Needs:
    """Tokens that a request may use, over all its ``answers``. ``answer``: the limit that the request sets, or None."""

    prompt: int
    answer: int | None
    assumed: int
    answers: int = 1

    @property
    def most(self) -> int:
        return self.prompt + (self.assumed if self.answer is None else self.answer)


def tokens_needed(dialect: ClientDialect, body: JsonObject, longest: int) -> Needs:
    """Return the tokens that a request may use. ``longest``: tokens of the longest answer that its tenant has had."""
    written = orjson.dumps({name: body[name] for name in PROMPT_FIELDS if name in body})
    prompt = -(-len(_ENCODED.sub(BYTES_OF_A_PICTURE, written)) // BYTES_PER_TOKEN)
    if dialect.wire == EmbeddingsDialect.wire:
        return Needs(prompt, 0, 0)
    given = [body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
    limit = next((value for value in given if type(value) is int), None)
    answers = max([1, *(value for name in ("n", "best_of") if type(value := body.get(name)) is int)])
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        answers *= len(prompts)
    return Needs(prompt, None if limit is None else limit * answers, max(UNKNOWN_ANSWER, longest) * answers, answers)


def line_needs(endpoint: str, body: JsonObject, limit: int, longest: int, usual: int) -> tuple[int, int]:
    """Return the smallest and the largest number of tokens of the day that a line may need. ``usual``: what a line of
    its batch usually needs. Raises RequestRefused if the line needs more than the ``limit`` of a whole day."""
    needs = tokens_needed(DIALECTS[endpoint], body, longest)
    if needs.answer is None:
        return min(needs.prompt + usual, limit), min(needs.most, limit)
    if needs.most > limit:
        told = f"{needs.most} tokens (prompt and max_tokens) are more than the {limit} of a whole day"
        raise RequestRefused(429, told, code="insufficient_quota")
    return needs.most, needs.most


def limit_answer(question: ModelRequest, tokens: int) -> None:
    """Set a limit of tokens for an answer if its client has not set one."""
    question.shape = replace(question.shape, max_tokens=tokens)
    if (client := question.client) is not None:
        name = "max_output_tokens" if client.wire == "responses" else "max_tokens"
        question.client = replace(client, fields={**client.fields, name: tokens})


class ClientCall(ModelCall):
    """The call for a client's request. If the client's own token limit cuts the answer, or the model refuses, that is
    still an answer."""

    __slots__ = ()

    async def send(self, endpoint: str) -> Reply:
        try:
            return await super().send(endpoint)
        except Rejected as error:
            status = error.status
            if not isinstance(error, ContextOverflow) and (concern_of(status) or status is None or status >= 500):
                raise  # it may concern more than this request, which the dispatcher finds out
            return refusal(status or 400, error)

    def again(self) -> ClientCall:
        return ClientCall(self.backend, super().again().request)


def refusal(status: int, error: BackendError) -> Reply:
    message = for_clients(str(error))
    document: JsonObject = {"status": status, "message": message, **error.fields}
    return Reply(message, finish_reason=REFUSED, sealed=Sealed(REFUSED, document))


def refused(reply: Reply) -> RequestRefused | None:
    """Return the refusal in a reply; None if the reply is an answer."""
    sealed = reply.sealed
    if sealed is None or sealed.wire != REFUSED or not isinstance(sealed.value, dict):
        return None
    return _with_fields(int(str(sealed.value["status"])), str(sealed.value["message"]), sealed.value)


def refused_for(error: JobError) -> RequestRefused:
    """Return the error that the client of a failed request gets. It has the fields of the server's error if its status
    comes from the server."""
    status, fields = status_of(error), dict[str, JsonValue]()
    if isinstance(error, BackendError) and error.status == status:
        fields.update(error.fields)
    refused = _with_fields(status, for_clients(str(error)), fields)
    if status in (429, 503):
        refused.headers = again_after(getattr(error, "retry_after", None) or 1.0)
    return refused


def _with_fields(status: int, message: str, fields: JsonObject) -> RequestRefused:
    kind, param, code = (fields.get(name) for name in ("type", "param", "code"))
    return RequestRefused(
        status,
        message,
        param=None if param is None else str(param),
        code=code if isinstance(code, int | str) else None,
        kind=None if kind is None else str(kind),
    )


def model_request(asked: ClientRequest, request: ModelRequest, *, priority: int = 0) -> ModelRequest:
    """Fill in a ModelRequest with the client's request."""
    request.shape = asked.shape
    request.client = asked.client_body
    request.priority = priority
    return request


def envelope(asked: ClientRequest, name: str = "") -> Envelope:
    """Return the fields of an answer beside the model's text. ``name`` must be unique to the request; "": a new name is
    made."""
    return Envelope(name or secrets.token_hex(12), int(time.time()), asked.shape.model)


# Lines of batches


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The outcome of a line, as it is written to the file, and the tokens that it used."""

    ok: bool
    outcome: JsonObject
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


Ask = Callable[[RequestShape, Conversation, Callable[[ModelRequest], ClientCall]], Awaitable[Reply]]
READER = RequestReader()


async def ask_line(
    models: ServedModels,
    endpoint: str,
    name: str,
    body: JsonObject,
    ask: Ask,
    call: Callable[[ServedModels, ModelRequest], ClientCall] = ClientCall,
) -> LineAnswer:
    """Send a line of a batch, and return its outcome. ``endpoint`` is the path of the line, and ``name`` is unique to
    it. ``call`` makes the question."""
    dialect = DIALECTS[endpoint]
    try:
        request = read_request(READER, models, dialect, body)
    except RequestRefused as refusal:
        return failed_line(endpoint, name, refusal)
    conversation = Conversation(request.messages)

    def send(question: ModelRequest) -> ClientCall:
        question = model_request(request, question, priority=PRIORITY)
        question.conversation = conversation
        return call(models, question)

    reply = await ask(request.shape, conversation, send)
    if (told := refused(reply)) is not None:
        return failed_line(endpoint, name, told)
    document = dialect.document(reply, request, envelope(request, name))
    if endpoint == "/v1/messages":
        outcome: JsonObject = {"result": {"type": "succeeded", "message": document}}
    else:
        outcome = _response(name, 200, document)
    return LineAnswer(True, outcome, reply.usage.prompt_tokens, reply.usage.completion_tokens)


def failed_line(endpoint: str, name: str, refused: RequestRefused) -> LineAnswer:
    body = DIALECTS[endpoint].error(refused)
    if endpoint == "/v1/messages":
        return LineAnswer(False, {"result": {"type": "errored", "error": body}})
    return LineAnswer(False, _response(name, refused.status, body))


def _response(name: str, status: int, body: JsonObject) -> JsonObject:
    return {"response": {"status_code": status, "request_id": f"req_{name}", "body": body}, "error": None}


async def answer_line(row: JsonObject, context: AgentContext) -> JsonObject:
    """Answer a line whose batch is a run in Redis. This is the worker of that run, and may run in any process."""
    agent, body = agent_of(context), row["body"]
    assert isinstance(agent.r.backend, ServedModels) and isinstance(body, dict)

    async def ask(shape: RequestShape, conversation: Conversation, send: Callable[[ModelRequest], ClientCall]) -> Reply:
        return await agent.answer(shape, conversation, send=send)

    answer = await ask_line(agent.r.backend, str(row["endpoint"]), str(row["name"]), body, ask)
    return {"ok": answer.ok, "outcome": answer.outcome, "tokens": answer.tokens}


LEASE = 10.0  # seconds after which rows of a worker in another process are taken over


def line_spec(models: ServedModels, model: str | None, **options: Any) -> BatchSpec:
    """Return the options of a batch's run in a directory."""
    given = {"task": "{id}", "backend": models, "model": model or "any", "no_hoist": True, "resume": True, **options}
    return BatchSpec(**given)


def travelling_spec(models: ServedModels, model: str | None, **options: Any) -> BatchSpec:
    """Return the options of a batch's run in Redis: workers in other processes open the same models, and import the
    worker."""
    return line_spec(models, model, backend=models.url, worker=answer_line, keep="results", lease=LEASE, **options)


def start_nothing(call: object) -> None:
    """Do nothing with a tool call: the client runs it."""


def status_of(error: JobError) -> int:
    """Return the HTTP status for a request that failed."""
    match error:
        case Timeout():
            return 504
        case RateLimited():
            return 429
        case Unavailable():
            return 503
        case BackendError() if error.status is not None and 400 <= error.status < 600:
            return 503 if concern_of(error.status) == "key" else error.status  # the client's own key is right
        case BackendError():
            return 503
    return 500


MAX_BODY_BYTES = 64 * 1024 * 1024
MOST_RETRIES = 2
LOOK_SECONDS = 1.0  # between two looks whether a request waits in vain
QUIET_SECONDS = 5.0  # without a piece of an answer after which a server that is down does not send it any more
GAPS = (b"\n\n", b"\r\n\r\n", b"\r\r")  # between events
_EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n|\r\r)", re.DOTALL)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class Interactive:
    """Requests of people, who wait for the answer. They go before all lines of batches, whole or streamed.
    ``patience``: seconds that an outage is waited out. Then the answer is 503 with the reason and Retry-After.

    A backend with the client's own wire passes its stream through, byte by byte. From any other backend the text
    arrives piece by piece, and is written as events of the client's wire; tool calls and usage follow at the end.
    """

    def __init__(
        self,
        models: ServedModels,
        dispatcher: Dispatcher,
        line_scheduler: LineScheduler,
        upstreams: ModelServers,
        patience: float,
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._line_scheduler = line_scheduler
        self._upstreams, self._patience = upstreams, patience
        self._reader = RequestReader()
        self._limits: set[asyncio.Timeout] = set()  # of the requests that are not answered
        self.requests = 0
        self.failures = 0
        self.seconds = Histogram(
            f"{NAME}_interactive_duration_seconds", "Seconds from an interactive request to its whole answer."
        )

    async def answer(self, request: web.BaseRequest, dialect: ClientDialect, tenant: Tenant) -> web.StreamResponse:
        """Answer one request. Raises RequestRefused."""
        if "Content-Encoding" in request.headers:
            raise RequestRefused(415, "compressed bodies are not accepted")
        body = read_object(await read_body(request, PATIENCE_SECONDS, MAX_BODY_BYTES))
        model = body.get("model")
        if isinstance(model, str) and model and not self._models.knows(model):
            await self._models.models()  # it may be new
        asked = read_request(self._reader, self._models, dialect, body)
        if betas := request.headers.get("anthropic-beta"):
            asked.headers = {"anthropic-beta": betas}
        self.requests += 1
        began = asyncio.get_running_loop().time()
        try:
            if asked.stream:
                return await self._streamed(request, asked, tenant)
            reply = await self._ask_in_time(asked, tenant)
        except RequestRefused:
            self.failures += 1
            raise
        finally:
            self.seconds.observe(asyncio.get_running_loop().time() - began)
        return json_response(dialect.document(reply, asked, envelope(asked)), headers={"Cache-Control": "no-cache"})

    def stop(self) -> None:
        """Answer all open requests with an error, because the server is stopping."""
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async def _ask_in_time(
        self, asked: ClientRequest, tenant: Tenant, stream: Waiting | None = None, live: LiveAnswer | None = None
    ) -> Reply:
        """Return the answer, unless the server is stopped before it is complete."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await self._ask(asked, tenant, stream, live)
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            told = "the server is stopping; send the request again"
            raise RequestRefused(503, told, code="stopping", headers=again_after(5.0)) from None

    async def _ask(
        self,
        asked: ClientRequest,
        tenant: Tenant,
        stream: Waiting | None = None,
        live: LiveAnswer | None = None,
    ) -> Reply:
        """Return the answer. ``stream`` gets it as it arrives: as text through ``live``, or byte by byte if ``live`` is
        None. Raises RequestRefused."""
        line_scheduler, governor = self._line_scheduler, self._line_scheduler.governor
        line_scheduler.set_terms(tenant.name, tenant.share, tenant.tokens_per_day)
        needs = tokens_needed(asked.dialect, asked.body, line_scheduler.account(tenant.name).longest)
        reserved = await self._reserve(tenant, needs)
        clock = asyncio.get_running_loop().time
        question = model_request(asked, ModelRequest(asked.shape, Conversation(asked.messages), "interactive"))
        if reserved and needs.answer is None and reserved < needs.most:
            limit_answer(question, (reserved - needs.prompt) // needs.answers)
        call = _PersonCall(self._models, question, self._line_scheduler)
        if live is not None:
            live.follow(question)
            call.on_tool_call = start_nothing  # so that the backend streams
        elif stream is not None:
            options = asked.body.get("stream_options")
            hidden = not (isinstance(options, dict) and options.get("include_usage"))
            call.events = events = PassedEvents(stream.put, hidden=hidden)
            question.relay = events.take
        policy = Policy(MOST_RETRIES, wanted=lambda _: stream is None or not stream.begun)
        before, limit = line_scheduler.inflight, asyncio.timeout(None)
        line_scheduler.person_came()
        try:
            progress = AgentForecast(FIRST, model=asked.shape.model)
            ticket = self._dispatcher.slots.claim(progress, FIRST)
            async with limit:
                with self._watched(call, ticket, limit):
                    reply = await self._dispatcher.ask(call, policy, ticket=ticket)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._upstreams.refusal(asked.shape.model) from None
        except JobError as error:
            raise refused_for(error) from None
        except BatchAgentError as error:
            raise RequestRefused(400, str(error)) from None
        finally:
            if not call.admitted:
                governor.admitted()
            governor.ended(clock())
            prompt, answer = call.used(needs, reserved)
            note(model=asked.shape.model, stream=asked.stream, input_tokens=prompt, output_tokens=answer)
            line_scheduler.spend(tenant.name, prompt + answer, reserved)
            line_scheduler.touch()
        if (refusal := refused(reply)) is not None:
            raise refusal
        if call.events is not None:
            call.events.finish()
        account = line_scheduler.account(tenant.name)
        account.longest = max(account.longest, answer)
        governor.answered(clock() - call.sent_at, answer, before, line_scheduler.inflight, clock())
        return reply

    @contextmanager
    def _watched(self, call: ModelCall, ticket: Ticket, limit: asyncio.Timeout) -> Iterator[None]:
        """End the wait for an answer when an outage has lasted too long. A request that was sent to a working server
        may take as long as it needs."""
        loop, patience = asyncio.get_running_loop(), self._patience
        came = held = loop.time()  # when it came, and last had a slot
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal held, timer
            now, slot = loop.time(), ticket.slot
            if slot is None:
                vain = bool(self._upstreams.stopped(ticket.progress.model)) or now - held >= patience
            else:
                held = now
                vain = slot.endpoint.health.is_down and now - max(call.heard_at, slot.heard_at) > QUIET_SECONDS
            if vain and now - came >= patience:
                limit.reschedule(now)
            else:
                timer = loop.call_later(min(LOOK_SECONDS, patience), look)

        look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    async def _reserve(self, tenant: Tenant, needs: Needs) -> int:
        """Reserve tokens of the day for a request. Returns their number; 0 without a limit. Raises RequestRefused."""
        ledger = self._line_scheduler.ledger
        least = needs.prompt + LEAST_ANSWER * needs.answers if needs.answer is None else needs.most
        try:
            return await ledger.reserve(tenant.name, least, needs.most)
        except DayUsed as used:
            limit, today = tenant.tokens_per_day, ledger.today(tenant.name)
            if used.for_now:
                told = (
                    f"{least} tokens (prompt and max_tokens) do not fit beside the requests in flight: {today} of the "
                )
                told += f"{limit} of this day are used; try again when those requests have ended"
                headers = {"Retry-After": "1"}
                raise RequestRefused(429, told, code="rate_limit_exceeded", headers=headers) from None
            told = f"the tokens of this day are used up: {today} of {limit}, and this request may use {least}"
            raise RequestRefused(429, told, code="insufficient_quota", kind="insufficient_quota") from None

    async def _streamed(self, request: web.BaseRequest, asked: ClientRequest, tenant: Tenant) -> web.StreamResponse:
        dialect = asked.dialect
        own = dialect.wire in self._models.of(asked.shape.model).backend.wires
        async with Waiting(request, streamed=True, keeps_alive=False) as waiting:
            live = None if own else LiveAnswer(asked, envelope(asked), waiting.put)
            try:
                reply = await self._ask_in_time(asked, tenant, waiting, live)
                if live is not None:
                    live.finish(reply)
                elif not waiting.begun:
                    for event in dialect.events(dialect.document(reply, asked, envelope(asked)), asked):
                        waiting.put(event)
            except RequestRefused as refused:
                if not waiting.begun:
                    raise
                waiting.put(dialect.error_event(refused))
        if waiting.response is None:
            raise ConnectionResetError("the client left before its answer began")
        return waiting.response


class PassedEvents:
    """Passes the events of a server on to its client, each when it is complete: if the server breaks off in the middle
    of an event, the client gets no part of that event.

    ``count``: number of events of the answer so far. ``prompt_tokens`` and ``completion_tokens``: as the server reports
    them. An event that only has usage is ``hidden`` if the client did not ask for it.
    """

    def __init__(self, put: Callable[[bytes], None], *, hidden: bool) -> None:
        self._put = put
        self._hidden = hidden
        self._rest = bytearray()
        self.count = 0
        self.prompt_tokens = self.completion_tokens = 0

    def begin(self) -> None:
        """Drop the events of a failed attempt."""
        self._rest.clear()

    def take(self, data: bytes) -> None:
        rest, seen = self._rest, max(0, len(self._rest) - 3)
        rest += data
        end = max(at + len(gap) if (at := rest.rfind(gap, seen)) >= 0 else 0 for gap in GAPS)
        if end:
            whole = bytes(rest[:end])
            del rest[:end]
            self.count += whole.count(b"data:")
            if _USAGE.search(whole):
                whole = b"".join(event for event in _EVENT.findall(whole) if not self._reads_usage(event))
            if whole:
                self._put(whole)

    def _reads_usage(self, event: bytes) -> bool:
        """Read the usage of an event. Returns whether the event is hidden."""
        data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        document = json_of(data) if _USAGE.search(event) else None
        if not isinstance(document, dict):
            return False
        for place in (document, document.get("response"), document.get("message")):
            usage = place.get("usage") if isinstance(place, dict) else None
            if isinstance(usage, dict):
                counts = {name: count for name, count in usage.items() if type(count) is int}
                self.prompt_tokens = counts.get("prompt_tokens") or counts.get("input_tokens") or self.prompt_tokens
                answer = counts.get("completion_tokens") or counts.get("output_tokens")
                self.completion_tokens = answer or self.completion_tokens
        return self._hidden and document.get("choices") == []

    def finish(self) -> None:
        """Pass on the end of a complete answer, which may lack its last blank line."""
        if self._rest:
            self._put(bytes(self._rest))
            self.begin()


class _PersonCall(ClientCall):
    """The call for an interactive request. It reports when the request is sent."""

    __slots__ = ("_line_scheduler", "admitted", "asked", "events", "reply", "sent_at")

    def __init__(self, backend: ServedModels, request: ModelRequest, line_scheduler: LineScheduler) -> None:
        super().__init__(backend, request)
        self._line_scheduler = line_scheduler
        self.admitted = False
        self.sent_at = asyncio.get_running_loop().time()
        self.events: PassedEvents | None = None
        self.asked = False  # a request is in flight, or was not awaited
        self.reply: Reply | None = None

    def used(self, needs: Needs, reserved: int) -> tuple[int, int]:
        """Return the tokens of the prompt and of the answer that the request used. If the answer is incomplete, its
        tokens are those that arrived. If nothing arrived of an answer that the server no longer waits for, they are
        what was ``reserved``."""
        events = self.events
        said = self.request.said
        reply = self.reply
        heard, prompt = max(len(said), estimate_tokens("".join(said))), needs.prompt
        if events is not None:
            heard = events.completion_tokens or max(heard, events.count)
            prompt = events.prompt_tokens or prompt
        if reply is not None:
            usage = reply.usage
            if usage.prompt_tokens or usage.completion_tokens or refused(reply) is not None:
                return usage.prompt_tokens, usage.completion_tokens
            return prompt, heard or estimate_tokens(reply.text)
        if heard:
            return prompt, heard
        return (prompt, max(0, reserved - prompt)) if self.asked else (0, 0)

    async def send(self, endpoint: str) -> Reply:
        if self.events is not None:
            self.events.begin()
        self._line_scheduler.note_sent(endpoint)
        if not self.admitted:
            self.admitted = True
            self._line_scheduler.governor.admitted()
        self.asked = True
        try:
            self.reply = await super().send(endpoint)
        except BackendError as error:
            self.asked = isinstance(error, Timeout) and not error.unreached  # it may have generated all
            raise
        self.asked = False
        return self.reply
