"""TextBackend: any backend under the names that simulations call theirs by. Its methods wait, so call them in threads.

An agent that decides by itself finds one in its runtime, which shares the runtime's slots; made by hand, it has an
event loop of its own in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from batch_agent.backends.registry import open_backend
from batch_agent.errors import BatchAgentError, InternalError, Rejected
from batch_agent.messages import Conversation, Message
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.ordering import LAST
from batch_agent.ticks.asking import Asked, Asking, Question, Sampling
from batch_agent.ticks.generation import GenerationResult
from batch_agent.ticks.reading import words_of
from batch_agent.ticks.repertoire import Repertoire

T = TypeVar("T")
TIMEOUT = 60.0
NOT_FOUND = 404


class TextBackend:
    """``TextBackend("vllm://host:8000").generate("Hello")``. Errors come back as ``finish_reason="error"``."""

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
        asking = Asking(opened, name, replace(sampling or Sampling(), seed=None), None, timeout)
        self._asking: Callable[[], Asking] = lambda: asking
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._loop: Callable[[], asyncio.AbstractEventLoop | None] = self._start_loop

    @classmethod
    def within(cls, asking: Callable[[], Asking], loop: Callable[[], asyncio.AbstractEventLoop | None]) -> Self:
        """That of a runtime, which opens and closes what is asked."""
        self = cls.__new__(cls)
        self._asking, self._loop, self._own_loop = asking, loop, None
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
    ) -> list[GenerationResult]:
        """The answers in the order of the prompts, all asked at once."""
        asked = [
            Asked(_conversation(prompt, system_prompt), "generate", 0, temperature=temperature, max_tokens=max_tokens)
            for prompt in prompts
        ]
        return self._run(self._ask_all(asked))

    def generate_with_tools(
        self, prompt: str, tools: Iterable[object], temperature: float | None = None
    ) -> GenerationResult:
        """An answer that is a call of one of the tools, as JSON: ``{"tool": …, "params": {…}}``."""
        known = Repertoire(tools)
        conversation = _conversation(prompt, known.instructions)
        schema, text, specs = known.schema, known.schema_text, tuple(known.specs)
        asked = Asked(conversation, "generate", 0, schema, text, specs, temperature=temperature)
        return self._run(self._ask_all([asked]))[0]

    def is_available(self) -> bool:
        """Whether it can be opened and answers."""
        return self._run(self._opens())

    def close(self) -> None:
        """Ends what it opened by itself; a runtime's stays open."""
        loop, self._own_loop = self._own_loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._asking().close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    unload = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _ask_all(self, asked: Sequence[Asked]) -> list[GenerationResult]:
        return list(await asyncio.gather(*map(self._ask, asked)))

    async def _ask(self, asked: Asked) -> GenerationResult:
        try:
            reply = await self._asking().ask(Question(Progress(LAST), lambda: asked))
        except InternalError:
            raise
        except BatchAgentError as error:
            return GenerationResult("", 0, "error", {"error": str(error), "type": type(error).__name__})
        usage = reply.usage
        tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        reason = "length" if reply.finish_reason == "length" else "stop"
        return GenerationResult(words_of(reply), usage.prompt_tokens + usage.completion_tokens, reason, tokens)

    async def _opens(self) -> bool:
        asking = self._asking()
        try:
            await asking.open()
            try:
                await asking.models()
            except Rejected as error:
                return error.status == NOT_FOUND  # it does not list its models, and is there
        except InternalError:
            raise
        except BatchAgentError:
            return False
        return True

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = self._loop()
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if loop is None or here is loop:
            coroutine.close()
            raise RuntimeError(
                "this waits for an answer, and would stop the event loop that brings it: call it in a thread, as a "
                "decide_action that is not async is called, and while the runtime runs"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        if self._own_loop is None:
            loop = self._own_loop = asyncio.new_event_loop()

            def serve() -> None:
                loop.run_forever()
                loop.close()

            threading.Thread(target=serve, name="batch-agent text backend", daemon=True).start()
        return self._own_loop


def _conversation(prompt: str, system_prompt: str | None) -> Conversation:
    system = [Message("system", system_prompt)] if system_prompt else []
    return Conversation([*system, Message("user", prompt)])
