"""UsersBackend: a user's object with ``generate`` or ``generate_batch``, as a Backend."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Self

from batch_agent.backends.base import Answers, Backend, Capabilities, ModelRequest, OnToolCall
from batch_agent.errors import BackendError, BadResponse, JobError, Unavailable, WorkerFailed
from batch_agent.messages import Reply, Usage, content_text
from batch_agent.ticks.generation import GeneratesMany, GeneratesOne, arguments_for, result_of
from batch_agent.ticks.guard import called, guarded
from batch_agent.tools.threads import Threads

Arguments = tuple[str, dict[str, object]]  # the prompt, and the other arguments


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
