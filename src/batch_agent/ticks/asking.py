"""Sends the requests of ticks to one backend, through the dispatcher.

A tick needs an answer now or not at all, so no request waits for a server that is down: while every endpoint is down,
one request at a time is the trial and all others fail at once. A request is created when its slot is granted, so it has
the newest observation.

If a user's backend answers many prompts in one call, all requests that wait for a slot become one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from math import inf

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.members import following
from batch_agent.dispatch.policy import Observer, Policy, Question, Replies
from batch_agent.errors import BackendError, JobError, SpecError, Timeout, Truncated
from batch_agent.messages import Conversation, Reply, Usage
from batch_agent.scheduler.limit_search import FLEET_START, START
from batch_agent.scheduler.server import Terms
from batch_agent.ticks.action_space import AnswerForm
from batch_agent.ticks.config import Sampling
from batch_agent.ticks.users_backend import UsersBackend

RETRIES = 2
ANY_FORM = AnswerForm()


Make = Callable[[], ModelRequest]  # called for each attempt, when it is sent


class Asking:
    """One backend, opened on first use and open until ``close``. ``timeout`` is the seconds for one request."""

    def __init__(
        self,
        backend: Backend,
        model: str | None,
        sampling: Sampling,
        max_inflight: int | None,
        timeout: float | None,
        observer: Observer | None = None,
    ) -> None:
        self.backend = backend
        self.dispatcher: Dispatcher | None = None  # while it is open
        self._observer = Observer() if observer is None else observer
        self._model, self._sampling, self._timeout = model, sampling, timeout
        self._max_inflight = max_inflight
        # A server that batches by itself works better with single requests: in a list the slowest delays the others.
        self._together = isinstance(backend, UsersBackend) and backend.capabilities.batch
        self._opening: asyncio.Task[Dispatcher] | None = None
        self._stack = AsyncExitStack()  # what is open
        self._takes_seeds = False
        self._shapes: dict[object, RequestShape] = {}  # by what distinguishes requests
        self.group: _Group | None = None  # accepts more requests until it has a slot
        self._calls: set[asyncio.Task[Replies]] = set()

    # Opening and closing

    async def open(self) -> Dispatcher:
        """Enter the backend and learn its model's name, once for all callers, unless it failed."""
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening = asyncio.get_running_loop().create_task(self._open())
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(opening)

    async def _open(self) -> Dispatcher:
        async with AsyncExitStack() as stack:
            backend = await stack.enter_async_context(self.backend)
            if self._model is None:
                names = await self.models()
                if len(names) != 1:
                    raise SpecError(f"{backend.name} serves {', '.join(names) or 'no model'}: name one with model=")
                [self._model] = names
            with suppress(SpecError):
                backend.check(RequestShape(self._model, seed=0))
                self._takes_seeds = not self._together
            one, most = len(backend.servers) == 1, self._max_inflight or backend.capabilities.default_inflight
            start = None if most is not None else START if one else FLEET_START
            terms = Terms(most, start, by_clock=one, given=self._max_inflight is not None)
            dispatcher = Dispatcher(backend, most, servers=backend.servers, terms=terms, max_outage=inf)
            stack.callback(dispatcher.close)
            follower = stack.enter_context(following(backend, dispatcher))
            if follower is not None:
                follower.use([self._model])
            self._stack = stack.pop_all()
        self.dispatcher = dispatcher
        return dispatcher

    async def models(self) -> list[str]:
        """Return the models that the backend serves now; it must be entered."""
        try:
            return await asyncio.wait_for(self.backend.models(), self._timeout)
        except TimeoutError:
            raise Timeout(f"{self.backend.name} did not list its models in {self._timeout or 0:g} s") from None

    async def close(self) -> None:
        for task in (self._opening, *self._calls):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._stack.aclose()

    # Asking

    async def ask(self, make: Make, wants_again: Callable[[BackendError], bool] = lambda error: True) -> Reply:
        """Return the answer, cut off or not. Raises the final error. ``wants_again`` is called after a failed attempt,
        and returns whether a retry is worth it."""
        dispatcher = await self.open()
        if self._together:
            try:
                return await self._ask_together(dispatcher, make)
            except BackendError as error:  # another request of the call may have caused it
                if not wants_again(error):
                    raise
        policy = Policy(RETRIES, wait_out=False, timeout=self._timeout, timeout_option="timeout", wanted=wants_again)
        return await dispatcher.ask(_Alone(self, make), policy, observer=self._observer)

    async def _ask_together(self, dispatcher: Dispatcher, make: Make) -> Reply:
        """Send the request with the others that wait for a slot. The call ends when all its agents left."""
        group = self.group
        if group is None:
            group = self.group = _Group(self)
            policy = Policy(0, wait_out=False, timeout=self._timeout, timeout_option="timeout")
            group.call = asyncio.get_running_loop().create_task(dispatcher.ask_many(group, policy))
            self._calls.add(group.call)
            group.call.add_done_callback(self._calls.discard)
        assert group.call is not None
        me = object()
        group.waiting[me] = make
        try:
            answers = await asyncio.shield(group.call)
        finally:
            del group.waiting[me]
            if not group.waiting:
                group.leave()
                group.call.cancel()
        answer = answers[group.sent.index(me)]
        if isinstance(answer, JobError):
            raise answer
        return answer

    # Requests

    def request(
        self,
        conversation: Conversation,
        job_id: str,
        agent: int = 0,
        form: AnswerForm = ANY_FORM,
        *,
        seed: int | None = None,
        temperature: float | None = None,  # None: that of the runtime
        max_tokens: int | None = None,
    ) -> ModelRequest:
        """Return one request. A grammar enforces the schema, or else tools of which one must be called."""
        native = self.backend.capabilities.native_schema  # a server may turn out not to enforce schemas
        key = form.text, native, temperature, max_tokens
        shape = self._shapes.get(key)
        if shape is None:
            sampling, offered = self._sampling, () if native or self._together else form.tools
            shape = RequestShape(
                model=self._model or "",
                max_tokens=sampling.max_tokens if max_tokens is None else max_tokens,
                temperature=sampling.temperature if temperature is None else temperature,
                top_p=sampling.top_p,
                tools=offered,
                tool_choice="required" if offered else None,
                schema=form.schema if native else None,
                schema_name="action",
                extra_body=sampling.extra_body,
            )
            self.backend.check(shape)
            self._shapes[key] = shape
        if seed is not None and self._takes_seeds:
            shape = replace(shape, seed=seed)
        return ModelRequest(shape, conversation, job_id, agent=agent)


class _Alone(Question):
    """A question that is sent as one request."""

    def __init__(self, asking: Asking, make: Make) -> None:
        self._asking, self._make = asking, make

    async def send(self, endpoint: str) -> Reply:
        request = self._make()
        request.endpoint = endpoint
        try:
            return await self._asking.backend.infer(request)
        except Truncated as error:
            return Reply(error.text, usage=error.usage or Usage(), finish_reason="length")


class _Group:
    """Questions that are sent as one call. ``sent`` are in the order of their answers."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self.call: asyncio.Task[Replies] | None = None
        self.waiting: dict[object, Make] = {}
        self.sent: list[object] = []

    async def send(self, endpoint: str) -> Replies:
        self.leave()
        self.sent = list(self.waiting)
        made = [_made(make) for make in self.waiting.values()]
        requests = [request for request in made if isinstance(request, ModelRequest)]
        replies = iter(await self._asking.backend.infer_batch(requests) if requests else ())
        return [next(replies) if isinstance(request, ModelRequest) else request for request in made]

    def leave(self) -> None:
        """Accept no more questions."""
        if self._asking.group is self:
            self._asking.group = None


def _made(make: Make) -> ModelRequest | JobError:
    try:
        return make()
    except JobError as error:
        return error
