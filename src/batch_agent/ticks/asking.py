"""Questions to one backend, under the engine's own limiter: how many at once, who goes first, who is down.

A tick wants an answer now or not at all. So, unlike a run, nobody waits here for a server that is down: while every
endpoint is, one question at a time is its trial and all others fail at once, with the reason. What is asked is made
when its slot is there and not before, so that it tells of the newest there is to tell.

Where a backend of the user's answers many in one call, the questions of one moment are one call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import JsonValue

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.limiter import Limiter
from batch_agent.dispatch.members import endpoints_of, following
from batch_agent.errors import BackendError, Interrupted, JobError, SpecError, Timeout, Truncated, Unavailable
from batch_agent.messages import Conversation, JsonObject, Reply, ToolSpec, Usage
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.endpoint import Endpoint, Terms
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.limit_search import START
from batch_agent.scheduler.ordering import LAST
from batch_agent.scheduler.retry import retry_delay
from batch_agent.ticks.users_backend import UsersBackend

RETRIES = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn. ``seed`` is what the seed of each question is made of; None: the server draws as it
    likes."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = 512
    seed: int | None = 0
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, whole, least in (("temperature", False, 0), ("top_p", False, 0), ("max_tokens", True, 1)):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, whole=whole) and value >= least):
                raise SpecError(f"{name} is {value!r}; it is a {'whole ' if whole else ''}number, {least} or more")
        if self.seed is not None and not _is_number(self.seed, whole=True):
            raise SpecError(f"seed is {self.seed!r}; it is a whole number, or None")


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, as it leaves."""

    conversation: Conversation
    job_id: str
    agent: int
    schema: JsonObject | None = None
    schema_text: str = ""  # by which questions with one schema are known
    tools: tuple[ToolSpec, ...] = ()
    seed: int | None = None
    temperature: float | None = None  # None: as all are asked
    max_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Question:
    """``ask`` is called when the question leaves, and may be called again where it is repeated; ``is_wanted`` says
    whether it is worth repeating."""

    progress: Progress  # its agent's
    ask: Callable[[], Asked]
    is_wanted: Callable[[], bool] = lambda: True


Passenger = tuple[Question, asyncio.Future[Reply]]


