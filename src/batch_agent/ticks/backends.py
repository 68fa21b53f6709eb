"""Backends as ticks use them: ``TickBackend`` for thoughts, ``TextBackend`` for code that simulations write,
``UsersBackend`` for objects that their authors write.

A tick needs an answer now or not at all, so no request waits for a server that is down: while every endpoint is down,
one request at a time is the trial and all others fail at once. A request is created when its slot is granted, so it has
the newest observation. If a user's backend answers many prompts in one call, all requests that wait for a slot become
one call.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any, Self, TypeVar, cast

from pydantic import JsonValue

from batch_agent.backends.address import check_known
from batch_agent.backends.base import Answers, Backend, Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.registry import open_backend
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.members import following
from batch_agent.dispatch.policy import Observer, Policy, Question, Replies
from batch_agent.errors import (
    BackendError,
    BadResponse,
    JobError,
    Rejected,
    SpecError,
    Timeout,
    Truncated,
    Unavailable,
    WorkerFailed,
)
from batch_agent.fleet.backend import running_loop
from batch_agent.foreign import encodable
from batch_agent.messages import Conversation, Message, Reply, Usage, content_text
from batch_agent.option import check_kind, check_positive
from batch_agent.scheduler.capacity import FLEET_START, START
from batch_agent.scheduler.server_state import Terms
from batch_agent.ticks.agent import ActionSpace, AnswerForm, text_of_reply
from batch_agent.ticks.plain import Arguments, GenerationResult, arguments_for, called, guarded, method_of, result_of
from batch_agent.tools.threads import Threads

# Keys of ``backend_config``; several names mean the same.
SAME = {"base_url": "backend", "api_base": "backend", "url": "backend", "model_name": "model"}
SAMPLING_KEYS = ("temperature", "max_tokens", "top_p", "top_k", "seed")
KNOWN = ("backend", *SAME, "model", *SAMPLING_KEYS, "model_path", "api_key", "n_gpu_layers", "timeout")

RETRIES = 2
TIMEOUT = 60.0  # seconds after which a request, or a whole thought, is cancelled
NOT_FOUND = 404
ANY_FORM = AnswerForm()

T = TypeVar("T")
Make = Callable[[], ModelRequest]  # called for each attempt, when it is sent


@dataclass(frozen=True, slots=True)
class Sampling:
    """``seed`` is the base from which the seed of each request is derived; None: the server chooses the seeds."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = 512
    seed: int | None = 0
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(int | float, or_zero=True, temperature=self.temperature, top_p=self.top_p)
        check_positive(int, max_tokens=self.max_tokens)
        check_kind(int, "a whole number", seed=self.seed)


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a TickRuntime, and those of its Sampling, that a configuration sets. Raises SpecError for
    an unknown key."""
    if not isinstance(config, Mapping):
        raise SpecError(f"backend_config is a {type(config).__name__}; it is a mapping with some of {', '.join(KNOWN)}")
    given = {key: value for key, value in config.items() if value is not None}
    check_known(map(str, given), KNOWN, "backend_config has no key")
    options: dict[str, Any] = {}
    for key, value in given.items():
        if (name := SAME.get(key, key)) in options:
            raise SpecError(f"backend_config has {key} and another key that means {name}: give one of them")
        options[name] = value
    if options.pop("n_gpu_layers", None):
        raise SpecError("backend_config: the embedded engine has no n_gpu_layers; for a GPU give the URL of a server")
    if "top_k" in options:
        options["extra_body"] = {"top_k": options.pop("top_k")}
    if (path := options.pop("model_path", None)) is not None:
        if "backend" in options:  # servers name a model by the path they loaded it from
            return {"model": str(path), **options}
        options["backend"] = f"local://{path}"
    return options


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
        self._model = model
        self._sampling = sampling
        self._timeout = timeout
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
            one = len(backend.servers) == 1
            most = self._max_inflight or backend.capabilities.default_inflight
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
        """Send the request together with the others that wait for a slot, as one call. The call is cancelled when no
        agent waits for it any more."""
        group = self.group
        if group is None:
            group = self.group = _Group(self)
            policy = Policy(0, wait_out=False, timeout=self._timeout, timeout_option="timeout")
            group.call = asyncio.get_running_loop().create_task(dispatcher.ask_many(group, policy))
            self._calls.add(group.call)
            group.call.add_done_callback(self._calls.discard)
        assert group.call is not None
        group.waiting[make] = None
        try:
            answers = await asyncio.shield(group.call)
        finally:
            del group.waiting[make]
            if not group.waiting:
                group.leave()
                group.call.cancel()
        answer = answers[group.sent.index(make)]
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
        """Return one request. A grammar enforces the schema; without a schema, one of the tools must be called."""
        native = self.backend.capabilities.native_schema  # a server may turn out not to enforce schemas
        key = form.text, native, temperature, max_tokens
        shape = self._shapes.get(key)
        if shape is None:
            sampling = self._sampling
            offered = () if native or self._together else form.tools
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
    """Return a key that is equal for the same backend: its URL, or the identity of the object."""
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
    """Questions that are sent as one call. ``sent`` has them in the order of their answers."""

    def __init__(self, of: TickBackend) -> None:
        self._of = of
        self.call: asyncio.Task[Replies] | None = None
        self.waiting: dict[Make, None] = {}
        self.sent: list[Make] = []

    async def send(self, endpoint: str) -> Replies:
        self.leave()
        self.sent = list(self.waiting)
        made = [_made(make) for make in self.sent]
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
    """A backend for code of simulations: ``TextBackend("vllm://host:8000").generate("Hello")``. Errors are returned as
    ``finish_reason="error"``. The methods block, so call them in threads.

    Inside a runtime, an agent that decides by itself gets a TextBackend that shares the runtime's slots. A TextBackend
    that is created directly runs its own event loop in a thread.
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
        """Return the answers in order. All requests are sent at once. ``system_prompts`` has one for each prompt."""
        systems = [system_prompt] * len(prompts) if system_prompts is None else system_prompts
        if len(systems) != len(prompts):
            raise SpecError(f"there are {len(systems)} system_prompts for {len(prompts)} prompts")
        asked = list(map(_conversation, prompts, systems))
        return self._ask_all(asked, temperature=temperature, max_tokens=max_tokens)

    def generate_with_tools(
        self, prompt: str, tools: Iterable[object], temperature: float | None = None
    ) -> GenerationResult:
        """Return a call of one of the tools as JSON: ``{"tool": …, "params": {…}}``."""
        space = ActionSpace(tools)
        asked = [_conversation(prompt, space.instructions)]
        return self._ask_all(asked, temperature=temperature, form=space.form)[0]

    def is_available(self) -> bool:
        """Return whether the backend can be opened and answers."""
        return self._run(_opens)

    def close(self) -> None:
        """Close the backend if this object opened it. A runtime's backend stays open."""
        if self._own_loop is not None:
            self._run(TickBackend.close)
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
            self._own_loop = None

    unload = close

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask_all(self, asked: Sequence[Conversation], **options: Any) -> list[GenerationResult]:
        async def ask(backend: TickBackend) -> list[GenerationResult]:
            return await asyncio.gather(*(_generate(backend, each, options) for each in asked))

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


