"""One thought from its context to its action: ask, read, and where the answer means nothing, show the model why once.

Code of the user's (contexts, parsers, an agent that decides by itself) meets ours here: whatever it raises is this
thought's failure and nobody else's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.errors import BatchAgentError, InternalError, OutputError, WorkerFailed
from batch_agent.foreign import describe
from batch_agent.messages import Conversation, Message
from batch_agent.ticks.action import Action
from batch_agent.ticks.agent import Agent
from batch_agent.ticks.asking import Asked, Asking, Question
from batch_agent.ticks.mind import Mind, Thought
from batch_agent.ticks.reading import words_of
from batch_agent.tools.threads import Threads

REPAIRS = 1

T = TypeVar("T")


def seed_of(base: int, agent_id: str, tick: int) -> int:
    """The same for the same agent at the same tick, on every machine."""
    digest = blake2b(f"{base}\n{tick}\n{agent_id}".encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


class Thinker:
    """What the thoughts of one runtime share. ``timeout``: seconds for a whole thought, all it waits for included."""

    def __init__(self, *, system_prompt: str | None, seed: int | None, timeout: float | None, workers: int) -> None:
        self._system_prompt, self._seed, self._timeout = system_prompt, seed, timeout
        self._prefixes: dict[str, Conversation] = {}  # what many agents' prompts begin with, written once
        self._threads = Threads()
        self._workers = asyncio.Semaphore(workers)

    def close(self) -> None:
        self._threads.close()

    async def think(self, mind: Mind, thought: Thought, asking: Callable[[], Asking]) -> None:
        """To its end, which the thought then tells of. Raises nothing but a cancellation, and bugs of ours."""
        if thought.after is not None and thought.after.task is not None:
            await asyncio.wait([thought.after.task])
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                thought.action = await self._decide(mind, thought, asking)
            thought.end(loop.time())
        except TimeoutError:
            if not limit.expired():
                raise
            thought.end(loop.time(), f"no answer in {self._timeout:g} s")
        except InternalError:
            raise
        except BatchAgentError as error:
            thought.end(loop.time(), str(error) or type(error).__name__)
        except asyncio.CancelledError:
            thought.end(loop.time(), mind.gone or "the thought was given up")
            raise

    async def _decide(self, mind: Mind, thought: Thought, asking: Callable[[], Asking]) -> object:
        if mind.agent.decides_itself:
            return await self._let_decide(mind.agent, thought)
        return await self._ask(mind, thought, asking())

    async def _let_decide(self, agent: Agent, thought: Thought) -> object:
        """An agent with a ``decide_action`` of its own, in a thread unless that is async."""
        async with self._workers:
            thought.left = True
            try:
                if inspect.iscoroutinefunction(agent.decide_action):
                    action = await agent.decide_action()
                else:
                    action = await self._threads.run(agent.decide_action)
                    action = await action if inspect.isawaitable(action) else action
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) or (not isinstance(error, Exception) and cancelled_by_us()):
                    raise
                raise WorkerFailed(f"decide_action raised {describe(error)}") from error
        if action is None:
            raise WorkerFailed("decide_action chose nothing")
        if not agent.accepts(action):
            raise WorkerFailed(f"decide_action returned a {type(action).__name__}, not an Action")
        if isinstance(action, Action) and action.source == "fallback":
            raise WorkerFailed(action.reasoning or "decide_action fell back")
        return action

    async def _ask(self, mind: Mind, thought: Thought, asking: Asking) -> object:
        agent = mind.agent
        said: list[Message] = []  # the answers that meant nothing, each with what the model was told of it

        def ask() -> Asked:
            if not thought.left:
                thought.prompt = _guarded(lambda: _context_of(agent), "_build_context")
                thought.left = True
            first = Message("user", thought.prompt)
            return Asked(
                Conversation([first, *said], parent=self._prefix(agent)),
                f"{agent.agent_id}@{thought.tick}",
                mind.number,
                agent.schema,
                agent.schema_text,
                tuple(agent.repertoire.specs) if agent.schema is not None else (),
                None if self._seed is None else seed_of(self._seed, agent.agent_id, thought.tick),
            )

        question = Question(mind.progress, ask, lambda: thought.awaited)
        while True:
            reply = await asking.ask(question)
            thought.usage += reply.usage
            thought.answer = words_of(reply)
            try:
                return _guarded(lambda: agent.read(thought.answer), "_parse_action")
            except OutputError as error:
                if len(said) >= 2 * REPAIRS or not thought.awaited:
                    raise
                problem = f"That is no action: {error}\nAnswer again, with the corrected JSON alone."
                said += [Message("assistant", thought.answer), Message("user", problem)]

    def _prefix(self, agent: Agent) -> Conversation | None:
        text = agent.system_text(self._system_prompt)
        if not text:
            return None
        known = self._prefixes.get(text)
        return known or self._prefixes.setdefault(text, Conversation([Message("system", text)]))


def _context_of(agent: Agent) -> str:
    context = agent._build_context()
    if not isinstance(context, str):
        raise TypeError(f"it returned a {type(context).__name__}, not text")
    return context.encode(errors="replace").decode()  # what no wire could carry is shown as such


def _guarded(function: Callable[[], T], name: str) -> T:
    """What the user's own code gives; what it raises is a WorkerFailed, unless it says what is wrong with an answer."""
    try:
        return function()
    except (OutputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise WorkerFailed(f"{name} raised {describe(error)}") from error
