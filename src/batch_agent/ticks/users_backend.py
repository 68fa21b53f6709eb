"""UsersBackend: an object of the user's with ``generate`` and, where it has it, ``generate_batch``, as a Backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.errors import BackendError, BadResponse, Unavailable
from batch_agent.foreign import describe
from batch_agent.messages import Reply, Usage, content_text
from batch_agent.ticks.generation import GeneratesMany, GeneratesOne, arguments_for, result_of
from batch_agent.tools.threads import Threads


class UsersBackend(Backend):
    """Methods that are not async run in threads, ``workers`` of them at once."""

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
        """One that says it is not available is not asked, until it is opened again."""
        self._threads = Threads()
        available = getattr(self._generator, "is_available", None)
        try:
            if available is not None and not await self._call(available, {}):
                raise Unavailable(f"{self.name} says that it is not available", unreached=True)
        except BaseException:
            self._threads.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.close()

    async def models(self) -> list[str]:
        return [self.name]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if self._one is None:
            [answer] = await self.infer_batch([request])
            if isinstance(answer, BackendError):
                raise answer
            return answer
        prompt, options = _asked(self._one, request)
        return self._reply(await self._call(self._one, options, prompt))

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> list[Reply | BackendError]:
        assert self._many is not None
        asked = [_asked(self._many, request) for request in requests]
        try:
            answers = await self._call(self._many, asked[0][1], [prompt for prompt, _ in asked])
        except BackendError as error:
            return [error] * len(requests)
        if not isinstance(answers, Sequence) or len(answers) != len(requests):
            found = f"{len(answers)} answers" if isinstance(answers, Sequence) else f"a {type(answers).__name__}"
            return [_failed(f"{self.name}.generate_batch returned {found} to {len(requests)} prompts")] * len(requests)
        return [self._reply_or_error(answer) for answer in answers]

    async def _call(self, method: Callable[..., object], options: Mapping[str, object], *given: object) -> object:
        """The one place where the user's code runs: what it raises says that the backend is not to be had."""
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*given, **options)
            value = await self._threads.run(lambda: method(*given, **options))
            return await value if inspect.isawaitable(value) else value
        except (BackendError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and cancelled_by_us():
                raise
            raise _failed(f"{self.name} raised {describe(error)}") from error

    def _reply(self, value: object) -> Reply:
        result = result_of(value)
        if result.error:
            raise _failed(f"{self.name}: {result.error}")
        return Reply(result.text, usage=Usage(completion_tokens=result.tokens_used), finish_reason=result.finish_reason)

    def _reply_or_error(self, value: object) -> Reply | BackendError:
        try:
            return self._reply(value)
        except BackendError as error:
            return error


def _failed(why: str) -> BadResponse:
    """It says nothing about what other prompts would get, and what the user's code raises is not tried again."""
    error = BadResponse(why)
    error.retryable = False
    return error


def _asked(method: Callable[..., object], request: ModelRequest) -> tuple[str, dict[str, object]]:
    messages, shape = request.conversation.messages, request.shape
    system = "\n\n".join(content_text(message.content) for message in messages if message.role == "system")
    prompt = "\n\n".join(content_text(message.content) for message in messages if message.role != "system")
    return arguments_for(
        method, prompt, system, temperature=shape.temperature, max_tokens=shape.max_tokens, seed=shape.seed
    )