class UsersBackend(Backend):
    """A backend of the user's. Methods that are not async run in threads, at most ``workers`` at once."""

    def __init__(self, generator: object, workers: int) -> None:
        self._generator = generator
        self._one = method_of(generator, "generate")
        self._many = method_of(generator, "generate_batch")
        is_async = inspect.iscoroutinefunction(self._one or self._many)
        inflight = Capabilities().default_inflight if is_async else workers
        self._capabilities = Capabilities(streaming=False, default_inflight=inflight, batch=self._many is not None)
        self._threads = Threads()

    @staticmethod
    def accepts(given: object) -> bool:
        """Return whether the object has a method that generates texts."""
        is_theirs = not isinstance(given, Backend | type)
        return is_theirs and any(method_of(given, name) for name in ("generate", "generate_batch"))

    @property
    def name(self) -> str:
        return type(self._generator).__name__

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def __aenter__(self) -> Self:
        """Enter the backend. Raises Unavailable if the object reports that it is not available."""
        self._threads = Threads()
        try:
            available = guarded("is_available", lambda: getattr(self._generator, "is_available", None))
            if available is not None and not await called(self._threads, self.name, available):
                raise Unavailable(f"{self.name} reports that it is not available", unreached=True)
        except BaseException:
            self._threads.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._threads.close()

    async def models(self) -> list[str]:
        return [self.name]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if self._one is None:
            [answer] = await self.infer_batch([request])
        else:
            prompt, options = _arguments(self._one, request)
            [answer] = await self._call(self._one, prompt, options)
        if isinstance(answer, BackendError):
            raise answer
        return answer

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> Answers:
        """Return an answer or an error for each request. Requests that differ in more than their prompts, such as the
        system prompt, are separate calls: concurrent if the method is async, else one after the other, because many
        models cannot be used by two threads."""
        assert self._many is not None
        asked = [_arguments(self._many, request) for request in requests]
        groups: dict[object, list[int]] = {}  # positions, by what the requests have in common
        for place, (_, options) in enumerate(asked):
            key = tuple((name, value) for name, value in options.items() if name != "system_prompts")
            groups.setdefault(key, []).append(place)
        calls = []
        for places in groups.values():
            options = asked[places[0]][1]
            if "system_prompts" in options:
                systems = [asked[place][1]["system_prompts"] for place in places]
                options = {**options, "system_prompts": [system for [system] in cast("list[list[str]]", systems)]}
            calls.append(self._call(self._many, [asked[place][0] for place in places], options))
        at_once = inspect.iscoroutinefunction(self._many)
        answered = await asyncio.gather(*calls) if at_once else [await call for call in calls]
        answers = dict(zip(chain(*groups.values()), chain(*answered), strict=True))
        return [answers[place] for place in range(len(requests))]

    async def _call(self, method: Callable[..., object], asked: str | list[str], options: Mapping[str, Any]) -> Answers:
        """Call the user's method with one prompt or with several. Returns an answer or an error for each."""
        try:
            value = await called(self._threads, self.name, partial(method, asked, **options))
            answers = [value] if isinstance(asked, str) else self._listed(value, len(asked))
        except JobError as error:
            return [_failed(error)] * (1 if isinstance(asked, str) else len(asked))
        return [self._reply(answer) for answer in answers]

    def _listed(self, answers: object, count: int) -> list[object]:
        if not isinstance(answers, Iterable) or isinstance(answers, str | bytes | Mapping):
            raise WorkerFailed(f"generate_batch returned a {type(answers).__name__}, not a list of answers")
        listed = guarded("the list of answers", lambda: list(answers))
        if len(listed) != count:
            raise WorkerFailed(f"{self.name} gave {len(listed)} answers to {count} prompts")
        return listed

    def _reply(self, value: object) -> Reply | BackendError:
        try:
            result = result_of(value)
        except JobError as error:
            return _failed(error)
        if result.error:
            return _failed(WorkerFailed(f"{self.name}: {result.error}"))
        return Reply(result.text, usage=Usage(completion_tokens=result.tokens_used), finish_reason=result.finish_reason)


def _failed(error: JobError) -> BackendError:
    """Return an error that is not retried and is no evidence about other prompts: the user's code would fail again."""
    if isinstance(error, BackendError):
        return error
    failure = BadResponse(str(error))
    failure.retryable, failure.second_hand = False, True
    return failure


def _arguments(method: Callable[..., object], request: ModelRequest) -> Arguments:
    messages, shape = request.conversation.messages, request.shape
    system = "\n\n".join(content_text(message.content) for message in messages if message.role == "system")
    prompt = "\n\n".join(content_text(message.content) for message in messages if message.role != "system")
    return arguments_for(
        method, prompt, system, temperature=shape.temperature, max_tokens=shape.max_tokens, seed=shape.seed
    )