class Asking:
    """One backend, opened when it is first asked and open until ``close``. ``timeout``: seconds for one request."""

    def __init__(
        self, backend: Backend, model: str | None, sampling: Sampling, max_inflight: int | None, timeout: float | None
    ) -> None:
        self.backend = backend
        self._model, self._sampling, self._timeout = model, sampling, timeout
        self._max_inflight = max_inflight
        self._opening: asyncio.Task[None] | None = None
        self._entered = False
        self._limiter: Limiter | None = None
        self._following = ExitStack()  # where its endpoints come and go
        self._takes_seeds = False
        self._shapes: dict[object, RequestShape] = {}  # by what tells questions apart
        self._waiting: set[asyncio.Timeout] = set()  # of those who wait for a slot
        self._together: list[Passenger] = []  # what the next request answers
        self._flights: set[asyncio.Task[None]] = set()

    @property
    def _asks_together(self) -> bool:
        """A server that batches by itself does better with single requests, each answered when it is ready: in a list
        the slowest would hold the others."""
        return isinstance(self.backend, UsersBackend) and self.backend.capabilities.batch

    # Opening and closing

    async def open(self) -> None:
        """Enter the backend and learn its model's name, once for all who ask; tried again after a failure."""
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening = asyncio.get_running_loop().create_task(self._open())
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(opening)

    async def _open(self) -> None:
        if not self._entered:
            await self.backend.__aenter__()
            self._entered = True
        if self._model is None:
            names = await self.models()
            if len(names) != 1:
                raise SpecError(f"{self.backend.name} serves {', '.join(names) or 'no model'}: name one with model=")
            [self._model] = names
        self._takes_seeds = not self._asks_together and self._accepts(RequestShape(self._model, seed=0))

    async def models(self) -> list[str]:
        """What the backend serves, asked now; it must be entered."""
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self.backend.models()
        except TimeoutError:
            if not limit.expired():
                raise
            raise Timeout(f"{self.backend.name} did not say in {self._timeout:g} s what it serves") from None

    def _working_limiter(self) -> Limiter:
        """A limiter gives a server up that has not answered for long, as a run should; ticks go on, with a new one."""
        if self._limiter is None or self._limiter.over is not None:
            self._release_limiter()
            backend, able, given = self.backend, self.backend.capabilities, self._max_inflight is not None
            inflight = self._max_inflight or able.default_inflight
            terms = Terms(inflight, START if inflight is None else None)
            self._limiter = Limiter(
                inflight,
                endpoints=endpoints_of(backend, terms, given=given),
                terms=terms,
                on_health=self._health_changed,
                knock=backend.probe if backend.is_fleet else None,
            )
            party = self._following.enter_context(following(backend, self._limiter, given=given))
            if party is not None and self._model:
                party.use([self._model])
        return self._limiter

    def _release_limiter(self) -> None:
        self._following.close()
        if self._limiter is not None:
            self._limiter.close()

    def _accepts(self, shape: RequestShape) -> bool:
        try:
            self.backend.check(shape)
        except SpecError:
            return False
        return True

    async def close(self) -> None:
        for task in (self._opening, *self._flights):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._release_limiter()
        if self._entered:
            self._entered = False
            await self.backend.__aexit__(None, None, None)

    # Asking

    async def ask(self, question: Question) -> Reply:
        """The answer, cut off or not; or the error that could not be helped in time."""
        await self.open()
        if self._asks_together:
            try:
                return await self._ask_together(question)
            except BackendError:  # what was wrong may have been a neighbour's
                if not question.is_wanted():
                    raise
        limiter = self._working_limiter()
        ticket = limiter.claim(question.progress, LAST)
        while True:
            try:
                return await self._ask_alone(limiter, question, ticket)
            except Truncated as error:
                return Reply(error.text, usage=error.usage or Usage(), finish_reason="length")
            except BackendError as error:
                hopeless = not error.retryable or ticket.failures > RETRIES or _is_down(limiter)
                if hopeless or not question.is_wanted():
                    raise
                elsewhere = ticket.endpoint is not None and ticket.endpoint.health.is_down
                delay = 0.0 if elsewhere else retry_delay(ticket.failures or 1, error.retry_after, random.random())
            await limiter.again(ticket, delay)

    async def _ask_alone(self, limiter: Limiter, question: Question, ticket: Ticket) -> Reply:
        await self._hold(limiter, ticket)
        try:
            request = self._request(question.ask(), ticket)
            return await self._timed(limiter, ticket, self.backend.infer(request), lambda reply: reply)
        finally:
            limiter.release(ticket)

    async def _ask_together(self, question: Question) -> Reply:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reply] = loop.create_future()
        if not self._together:
            loop.call_soon(self._take_off)
        self._together.append((question, answer))
        return await answer

    def _take_off(self) -> None:
        """All that was asked in this turn of the event loop leaves as one request."""
        asked, self._together = self._together, []
        flight = asyncio.get_running_loop().create_task(self._fly(asked))
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)

    async def _fly(self, asked: Sequence[Passenger]) -> None:
        limiter = self._working_limiter()
        ticket = limiter.claim(asked[0][0].progress, LAST)
        try:
            await self._hold(limiter, ticket)
            shapes: dict[RequestShape, list[tuple[ModelRequest, asyncio.Future[Reply]]]] = {}
            for question, answer in asked:
                if not answer.done():
                    try:
                        request = self._request(question.ask(), ticket)
                        shapes.setdefault(request.shape, []).append((request, answer))
                    except JobError as error:  # it cannot be asked, and takes nobody with it
                        answer.set_exception(error)
            for group in shapes.values():
                requests = [request for request, _ in group]
                replies = await self._timed(limiter, ticket, self._infer_batch(requests), _as_one)
                for (_, answer), reply in zip(group, replies, strict=True):
                    _settle(answer, reply)
        except (BackendError, Interrupted) as error:
            for _, answer in asked:
                _settle(answer, error)
        finally:
            limiter.release(ticket)

    async def _infer_batch(self, requests: Sequence[ModelRequest]) -> list[Reply | BackendError]:
        replies = await self.backend.infer_batch(requests)
        failures = [reply for reply in replies if isinstance(reply, BackendError)]
        if len(failures) == len(requests):  # it was the backend, not one of them
            raise failures[0]
        return replies

    # Slots

    async def _hold(self, limiter: Limiter, ticket: Ticket) -> None:
        """Until the ticket has its slot; an Unavailable where there is none to be had."""
        if ticket.state != "held" and _is_down(limiter):
            limiter.release(ticket)
            raise self._outage(limiter)
        limit = asyncio.timeout(None)
        self._waiting.add(limit)
        try:
            async with limit:
                await limiter.hold(ticket)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._outage(limiter) from None
        finally:
            self._waiting.discard(limit)

    async def _timed(self, limiter: Limiter, ticket: Ticket, answering: Awaitable[T], told: Callable[[T], Reply]) -> T:
        """What the backend says in the time it may take; and what that tells of its health."""
        loop = asyncio.get_running_loop()
        limit = limiter.endpoints.limit(ticket, self._timeout)
        try:
            try:
                async with limit:
                    answer = await answering
            except TimeoutError:
                if not limit.expired():
                    raise
                seconds = loop.time() - ticket.sent_at
                raise Timeout(f"{self.backend.name} gave no answer in {seconds:.3g} s") from None
            except asyncio.CancelledError:
                if cancelled_by_us():
                    raise
                raise Unavailable(f"{self.backend.name} gave the call up") from None
        except BackendError as error:
            limiter.endpoints.failed(ticket, error)
            raise
        finally:
            limiter.endpoints.finished(ticket)
        limiter.answered(ticket, loop.time() - ticket.sent_at, told(answer))
        return answer

    def _outage(self, limiter: Limiter) -> Unavailable:
        reasons = dict.fromkeys(endpoint.health.reason for endpoint in limiter.scheduler.endpoints)
        return Unavailable(f"{self.backend.name} is down: {'; '.join(filter(None, reasons)) or 'it does not answer'}")

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        if endpoint.health.state == "down" and self._limiter is not None and _is_down(self._limiter):
            for limit in self._waiting:
                limit.reschedule(now)

    # Requests

    def _request(self, asked: Asked, ticket: Ticket) -> ModelRequest:
        shape = self._shape(asked)
        if asked.seed is not None and self._takes_seeds:
            shape = replace(shape, seed=asked.seed)
        endpoint = ticket.endpoint.name if ticket.endpoint is not None else ""
        return ModelRequest(shape, asked.conversation, asked.job_id, agent=asked.agent, endpoint=endpoint)

    def _shape(self, asked: Asked) -> RequestShape:
        """The answer is held to the schema by a grammar, or else by tools of which one must be called."""
        capabilities, sampling = self.backend.capabilities, self._sampling
        # A server may be found out not to keep to schemas.
        key = asked.schema_text, capabilities.native_schema, asked.temperature, asked.max_tokens
        if known := self._shapes.get(key):
            return known
        offers_tools = not capabilities.native_schema and not self._asks_together and asked.tools
        shape = RequestShape(
            model=self._model or "",
            max_tokens=sampling.max_tokens if asked.max_tokens is None else asked.max_tokens,
            temperature=sampling.temperature if asked.temperature is None else asked.temperature,
            top_p=sampling.top_p,
            tools=asked.tools if offers_tools else (),
            tool_choice="required" if offers_tools else None,
            schema=asked.schema if capabilities.native_schema else None,
            schema_name="action",
            extra_body=sampling.extra_body,
        )
        self.backend.check(shape)
        self._shapes[key] = shape
        return shape


def _is_number(value: object, *, whole: bool) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool)


def _is_down(limiter: Limiter) -> bool:
    return not any(_works(endpoint) for endpoint in limiter.scheduler.endpoints)


def _works(endpoint: Endpoint) -> bool:
    return not (endpoint.health.is_down or endpoint.given_up or endpoint.leaving)


def _as_one(replies: Sequence[Reply | BackendError]) -> Reply:
    """What a request for many took in all."""
    return Reply("", usage=sum((reply.usage for reply in replies if isinstance(reply, Reply)), Usage()))


def _settle(answer: asyncio.Future[Reply], reply: Reply | JobError) -> None:
    if answer.done():
        return
    if isinstance(reply, JobError):
        answer.set_exception(reply)
    else:
        answer.set_result(reply)
