"""TextBackend: any backend with the methods that simulations call. They block, so call them in threads.

Inside a runtime, an agent that decides by itself gets one that shares the runtime's slots. A TextBackend created
directly runs its own event loop in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self, TypeVar

from batch_agent.backends.registry import open_backend
from batch_agent.errors import JobError, Rejected, SpecError
from batch_agent.fleet.one_loop import running_loop
from batch_agent.foreign import encodable
from batch_agent.messages import Conversation, Message
from batch_agent.ticks.action_space import ActionSpace
from batch_agent.ticks.asking import Asking
from batch_agent.ticks.config import Sampling
from batch_agent.ticks.generation import GenerationResult
from batch_agent.ticks.reading import text_of_reply

T = TypeVar("T")
TIMEOUT = 60.0
NOT_FOUND = 404


class TextBackend(AbstractContextManager["TextBackend"]):
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
        self._starting = threading.Lock()
        self._loop: Callable[[], asyncio.AbstractEventLoop | None] = self._start_loop

    @classmethod
    def within(cls, asking: Callable[[], Asking], loop: Callable[[], asyncio.AbstractEventLoop | None]) -> Self:
        """Return the TextBackend of a runtime, which opens and closes the backend."""
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
        *,
        system_prompts: Sequence[str | None] | None = None,
    ) -> list[GenerationResult]:
        """Return the answers in order, all requested at once. ``system_prompts`` has one for each prompt."""
        systems = [system_prompt] * len(prompts) if system_prompts is None else system_prompts
        if len(systems) != len(prompts):
            raise SpecError(f"there are {len(systems)} system_prompts for {len(prompts)} prompts")
        asked = list(map(_conversation, prompts, systems))
        return self._run(lambda: self._ask_all(asked, temperature=temperature, max_tokens=max_tokens))

    def generate_with_tools(
        self, prompt: str, tools: Iterable[object], temperature: float | None = None
    ) -> GenerationResult:
        """Return a call of one of the tools as JSON: ``{"tool": …, "params": {…}}``."""
        space = ActionSpace(tools)
        asked = [_conversation(prompt, space.instructions)]
        return self._run(lambda: self._ask_all(asked, temperature=temperature, form=space.form))[0]

    def is_available(self) -> bool:
        """Return whether the backend can be opened and answers."""
        return self._run(self._opens)

    def close(self) -> None:
        """Close the backend that it opened itself. A runtime's backend stays open."""
        loop, self._own_loop = self._own_loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._asking().close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    unload = close

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _ask_all(self, asked: Iterable[Conversation], **options: Any) -> list[GenerationResult]:
        return await asyncio.gather(*(self._ask(conversation, options) for conversation in asked))

    async def _ask(self, conversation: Conversation, options: Mapping[str, Any]) -> GenerationResult:
        asking = self._asking()
        try:
            reply = await asking.ask(lambda: asking.request(conversation, "generate", **options))
        except (JobError, SpecError) as error:
            return GenerationResult("", 0, "error", {"error": str(error), "type": type(error).__name__})
        usage = reply.usage
        tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        reason = "length" if reply.finish_reason == "length" else "stop"
        return GenerationResult(text_of_reply(reply), usage.prompt_tokens + usage.completion_tokens, reason, tokens)

    async def _opens(self) -> bool:
        asking = self._asking()
        try:
            await asking.open()
            await asking.models()
        except Rejected as error:
            return error.status == NOT_FOUND  # it is up, but has no list of models
        except (JobError, SpecError):
            return False
        return True

    def _run(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        loop = self._loop()
        if loop is None or loop is running_loop():
            raise RuntimeError(
                "this blocks until the answer is there, so it cannot be called in the event loop: call it in a thread, "
                "or in a decide_action that is not async, while the runtime runs"
            )
        try:
            return asyncio.run_coroutine_threadsafe(ask(), loop).result()
        except CancelledError:
            raise RuntimeError("the backend was closed during the request") from None

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._own_loop is None:
                self._own_loop = asyncio.new_event_loop()
                arguments = (self._own_loop,)
                threading.Thread(target=_serve, args=arguments, name="batch-agent text backend", daemon=True).start()
            return self._own_loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which cancels remaining tasks at the end
        runner.get_loop().run_forever()


def _conversation(prompt: str, system_prompt: str | None) -> Conversation:
    system = [Message("system", encodable(system_prompt))] if system_prompt else []
    return Conversation([*system, Message("user", encodable(prompt))])
