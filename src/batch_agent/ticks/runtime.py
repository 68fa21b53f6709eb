"""TickRuntime: a decision for every agent that observed, at each tick and by the deadline, whatever the model does.

Thoughts are separate tasks and may outlive the tick that started them. ``mind`` decides what a tick gets from them;
``Thinker`` holds the resources between start and stop. ``AgentRuntime`` is the same with the names that simulations
use.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Generic, Self, cast

from typing_extensions import TypeVar

from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.backends.registry import open_backend
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import outlast
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Observer
from batch_agent.errors import BackendError, BatchAgentError, OutputError, SpecError, Timeout, WorkerFailed
from batch_agent.fleet.backend import OneLoop, running_loop
from batch_agent.foreign import describe, encodable
from batch_agent.messages import Conversation, Message
from batch_agent.option import check_kind, check_positive
from batch_agent.ticks.agent import Action, Agent, Decision, Fallback, TypedAgent, idle, text_of_reply
from batch_agent.ticks.backends import (
    TIMEOUT,
    Sampling,
    TextBackend,
    TickBackend,
    UsersBackend,
    backend_key,
    read_config,
)
from batch_agent.ticks.mind import LONG, Given, Mind, Patience, Thought
from batch_agent.ticks.plain import called, guarded, text_of, tried
from batch_agent.ticks.trace import Replay, Trace
from batch_agent.tools.threads import Threads

A = TypeVar("A", default=Action)
logger = logging.getLogger("batch_agent")

WORKERS = 4
NOT_GIVEN: Any = object()

REPAIRS = 1
PREFIXES = 256  # cached system prompts
GRACE = 5.0  # seconds that the user's coroutines get to end after a cancellation


class _Awaitable(Awaitable[None]):
    """Returned by ``start`` and ``stop``. What needs no event loop is already done; awaiting it does the rest."""

    def __init__(self, rest: Callable[[], Awaitable[None]]) -> None:
        self._rest = rest

    def __await__(self) -> Generator[Any, None, None]:
        return self._rest().__await__()


class TickRuntime(Generic[A]):
    """``agents``: Agents, or ids of agents that have the runtime's ``tools`` or choose a value of ``schema``.

    Args:
        backend: a URL, a Backend, or an object with ``generate`` or ``generate_batch``.
        model: its name, if the backend has several.
        schema: the type of actions, as ``output_schema`` takes it; without it, an action is a call of a tool.
        tools: what agents given by id may do.
        fallback: the action of agents given by id if there is no answer; or a function of the observation.
        deadline: seconds that a tick may take; None: until every agent has answered or failed.
        system_prompt: the system prompt of agents that have none.
        sampling: temperature, max_tokens, and the seed that the seed of each agent and tick is derived from.
        max_inflight: requests at once to one backend; None: the backend's default.
        max_workers: threads at once, for agents and backends of the user's that are not async.
        timeout: seconds after which a thought is given up.
        overlap: an agent may start a thought while an earlier one is running.
        skip_unchanged: an agent that observes the same again repeats its last action.
        repeat_last: at the deadline, an agent repeats its last action; False: its fallback.
        trace: a file to which each decision is appended as a line of JSON.
        replay: such a file, which decides instead of a model.
    """

    def __init__(
        self,
        agents: Iterable[Agent | str] = (),
        *,
        backend: object = None,
        model: str | None = None,
        api_key: str | None = None,
        schema: object = None,
        tools: Iterable[object] = (),
        fallback: Fallback | A | None = None,
        deadline: float | None = None,
        system_prompt: str | None = None,
        sampling: Sampling | None = None,
        max_inflight: int | None = None,
        max_workers: int = WORKERS,
        timeout: float | None = TIMEOUT,
        overlap: bool = False,
        skip_unchanged: bool = False,
        repeat_last: bool = True,
        trace: str | Path | None = None,
        replay: str | Path | None = None,
    ) -> None:
        check_positive(int | float, deadline=deadline, timeout=timeout)
        check_positive(int, max_workers=max_workers, max_inflight=max_inflight)
        check_kind(str, "text", system_prompt=system_prompt)
        self.deadline = deadline
        self.running = False
        self._schema = OutputSchema.of(schema)
        self._tools = tuple(tools)
        self._fallback = fallback
        if self._schema is not None and self._tools:
            raise SpecError("an action is a call of one of the tools or a value of the schema: give one of the two")
        self.backend = backend
        self.max_workers = max_workers
        self.max_inflight = max_inflight
        self.timeout = timeout
        self.system_prompt = system_prompt
        self.sampling = sampling or Sampling()
        self._model, self._api_key = model, api_key
        self._rules = {"overlap": overlap, "skip_unchanged": skip_unchanged, "repeat_last": repeat_last}
        self._trace = None if trace is None else Trace(Path(trace))
        self._replay = None if replay is None else Replay(Path(replay))
        self._backends: dict[object, tuple[Backend, str | None]] = {}  # by ``backend_key``
        self._minds: dict[str, Mind] = {}
        self._numbers = count(1)
        self._stopped = False
        self._thinker: Thinker | None = None  # of the event loop in which it was used last
        self._loop = OneLoop("runtime", self._forget)
        self.observer: Observer | None = None  # of the requests; set before the first
        if backend is not None and self._replay is None:
            self.find_backend(backend)  # raises its errors now
        for agent in agents:
            self.add(agent)

    # Agents

    def add(self, agent: Agent | str) -> Agent:
        """Add an agent, from the next tick on. It replaces one with the same id, whose thoughts are dropped."""
        if isinstance(agent, str):
            agent = self._agent(agent)
        if agent.given_backend is not None and self._replay is None:
            self.find_backend(agent.given_backend)
        self.remove(agent.agent_id)
        self._minds[agent.agent_id] = Mind(agent, next(self._numbers), **self._rules)
        agent.lent_backend = TextBackend.within(
            lambda: None if self._thinker is None else (self._thinker.loop, partial(self._thinker.backend_of, agent))
        )
        return agent

    def remove(self, agent_id: str) -> None:
        """Remove an agent, if it exists. A tick that waits for it gets its fallback."""
        mind = self._minds.pop(agent_id, None)
        if mind is not None:
            mind.gone = f"{agent_id} was unregistered"
            _cancel(mind.forget())

    @property
    def agents(self) -> dict[str, Agent]:
        return {agent_id: mind.agent for agent_id, mind in self._minds.items()}

    @property
    def dispatchers(self) -> list[tuple[str, Dispatcher]]:
        """Return the dispatchers of open backends, with the backends' names."""
        backends = [] if self._thinker is None else self._thinker.backends.values()
        return [(each.backend.name, each.dispatcher) for each in backends if each.dispatcher is not None]

    def _agent(self, agent_id: str) -> Agent:
        fallback = cast("Fallback | None", self._fallback)
        if self._schema is not None:
            return TypedAgent(agent_id, self._schema, fallback=fallback)
        return Agent(agent_id, tools=self._tools, fallback=fallback)

    # Ticks

    async def tick(self, tick: int, observations: Mapping[str, object]) -> dict[str, Decision[A]]:
        """Return a decision for each agent in ``observations``, in order. Ticks may overlap. A tick number lower than
        an agent's last one starts a new episode for that agent."""
        if isinstance(tick, bool) or not isinstance(tick, int):
            raise SpecError(f"tick is {text_of(tick)}; it is a whole number")
        if not isinstance(observations, Mapping):
            raise SpecError(f"observations is a {type(observations).__name__}; it is a mapping by agent id")
        thinker = await self._ensure_open()
        if self._replay is not None:
            return {agent_id: self._replayed(agent_id, tick) for agent_id in observations}
        # A world may reuse the same objects while its agents think. What cannot be copied stays as it is.
        seen = {agent_id: tried(partial(deepcopy, each), each) for agent_id, each in observations.items()}
        now = thinker.loop.time()
        due = math.inf if self.deadline is None else now + self.deadline
        given: dict[str, Given] = {}
        waiting: dict[str, tuple[Mind, Thought]] = {}
        self._give_up_lost(now)
        for agent_id, mind in self._in_order(seen, given):
            turned = self._turn(mind, tick, seen[agent_id], now, due)
            if isinstance(turned, Thought):
                waiting[agent_id] = mind, turned
            else:
                given[agent_id] = turned
            for thought in mind.thoughts:
                if thought.task is None:
                    thinker.begin(mind, thought)
        try:
            await self._wait({thought.task for _, thought in waiting.values() if thought.task is not None}, due)
        except asyncio.CancelledError:
            for _, thought in waiting.values():
                thought.awaited = False
            raise
        why = "the thought was cancelled" if due == math.inf else f"no answer within the deadline, {self.deadline} s"
        for agent_id, (mind, thought) in waiting.items():
            why = "the runtime was stopped" if self._stopped else why
            given[agent_id] = self._remembered(mind, mind.conclude(thought, tick, why))
        if self._trace is not None:
            self._trace.write(tick, [(agent_id, data, given[agent_id]) for agent_id, data in seen.items()])
        return {agent_id: cast("Decision[A]", given[agent_id][0]) for agent_id in seen}

    def _in_order(self, observations: Mapping[str, object], given: dict[str, Given]) -> list[tuple[str, Mind]]:
        """Return the agents that observed, highest priority first. An unknown agent idles."""
        known = []
        for agent_id, observation in observations.items():
            mind = self._minds.get(agent_id)
            if mind is None:
                why = f"no agent {text_of(agent_id)!r} is registered"
                given[agent_id] = Decision(idle(why), "fallback", reason=why), None
            else:
                known.append((_priority(mind.agent, observation), agent_id, mind))
        known.sort(key=lambda one: -one[0])  # stable: equal priorities keep their order
        return [(agent_id, mind) for _, agent_id, mind in known]

    def _turn(self, mind: Mind, tick: int, observation: object, now: float, due: float) -> Given | Thought:
        def perceive() -> object:
            if mind.starts_episode(tick):
                _cancel(mind.forget())
                mind.agent.reset()
            seen = mind.agent.with_result(observation)
            mind.agent.perceive(seen)
            return seen

        try:
            seen = guarded("perceive", perceive)
        except BatchAgentError as error:
            return mind.fall_back(str(error)), None
        turned = mind.turn_to(tick, seen, now, due)
        return turned if isinstance(turned, Thought) else self._remembered(mind, turned)

    async def _wait(self, tasks: set[asyncio.Task[None]], due: float) -> None:
        """Wait for the thoughts until the end of the tick. During a long tick, lost requests are detected from time to
        time."""
        loop = asyncio.get_running_loop()
        while tasks:
            left = max(0.0, due - loop.time())
            _, tasks = await asyncio.wait(tasks, timeout=min(left, LONG))
            if left <= LONG:
                return
            self._give_up_lost(loop.time())

    def _give_up_lost(self, now: float) -> None:
        for mind in self._minds.values():
            mind.give_up_lost(now)

    def _remembered(self, mind: Mind, given: Given) -> Given:
        """Add the action to the agent's memory, if a thought chose it."""
        decision, thought = given
        if thought is not None and decision.source in ("answer", "late"):
            try:
                guarded("its memory", lambda: mind.agent.remember(decision.action))
            except BatchAgentError as error:
                logger.warning("agent %s: %s", text_of(mind.agent.agent_id), error)
        return given

    def _replayed(self, agent_id: str, tick: int) -> Decision[A]:
        replay, mind = self._replay, self._minds.get(agent_id)
        assert replay is not None
        agent = mind.agent if mind is not None else Agent(text_of(agent_id) or "?")
        why = f"nothing is recorded for {text_of(agent_id)} at tick {tick}"
        try:
            decision = guarded("it", lambda: replay.decision(agent_id, tick, agent))
        except BatchAgentError as error:
            decision, why = None, f"the recorded action does not belong to this agent: {error}"
        return cast("Decision[A]", decision or Decision(agent.fallback_for(why), "fallback", reason=why))

    # Start and stop

    def start(self) -> Awaitable[None]:
        """Allow ticks. Awaiting it opens the backend, or raises its error."""
        self.running, self._stopped = True, False
        return _Awaitable(self._open_now)

    def stop(self) -> Awaitable[None]:
        """End thoughts, and the running ticks with them. Awaiting it closes everything."""
        self.running, self._stopped = False, True
        if self._thinker is not None:
            self._thinker.close()
        return _Awaitable(self._wait_closed)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _forget(self) -> None:
        self._thinker = None  # its event loop has ended

    async def _wait_closed(self) -> None:
        if self._thinker is not None and self._thinker.is_closing and running_loop() is self._thinker.loop:
            await outlast(self._thinker.keeper)

    async def _open_now(self) -> None:
        thinker = await self._ensure_open()
        if self._replay is None:
            asked = [mind.agent for mind in self._minds.values() if not mind.agent.decides_itself]
            for backend in dict.fromkeys(map(thinker.backend_of, asked)):
                await backend.open()

    async def _ensure_open(self) -> Thinker:
        """Return the thinker of the running event loop. Raises SpecError if another loop has one that is open."""
        await self._wait_closed()  # otherwise it would close the backend that the next one opens
        if self._stopped:
            raise RuntimeError("the runtime is stopped: start() it again before the next tick")
        self._loop.bind()
        if self._thinker is None or self._thinker.is_closing:
            self.running = True
            for mind in self._minds.values():
                mind.forget()
            self._thinker = Thinker(self, self._loop.release)
        return self._thinker

    def find_backend(self, given: object) -> tuple[Backend, str | None]:
        """Return the backend, created once, and its model. Raises SpecError if it is not a backend."""
        key = backend_key(given)
        if key not in self._backends:
            if UsersBackend.accepts(given):
                self._backends[key] = UsersBackend(given, self.max_workers), self._model
            else:
                model = self._model if key == backend_key(self.backend) else None
                self._backends[key] = open_backend(given, model=model, api_key=self._api_key)
        return self._backends[key]


