"""One thought from prompt to action: send the request, read the answer, and tell the model once why it is not an
action.

Prompts, parsers and agents that decide by themselves are user code. An error in a thought fails only that thought: its
agent falls back, and the other agents get their actions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf

from batch_agent.backends.base import ModelRequest
from batch_agent.errors import BackendError, BatchAgentError, OutputError, Timeout, WorkerFailed
from batch_agent.foreign import describe, encodable
from batch_agent.messages import Conversation, Message
from batch_agent.ticks.action import Action
from batch_agent.ticks.agent import Agent
from batch_agent.ticks.asking import Asking
from batch_agent.ticks.guard import called, guarded
from batch_agent.ticks.mind import Mind, Thought
from batch_agent.ticks.patience import Patience
from batch_agent.ticks.plain import text_of
from batch_agent.ticks.reading import text_of_reply
from batch_agent.tools.threads import Threads

REPAIRS = 1
PREFIXES = 256  # cached system prompts

logger = logging.getLogger("batch_agent")


def seed_of(base: int, agent_id: str, tick: int) -> int:
    """Return the same seed for the same agent at the same tick, on every machine."""
    digest = blake2b(f"{base}\n{tick}\n{agent_id}".encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@dataclass(eq=False)
class Thinker:
    """What the thoughts of one runtime share. ``timeout`` is for a whole thought, including the wait for a slot."""

    system_prompt: str | None
    seed: int | None
    deadline: float | None
    timeout: float | None
    workers: int

    def __post_init__(self) -> None:
        self._prefix = lru_cache(PREFIXES)(lambda text: Conversation([Message("system", text)]))  # serialised once
        self._patience: dict[Asking, Patience] = {}
        self._threads = Threads()
        self._free_workers = asyncio.Semaphore(self.workers)

    def close(self) -> None:
        self._threads.close()

    async def think(self, mind: Mind, thought: Thought, asking: Callable[[], Asking]) -> None:
        """Run the thought to its end; the result is on the thought. Raises only cancellations."""
        loop = asyncio.get_running_loop()
        failure = "the thought was cancelled"
        try:
            if thought.after is not None and thought.after.task is not None:
                await asyncio.wait([thought.after.task])
            thought.after = None  # otherwise every thought would keep all earlier ones alive
            ends = None if self.timeout is None else loop.time() + self.timeout
            thought.action = await self._decide(mind, thought, asking, ends)
            failure = ""
        except BatchAgentError as error:
            failure = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("a thought of agent %s failed", text_of(mind.agent.agent_id))
            failure = f"internal error: {describe(error)}"
        finally:
            thought.end(loop.time(), mind.gone or failure)

    async def _decide(self, mind: Mind, thought: Thought, asking: Callable[[], Asking], ends: float | None) -> object:
        """Return the action. A thought whose request was lost starts again, with the newest prompt."""
        while True:
            losses = thought.losses
            thought.limit = asyncio.timeout_at(ends)
            try:
                async with thought.limit:
                    if mind.agent.decides_itself:
                        return await self._let_decide(mind.agent, thought)
                    return await self._ask(mind, thought, asking())
            except TimeoutError:
                if not thought.limit.expired():
                    raise
                if thought.losses == losses:
                    raise Timeout(f"no answer in {self.timeout or 0:g} s") from None

    async def _let_decide(self, agent: Agent, thought: Thought) -> object:
        """Call the agent's own ``decide_action``, in a thread unless it is async."""
        async with self._free_workers:
            thought.left = True
            action = await called(self._threads, "decide_action", agent.decide_action)
        if action is None:
            raise WorkerFailed("decide_action chose nothing")
        if fault := agent.fault_of(action):
            raise WorkerFailed(f"decide_action returned {fault}")
        if isinstance(action, Action) and action.source == "fallback":
            raise WorkerFailed(text_of(action.reasoning or "decide_action fell back"))
        return action

    async def _ask(self, mind: Mind, thought: Thought, asking: Asking) -> object:
        loop, agent = asyncio.get_running_loop(), mind.agent
        said: list[Message] = []  # answers that were not an action, each with the error shown to the model
        patience = thought.patience = self._patience.setdefault(asking, Patience(self.deadline))

        def make() -> ModelRequest:
            request = guarded("its prompt", lambda: self._request(mind, thought, said, asking))
            thought.sent_at = loop.time()
            return request

        def wants_again(error: BackendError) -> bool:
            thought.sent_at = inf  # it was answered, with an error
            return thought.awaited

        while True:
            try:
                reply = await asking.ask(make, wants_again)
            finally:
                sent_at, thought.sent_at = thought.sent_at, inf
            if sent_at < inf:
                patience.answered(sent_at, loop.time())
                mind.took = loop.time() - sent_at
            thought.usage += reply.usage
            thought.answer = text_of_reply(reply)
            try:
                return guarded("_parse_action", lambda: agent.read(thought.answer))
            except OutputError as error:
                if len(said) >= 2 * REPAIRS or not thought.awaited:
                    raise
                problem = f"That is not a valid action: {error}\nAnswer again, with the corrected JSON alone."
                said += [Message("assistant", thought.answer), Message("user", problem)]

    def _request(self, mind: Mind, thought: Thought, said: list[Message], asking: Asking) -> ModelRequest:
        agent = mind.agent
        if not thought.left:
            context = guarded("_build_context", agent._build_context)
            if not isinstance(context, str):
                raise WorkerFailed(f"_build_context returned a {type(context).__name__}, not text")
            thought.prompt, thought.left = encodable(context), True
        system = encodable(agent.system_text(self.system_prompt))
        return asking.request(
            Conversation([Message("user", thought.prompt), *said], parent=self._prefix(system) if system else None),
            f"{encodable(agent.agent_id)}@{thought.tick}",
            mind.number,
            agent.form,
            seed=None if self.seed is None else seed_of(self.seed, agent.agent_id, thought.tick),
        )
