"""Our backends as ticks use them: ``TickBackend`` for thoughts, ``TextBackend`` for code that simulations write.

A tick needs an answer now or not at all, so no request waits for a server that is down: while every endpoint is down,
one request at a time is the trial and all others fail at once. A request is created when its slot is granted, so it has
the newest observation. If a user's backend answers many prompts in one call, all requests that wait for a slot become
one call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import replace
from math import inf
from typing import Any, Self, TypeVar

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.backends.registry import open_backend
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.members import following
from batch_agent.dispatch.policy import Observer, Policy, Question, Replies
from batch_agent.errors import BackendError, JobError, Rejected, SpecError, Timeout, Truncated
from batch_agent.fleet.one_loop import running_loop
from batch_agent.foreign import encodable
from batch_agent.messages import Conversation, Message, Reply, Usage
from batch_agent.scheduler.capacity import FLEET_START, START
from batch_agent.scheduler.server import Terms
from batch_agent.ticks.action_space import ActionSpace, AnswerForm, text_of_reply
from batch_agent.ticks.config import Sampling
from batch_agent.ticks.users_backend import GenerationResult, UsersBackend

RETRIES = 2
TIMEOUT = 60.0  # seconds after which a request, or a whole thought, is cancelled
NOT_FOUND = 404
ANY_FORM = AnswerForm()

T = TypeVar("T")
Make = Callable[[], ModelRequest]  # called for each attempt, when it is sent


class TickBackend:
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
        if self.dispatcher is not None:
            self.dispatcher.refuse("the backend was closed before the answer arrived")
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
        return await dispatcher.ask(_Alone(self.backend, make), policy, observer=self._observer)

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


def backend_key(given: object) -> object:
    """Return what tells backends that users gave apart: the URL, or the identity of an object."""
    return given if isinstance(given, str | None) else id(given)


Place = tuple[asyncio.AbstractEventLoop, Callable[[], TickBackend]]  # the backend, to be called in its event loop


class _Alone(Question):
    """A question that is sent as one request."""

    def __init__(self, backend: Backend, make: Make) -> None:
        self._backend, self._make = backend, make

    async def send(self, endpoint: str) -> Reply:
        request = self._make()
        request.endpoint = endpoint
        try:
            return await self._backend.infer(request)
        except Truncated as error:
            return Reply(error.text, usage=error.usage or Usage(), finish_reason="length")


class _Group:
    """Questions that are sent as one call. ``sent`` are in the order of their answers."""

    def __init__(self, of: TickBackend) -> None:
        self._of = of
        self.call: asyncio.Task[Replies] | None = None
        self.waiting: dict[object, Make] = {}
        self.sent: list[object] = []

    async def send(self, endpoint: str) -> Replies:
        self.leave()
        self.sent = list(self.waiting)
        made = [_made(make) for make in self.waiting.values()]
        requests = [request for request in made if isinstance(request, ModelRequest)]
        replies = iter(await self._of.backend.infer_batch(requests) if requests else ())
        return [next(replies) if isinstance(request, ModelRequest) else request for request in made]

    def leave(self) -> None:
        """Accept no more questions."""
        if self._of.group is self:
            self._of.group = None


def _made(make: Make) -> ModelRequest | JobError:
    try:
        return make()
    except JobError as error:
        return error


class TextBackend(AbstractContextManager["TextBackend"]):
    """``TextBackend("vllm://host:8000").generate("Hello")``. Errors come back as ``finish_reason="error"``.

    The methods block, so call them in threads. Inside a runtime, an agent that decides by itself gets one that shares
    the runtime's slots. A TextBackend created directly runs its own event loop in a thread.
    """

    def __init__(
        self,
        backend: object = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        sampling: Sampling | None = None,
        timeout: float | None = TIMEOUT,
    ) -> None:
        opened, name = open_backend(backend, model=model, api_key=api_key)
        own = TickBackend(opened, name, replace(sampling or Sampling(), seed=None), None, timeout)
        self._own_loop: asyncio.AbstractEventLoop | None = None
        starting = threading.Lock()

        def start() -> Place:
            with starting:
                if self._own_loop is None:
                    self._own_loop = loop = asyncio.new_event_loop()
                    threading.Thread(target=_serve, args=[loop], name="batch-agent text backend", daemon=True).start()
                return self._own_loop, lambda: own

        self._place: Callable[[], Place | None] = start

    @classmethod
    def within(cls, place: Callable[[], Place | None]) -> Self:
        """Return the TextBackend of a runtime, which opens and closes the backend."""
        self = cls.__new__(cls)
        self._place, self._own_loop = place, None
        return self

    def generate(
        self,
        prompt: str,
        temperature: float | None = None,
        max_tokens: int | None = None,
        system_prompt: str | None = None,
    ) -> GenerationResult:
        return self.generate_batch([prompt], temperature, max_tokens, system_prompt)[0]

    def generate_batch(
        self,
        prompts: Sequence[str],
        temperature: float | None = None,
        max_tokens: int | None = None,
        system_prompt: str | None = None,
        *,
        system_prompts: Sequence[str | None] | None = None,
    ) -> list[GenerationResult]:
        """Return the answers in order, all requested at once. ``system_prompts`` has one for each prompt."""
        systems = [system_prompt] * len(prompts) if system_prompts is None else system_prompts
        if len(systems) != len(prompts):
            raise SpecError(f"there are {len(systems)} system_prompts for {len(prompts)} prompts")
        asked = list(map(_conversation, prompts, systems))
        return self._ask_all(asked, temperature, max_tokens=max_tokens)

    def generate_with_tools(
        self, prompt: str, tools: Iterable[object], temperature: float | None = None
    ) -> GenerationResult:
        """Return a call of one of the tools as JSON: ``{"tool": …, "params": {…}}``."""
        space = ActionSpace(tools)
        asked = [_conversation(prompt, space.instructions)]
        return self._ask_all(asked, temperature, form=space.form)[0]

    def is_available(self) -> bool:
        """Return whether the backend can be opened and answers."""
        return self._run(_opens)

    def close(self) -> None:
        """Close the backend that it opened itself. A runtime's backend stays open."""
        if self._own_loop is not None:
            self._run(TickBackend.close)
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
            self._own_loop = None

    unload = close

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask_all(
        self, asked: Sequence[Conversation], temperature: float | None, **options: Any
    ) -> list[GenerationResult]:
        async def ask(backend: TickBackend) -> list[GenerationResult]:
            return await asyncio.gather(
                *(_generate(backend, each, {"temperature": temperature, **options}) for each in asked)
            )

        return self._run(ask)

    def _run(self, ask: Callable[[TickBackend], Coroutine[Any, Any, T]]) -> T:
        loop, backend = self._place() or (None, None)
        if loop is None or backend is None or loop is running_loop():
            raise RuntimeError(
                "this blocks until the answer is there, so it cannot be called in the event loop: call it in a thread, "
                "or in a decide_action that is not async, while the runtime runs"
            )

        async def run() -> T:
            return await ask(backend())

        try:
            return asyncio.run_coroutine_threadsafe(run(), loop).result()
        except CancelledError:
            raise RuntimeError("the backend was closed during the request") from None


async def _generate(backend: TickBackend, asked: Conversation, options: Mapping[str, Any]) -> GenerationResult:
    try:
        reply = await backend.ask(lambda: backend.request(asked, "generate", **options))
    except (JobError, SpecError) as error:
        return GenerationResult("", 0, "error", {"error": str(error), "type": type(error).__name__})
    usage = reply.usage
    tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    reason = "length" if reply.finish_reason == "length" else "stop"
    return GenerationResult(text_of_reply(reply), usage.prompt_tokens + usage.completion_tokens, reason, tokens)


async def _opens(backend: TickBackend) -> bool:
    try:
        await backend.open()
        await backend.models()
    except Rejected as error:
        return error.status == NOT_FOUND  # it is up, but has no list of models
    except (JobError, SpecError):
        return False
    return True


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which cancels remaining tasks at the end
        runner.get_loop().run_forever()


def _conversation(prompt: str, system_prompt: str | None) -> Conversation:
    system = [Message("system", encodable(system_prompt))] if system_prompt else []
    return Conversation([*system, Message("user", encodable(prompt))])