def _cancel(thoughts: Iterable[Thought]) -> None:
    for thought in thoughts:
        if thought.task is not None:
            thought.task.cancel()


def _priority(agent: Agent, observation: object) -> float:
    try:
        return guarded(
            "priority", lambda: float(agent.priority(observation) if callable(agent.priority) else agent.priority)
        )
    except BatchAgentError as error:
        logger.warning("agent %s: %s", text_of(agent.agent_id), error)
        return 0.0


class AgentRuntime(TickRuntime[Action]):
    """A TickRuntime with the names that simulations use. Its options are those of TickRuntime and, one by one, those of
    Sampling."""

    def __init__(
        self,
        max_workers: int = WORKERS,
        backend_config: Mapping[str, Any] | None = None,
        *,
        backend: object = None,
        model: str | None = None,
        deadline: float | None = None,
        system_prompt: str | None = None,
        temperature: float | None = NOT_GIVEN,
        max_tokens: int | None = NOT_GIVEN,
        seed: int | None = NOT_GIVEN,
        timeout: float | None = NOT_GIVEN,
        api_key: str | None = None,
        max_inflight: int | None = None,
        overlap: bool = False,
        skip_unchanged: bool = False,
        repeat_last: bool = True,
        trace: str | Path | None = None,
        replay: str | Path | None = None,
    ) -> None:
        self.backend_config = dict(backend_config or {})
        options = read_config(self.backend_config)
        for name, value in (("backend", backend), ("model", model), ("api_key", api_key)):
            if value is not None and name in options:
                raise SpecError(f"{name} is given twice, by itself and in backend_config: give one of them")
            options.setdefault(name, value)
        given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "timeout": timeout}
        options |= {name: value for name, value in given.items() if value is not NOT_GIVEN}
        drawn = {field.name: options.pop(field.name) for field in fields(Sampling) if field.name in options}
        super().__init__(
            **options,
            sampling=Sampling(**drawn),
            max_workers=max_workers,
            deadline=deadline,
            system_prompt=system_prompt,
            max_inflight=max_inflight,
            overlap=overlap,
            skip_unchanged=skip_unchanged,
            repeat_last=repeat_last,
            trace=trace,
            replay=replay,
        )

    def register_agent(self, agent: Agent) -> None:
        """Add an agent. It replaces one with the same id."""
        if not isinstance(agent, Agent):
            raise SpecError(f"register_agent takes an Agent, not a {type(agent).__name__}")
        self.add(agent)

    def unregister_agent(self, agent_id: str) -> None:
        self.remove(agent_id)

    def get_agent(self, agent_id: str) -> Agent | None:
        return self.agents.get(agent_id)

    def get_all_agents(self) -> list[Agent]:
        return list(self.agents.values())

    async def process_tick(self, tick: int, observations: Mapping[str, Any]) -> dict[str, Action]:
        """Return an action for each agent in ``observations``; none is ever missing. Each action states its origin."""
        decisions = await self.tick(tick, observations)
        return {
            agent_id: (decision.action or idle(decision.reason)).marked(decision.source, decision.seen_tick)
            for agent_id, decision in decisions.items()
        }


