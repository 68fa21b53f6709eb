"""One thought from prompt to action, and what is open in an event loop for all thoughts of a runtime.

A thought sends a request, reads the answer, and tells the model once why it is not an action. Prompts, parsers and
agents that decide by themselves are user code. An error in a thought fails only that thought: its agent falls back, and
the other agents get their actions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf

from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.dispatch.cancellation import outlast
from batch_agent.dispatch.policy import Observer
from batch_agent.errors import BackendError, BatchAgentError, OutputError, Timeout, WorkerFailed
from batch_agent.fleet.one_loop import running_loop
from batch_agent.foreign import describe, encodable
from batch_agent.messages import Conversation, Message
from batch_agent.ticks.action import Action
from batch_agent.ticks.action_space import text_of_reply
from batch_agent.ticks.agent import Agent
from batch_agent.ticks.backends import TickBackend, backend_key
from batch_agent.ticks.config import Sampling
from batch_agent.ticks.mind import Mind, Patience, Thought
from batch_agent.ticks.plain import called, guarded, text_of
from batch_agent.tools.threads import Threads

REPAIRS = 1
PREFIXES = 256  # cached system prompts
GRACE = 5.0  # seconds that the user's coroutines get to end after a cancellation

logger = logging.getLogger("batch_agent")


def seed_of(base: int, agent_id: str, tick: int) -> int:
    """Return the same seed for the same agent at the same tick, on every machine."""
    digest = blake2b(f"{base}\n{tick}\n{agent_id}".encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@dataclass(eq=False, kw_only=True)
class Thinker:
    """The thoughts of a runtime in one event loop, and what they have open there. Open from its creation.

    One keeper task closes all of it on ``close``, or when it is cancelled, as ``asyncio.run`` does at its end. So a
    program that does not stop its runtime leaves nothing open. ``find`` returns the backend and the model that a user
    gave; ``timeout`` is for a whole thought, including the wait for a slot.
    """

    backend: object
    find: Callable[[object], tuple[Backend, str | None]]
    system_prompt: str | None
    sampling: Sampling
    deadline: float | None
    timeout: float | None
    workers: int
    max_inflight: int | None
    observer: Observer | None

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.backends: dict[object, TickBackend] = {}  # by ``backend_key``
        self._prefix = lru_cache(PREFIXES)(lambda text: Conversation([Message("system", text)]))  # serialised once
        self._patience: dict[TickBackend, Patience] = defaultdict(lambda: Patience(self.deadline))
        self._threads = Threads()
        self._free_workers = asyncio.Semaphore(self.workers)
        self._thoughts: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] = self.loop.create_future()
        self._keeper = self.loop.create_task(self._keep(), name="batch-agent ticks")

    @property
    def is_open(self) -> bool:
        """Return whether it is open in the running event loop."""
        return running_loop() is self.loop and not self._closing.done()

    @property
    def is_open_elsewhere(self) -> bool:
        """Return whether it is open in another event loop, running or not."""
        return running_loop() is not self.loop and not self.loop.is_closed() and not self._keeper.done()

    def backend_of(self, agent: Agent) -> TickBackend:
        """Return the agent's backend, or that of the runtime; agents with equal ones share it."""
        given = self.backend if agent.given_backend is None else agent.given_backend
        key = backend_key(given)
        if key not in self.backends:
            backend, model = self.find(given)
            self.backends[key] = TickBackend(
                backend, model, self.sampling, self.max_inflight, self.timeout, self.observer
            )
        return self.backends[key]

    def begin(self, mind: Mind, thought: Thought) -> None:
        thought.task = self.loop.create_task(self._think(mind, thought))
        self._thoughts.add(thought.task)
        thought.task.add_done_callback(self._thoughts.discard)

    # One thought

    async def _think(self, mind: Mind, thought: Thought) -> None:
        """Run the thought to its end; the result is on the thought. Raises only cancellations."""
        failure = "the thought was cancelled"
        try:
            if thought.after is not None and thought.after.task is not None:
                await asyncio.wait([thought.after.task])
            thought.after = None  # otherwise every thought would keep all earlier ones alive
            thought.action = await self._decide(mind, thought)
            failure = ""
        except BatchAgentError as error:
            failure = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("a thought of agent %s failed", text_of(mind.agent.agent_id))
            failure = f"internal error: {describe(error)}"
        finally:
            thought.end(self.loop.time(), mind.gone or failure)

    async def _decide(self, mind: Mind, thought: Thought) -> object:
        """Return the action. A thought whose request was lost starts again, with the newest prompt."""
        ends = None if self.timeout is None else self.loop.time() + self.timeout
        while True:
            losses = thought.losses
            thought.limit = asyncio.timeout_at(ends)
            try:
                async with thought.limit:
                    if mind.agent.decides_itself:
                        return await self._let_decide(mind.agent, thought)
                    return await self._ask(mind, thought, self.backend_of(mind.agent))
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

    async def _ask(self, mind: Mind, thought: Thought, backend: TickBackend) -> object:
        clock = self.loop.time
        said: list[Message] = []  # answers that were not an action, each with the error shown to the model
        patience = thought.patience = self._patience[backend]

        def make() -> ModelRequest:
            request = guarded("its prompt", lambda: self._request(mind, thought, said, backend))
            thought.sent_at = clock()
            return request

        def wants_again(error: BackendError) -> bool:
            thought.sent_at = inf  # it was answered, with an error
            return thought.awaited

        while True:
            try:
                reply = await backend.ask(make, wants_again)
            finally:
                sent_at, thought.sent_at = thought.sent_at, inf
            if sent_at < inf:
                patience.answered(sent_at, clock())
                mind.took = clock() - sent_at
            thought.usage += reply.usage
            thought.answer = text_of_reply(reply)
            try:
                return guarded("_parse_action", lambda: mind.agent.read(thought.answer))
            except OutputError as error:
                if len(said) >= 2 * REPAIRS or not thought.awaited:
                    raise
                problem = f"That is not a valid action: {error}\nAnswer again, with the corrected JSON alone."
                said += [Message("assistant", thought.answer), Message("user", problem)]

    def _request(self, mind: Mind, thought: Thought, said: list[Message], backend: TickBackend) -> ModelRequest:
        agent, seed = mind.agent, self.sampling.seed
        if not thought.left:
            context = guarded("_build_context", agent._build_context)
            if not isinstance(context, str):
                raise WorkerFailed(f"_build_context returned a {type(context).__name__}, not text")
            thought.prompt, thought.left = encodable(context), True
        system = encodable(agent.system_text(self.system_prompt))
        return backend.request(
            Conversation([Message("user", thought.prompt), *said], parent=self._prefix(system) if system else None),
            f"{encodable(agent.agent_id)}@{thought.tick}",
            mind.number,
            agent.form,
            seed=None if seed is None else seed_of(seed, agent.agent_id, thought.tick),
        )

    # Closing

    def close(self) -> None:
        """Start closing, from any thread. ``wait_closed`` waits for the end."""
        if running_loop() is self.loop:
            self._close_now()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._close_now)

    async def wait_closed(self) -> None:
        if running_loop() is self.loop:
            await outlast(self._keeper)

    def _close_now(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)

    async def _keep(self) -> None:
        try:
            await self._closing
        finally:
            self._closing.cancel()
            try:
                await self._close()
            except asyncio.CancelledError:  # the event loop ends: finish first
                await self._close()
                raise
            finally:
                self._threads.close()

    async def _close(self) -> None:
        """Close everything. A user's coroutine that does not end is left behind."""
        for task in tuple(self._thoughts):
            task.cancel()
        if self._thoughts:
            await asyncio.wait(tuple(self._thoughts), timeout=GRACE)
        if self.backends:
            closing = [self.loop.create_task(backend.close()) for backend in self.backends.values()]
            done, left = await asyncio.wait(closing, timeout=GRACE)
            for task in left:
                task.cancel()
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.error("a backend could not be closed", exc_info=error)
