"""Backends that authors of simulations write, prompts in and texts out, as a Backend of this package."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self, runtime_checkable

from batch_agent.backends.base import Answers, Backend, Capabilities, ModelRequest, OnToolCall
from batch_agent.errors import BackendError, BadResponse, JobError, Unavailable, WorkerFailed
from batch_agent.messages import Reply, Usage, content_text
from batch_agent.ticks.plain import called, guarded, text_of
from batch_agent.tools.threads import Threads

Arguments = tuple[str, dict[str, object]]  # the prompt, and the other arguments


@dataclass(slots=True)
class GenerationResult:
    """``finish_reason`` is stop, length or error. An error has no ``text``, and ``metadata["error"]`` says why."""

    text: str
    tokens_used: int = 0
    finish_reason: str = "stop"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Why there is no answer, or ""."""
        if self.finish_reason != "error":
            return ""
        why = self.metadata.get("error")
        return (self.text if why is None else text_of(why)) or "no reason was given"


@runtime_checkable
class GeneratesOne(Protocol):
    @property
    def generate(self) -> Callable[..., object]: ...


@runtime_checkable
class GeneratesMany(Protocol):
    @property
    def generate_batch(self) -> Callable[..., object]: ...


def result_of(value: object) -> GenerationResult:
    """Return what a backend returned: a GenerationResult or an object with its fields, a mapping, or text. Raises
    WorkerFailed if it is invalid."""
    if isinstance(value, str):
        return GenerationResult(value)
    text, tokens, reason, metadata = (
        _field(value, name) for name in ("text", "tokens_used", "finish_reason", "metadata")
    )
    if isinstance(reason, str):
        reason = str.__str__(reason)  # an enum may be text with another ``str``
    result = GenerationResult(
        text if isinstance(text, str) else "",
        tokens if isinstance(tokens, int) else 0,
        "stop" if reason is None else text_of(reason) or "stop",
        metadata if isinstance(metadata, dict) else {},
    )
    if not isinstance(text, str) and not result.error:
        raise WorkerFailed(f"the backend returned a {type(value).__name__} without text")
    return result


def _field(value: object, name: str) -> object:
    def read() -> object:
        return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)

    return guarded(f"the backend returned a {type(value).__name__} whose {name}", read)


def arguments_for(method: Callable[..., object], prompt: str, system: str, **options: object) -> Arguments:
    """Return the prompt, and those options that the method has parameters for. The system prompt is among them as
    ``system_prompts``, a list of one, or as ``system_prompt``; if the method has neither, it is put before the
    prompt."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # a builtin without a signature
        parameters = {}.values()
    names = {one.name for one in parameters}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        names |= {"system_prompt", "temperature", "max_tokens"}
    taken = {name: value for name, value in options.items() if value is not None and name in names}
    if "system_prompts" in names:
        taken["system_prompts"] = [system]
    elif system and "system_prompt" in names:
        taken["system_prompt"] = system
    elif system:
        prompt = f"{system}\n\n{prompt}"
    return prompt, taken


class UsersBackend(Backend):
    """Methods that are not async run in threads, at most ``workers`` at once."""

    def __init__(self, generator: object, workers: int) -> None:
        self._generator = generator
        self._one = generator.generate if isinstance(generator, GeneratesOne) else None
        self._many = generator.generate_batch if isinstance(generator, GeneratesMany) else None
        is_async = inspect.iscoroutinefunction(self._one or self._many)
        inflight = Capabilities().default_inflight if is_async else workers
        self._capabilities = Capabilities(streaming=False, default_inflight=inflight, batch=self._many is not None)
        self._threads = Threads()

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
            if isinstance(answer, BackendError):
                raise answer
            return answer
        prompt, options = _arguments(self._one, request)
        try:
            return self._reply(await called(self._threads, self.name, partial(self._one, prompt, **options)))
        except JobError as error:
            raise _failed(error) from error

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
        calls = (self._infer_group(self._many, [asked[place] for place in group]) for group in groups.values())
        at_once = inspect.iscoroutinefunction(self._many)
        answered = await asyncio.gather(*calls) if at_once else [await call for call in calls]
        answers = dict(zip(chain(*groups.values()), chain(*answered), strict=True))
        return [answers[place] for place in range(len(requests))]

    async def _infer_group(self, method: Callable[..., object], asked: Sequence[Arguments]) -> Answers:
        prompts, options = [prompt for prompt, _ in asked], asked[0][1]
        if "system_prompts" in options:
            options = {**options, "system_prompts": [one["system_prompts"][0] for _, one in asked]}  # type: ignore[index]
        try:
            answers = _listed(await called(self._threads, self.name, partial(method, prompts, **options)))
            if len(answers) != len(asked):
                raise WorkerFailed(f"{self.name} gave {len(answers)} answers to {len(asked)} prompts")
        except JobError as error:
            return [_failed(error)] * len(asked)
        return [self._reply_or_error(answer) for answer in answers]

    def _reply(self, value: object) -> Reply:
        result = result_of(value)
        if result.error:
            raise WorkerFailed(f"{self.name}: {result.error}")
        return Reply(result.text, usage=Usage(completion_tokens=result.tokens_used), finish_reason=result.finish_reason)

    def _reply_or_error(self, value: object) -> Reply | BackendError:
        try:
            return self._reply(value)
        except JobError as error:
            return _failed(error)


def _failed(error: JobError) -> BackendError:
    """Return an error that is not retried and is no evidence about other prompts: the user's code would fail again."""
    if isinstance(error, BackendError):
        return error
    failure = BadResponse(str(error))
    failure.retryable, failure.second_hand = False, True
    return failure


def _listed(answers: object) -> list[object]:
    if not isinstance(answers, Iterable) or isinstance(answers, str | bytes | Mapping):
        raise WorkerFailed(f"generate_batch returned a {type(answers).__name__}, not a list of answers")
    return guarded("the list of answers", lambda: list(answers))


def _arguments(method: Callable[..., object], request: ModelRequest) -> Arguments:
    messages, shape = request.conversation.messages, request.shape
    system = "\n\n".join(content_text(message.content) for message in messages if message.role == "system")
    prompt = "\n\n".join(content_text(message.content) for message in messages if message.role != "system")
    return arguments_for(
        method, prompt, system, temperature=shape.temperature, max_tokens=shape.max_tokens, seed=shape.seed
    )