def seed_of(base: int, agent_id: str, tick: int) -> int:
    """Return the same seed for the same agent at the same tick, on every machine."""
    digest = blake2b(f"{base}\n{tick}\n{agent_id}".encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


class Thinker:
    """The thoughts of a runtime in one event loop, and what they have open there. Open from its creation.

    One keeper task closes all of it when it is cancelled: by ``close``, or by ``asyncio.run`` at its end. So a program
    that does not stop its runtime leaves nothing open.
    """

    def __init__(self, runtime: TickRuntime[Any], closed: Callable[[], None]) -> None:
        self._runtime = runtime
        self._closed = closed
        deadline = runtime.deadline
        self.loop = asyncio.get_running_loop()
        self.backends: dict[object, TickBackend] = {}  # by ``backend_key``
        self._prefix = lru_cache(PREFIXES)(lambda text: Conversation([Message("system", text)]))  # serialised once
        self._patience: dict[TickBackend, Patience] = defaultdict(lambda: Patience(deadline))
        self._threads = Threads()
        self._free_workers = asyncio.Semaphore(runtime.max_workers)
        self._thoughts: set[asyncio.Task[None]] = set()
        self.is_closing = False
        self.keeper = self.loop.create_task(self._keep(), name="batch-agent ticks")

    def backend_of(self, agent: Agent) -> TickBackend:
        """Return the agent's own backend, else the runtime's. Agents with equal backends share one."""
        runtime = self._runtime
        given = runtime.backend if agent.given_backend is None else agent.given_backend
        key = backend_key(given)
        if key not in self.backends:
            found, limits = runtime.find_backend(given), (runtime.max_inflight, runtime.timeout)
            self.backends[key] = TickBackend(*found, runtime.sampling, *limits, runtime.observer)
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
        timeout = self._runtime.timeout  # for the whole thought, including the wait for a slot
        ends = None if timeout is None else self.loop.time() + timeout
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
                    raise Timeout(f"no answer in {timeout or 0:g} s") from None

    async def _let_decide(self, agent: Agent, thought: Thought) -> object:
        """Call the agent's own ``decide_action``, in a thread unless it is async."""
        async with self._free_workers:
            thought.left = True
            action = await called(self._threads, "decide_action", agent.decide_action)
        return agent.chosen(action, "decide_action", "decide_action chose nothing")

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
        agent, seed = mind.agent, self._runtime.sampling.seed
        if not thought.left:
            context = guarded("_build_context", agent._build_context)
            if not isinstance(context, str):
                raise WorkerFailed(f"_build_context returned a {type(context).__name__}, not text")
            thought.prompt = encodable(context)
            thought.left = True
        system = encodable(agent.system_text(self._runtime.system_prompt))
        return backend.request(
            Conversation([Message("user", thought.prompt), *said], parent=self._prefix(system) if system else None),
            f"{encodable(agent.agent_id)}@{thought.tick}",
            mind.number,
            agent.form,
            seed=None if seed is None else seed_of(seed, agent.agent_id, thought.tick),
        )

    # Closing

    def close(self) -> None:
        """Start closing, from any thread. Closing is complete when the task ``keeper`` has ended."""
        if not self.is_closing and not self.loop.is_closed():
            self.is_closing = True
            self.loop.call_soon_threadsafe(self.keeper.cancel)

    async def _keep(self) -> None:
        try:
            await self.loop.create_future()
        finally:
            self.is_closing = True
            try:
                await self._close()
            except asyncio.CancelledError:  # the event loop ends: finish first
                await self._close()
                raise
            finally:
                self._threads.close()
                self._closed()

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
