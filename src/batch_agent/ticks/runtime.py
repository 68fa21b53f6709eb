"""TickRuntime: at each tick a decision for every agent that observed, by the deadline, whatever the model does.

Thoughts are tasks of their own and outlive the tick that began them: ``mind`` says what a tick gets of them, ``extent``
holds what is open between start and stop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, cast

from typing_extensions import TypeVar

from batch_agent.backends.base import Backend
from batch_agent.backends.registry import open_backend
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.foreign import describe
from batch_agent.ticks.action import Action, Decision, idle
from batch_agent.ticks.agent import Agent, Fallback, TypedAgent
from batch_agent.ticks.asking import Asking, Sampling
from batch_agent.ticks.extent import Extent
from batch_agent.ticks.generation import GeneratesMany, GeneratesOne
from batch_agent.ticks.mind import Given, Mind, Thought
from batch_agent.ticks.text_backend import TextBackend
from batch_agent.ticks.thinking import Thinker
from batch_agent.ticks.trace import Replay, Trace
from batch_agent.ticks.users_backend import UsersBackend

A = TypeVar("A", default=Action)
logger = logging.getLogger("batch_agent")

WORKERS = 4
TIMEOUT = 60.0  # seconds after which a thought is given up


class _Step(Awaitable[None]):
    """What ``start`` and ``stop`` return: done already as far as it can be, and to be awaited for the rest."""

    def __init__(self, rest: Callable[[], Awaitable[None]]) -> None:
        self._rest = rest

    def __await__(self) -> Generator[Any, None, None]:
        return self._rest().__await__()


class TickRuntime(Generic[A]):
    """``agents``: Agents, or ids of agents that have the runtime's ``tools`` or choose a value of ``schema``.

    Args:
        backend: a URL, a Backend, or an object with ``generate`` or ``generate_batch``.
        model: its name, where the backend has several.
        schema: what an action is: a type or JSON schema as ``output_schema`` takes it; without it, a call of a tool.
        tools: what agents given by id may do.
        fallback: what agents given by id do when nothing can be had; an action, or a function of the observation.
        deadline: seconds that a tick may take; None: until every agent has answered or failed.
        system_prompt: what every agent is told first.
        sampling: temperature, max_tokens, the seed that the seed of each agent and tick is made of.
        max_inflight: requests at once to one backend; None: what the backend says.
        max_workers: threads at once, for agents and backends of the user's that are not async.
        timeout: seconds after which a thought is given up.
        overlap: an agent may begin a thought while an earlier one is under way.
        skip_unchanged: an agent that observes the same again does the same again.
        repeat_last: at the deadline, an agent does what it did last; False: its fallback.
        trace: a file, to which each decision is added as a line of JSON.
        replay: such a file, which decides in place of a model.
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
        _check_positive(deadline=deadline, timeout=timeout)
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise SpecError(f"system_prompt is a {type(system_prompt).__name__}; it is text")
        _check_count(max_workers=max_workers, max_inflight=max_inflight)
        self.deadline = deadline
        self.running = False
        self._schema = OutputSchema.of(schema)
        self._tools, self._fallback = tuple(tools), fallback
        if self._schema is not None and self._tools:
            raise SpecError("an action is a call of one of the tools or a value of the schema: give one of the two")
        self._given_backend, self._model, self._api_key = backend, model, api_key
        self._sampling = sampling or Sampling()
        self._max_inflight, self._workers, self._timeout = max_inflight, max_workers, timeout
        self._system_prompt = system_prompt
        self._rules = {"overlap": overlap, "skip_unchanged": skip_unchanged, "repeat_last": repeat_last}
        self._trace = None if trace is None else Trace(Path(trace))
        self._replay = None if replay is None else Replay(Path(replay))
        self._backends: dict[object, tuple[Backend, str | None]] = {}  # by URL, or by identity of the object
        self._minds: dict[str, Mind] = {}
        self._numbers = 0
        self._stopped = False
        self._extent: Extent | None = None
        if backend is not None and self._replay is None:
            self._backend_of(backend)  # what is wrong with it is said now
        for agent in agents:
            self.add(agent)

    # Agents

    def add(self, agent: Agent | str) -> Agent:
        """From the next tick on. The same id replaces, and what the one before was thinking is dropped."""
        if isinstance(agent, str):
            agent = self._agent(agent)
        if agent.given_backend is not None and self._replay is None:
            self._backend_of(agent.given_backend)
        self.remove(agent.agent_id)
        self._numbers += 1
        self._minds[agent.agent_id] = Mind(agent, self._numbers, **self._rules)
        agent.lent_backend = TextBackend.within(lambda: self._asking_for(agent), lambda: self._open.loop)
        return agent

    def remove(self, agent_id: str) -> None:
        """An agent that a tick is waiting for gets its fallback there. Removing one that is not there is no error."""
        mind = self._minds.pop(agent_id, None)
        if mind is not None:
            mind.gone = f"{agent_id} was unregistered"
            _end(mind.forget())

    @property
    def agents(self) -> dict[str, Agent]:
        return {agent_id: mind.agent for agent_id, mind in self._minds.items()}

    def _agent(self, agent_id: str) -> Agent:
        fallback = cast("Fallback | None", self._fallback)
        if self._schema is not None:
            return TypedAgent(agent_id, self._schema, fallback=fallback)
        return Agent(agent_id, tools=self._tools, fallback=fallback)

    # Ticks

    async def tick(self, tick: int, observations: Mapping[str, object]) -> dict[str, Decision[A]]:
        """A decision for each agent in ``observations``, in their order. Ticks may overlap. A tick that is lower than
        an agent's last one begins another episode for that agent."""
        if isinstance(tick, bool) or not isinstance(tick, int):
            raise SpecError(f"tick is {tick!r}; it is a whole number")
        extent = self._ensure_open()
        if self._replay is not None:
            return {agent_id: self._replayed(agent_id, tick) for agent_id in observations}
        now = asyncio.get_running_loop().time()
        due = math.inf if self.deadline is None else now + self.deadline
        given: dict[str, Given] = {}
        waiting: dict[str, tuple[Mind, Thought]] = {}
        for agent_id, mind in self._in_order(observations, given):
            turned = self._turn(mind, tick, observations[agent_id], now, due)
            if isinstance(turned, Thought):
                waiting[agent_id] = mind, turned
            else:
                given[agent_id] = turned
            for thought in mind.thoughts:
                if thought.task is None:
                    extent.begin(mind, thought, partial(self._asking_for, mind.agent))
        try:
            await self._wait([thought for _, thought in waiting.values()], due)
        except asyncio.CancelledError:
            for _, thought in waiting.values():
                thought.awaited = False
            raise
        for agent_id, (mind, thought) in waiting.items():
            given[agent_id] = self._conclude(mind, thought, tick)
        ordered = {agent_id: given[agent_id] for agent_id in observations}
        self._write(tick, observations, ordered)
        return {agent_id: cast("Decision[A]", decision) for agent_id, (decision, _) in ordered.items()}

    def _in_order(self, observations: Mapping[str, object], given: dict[str, Given]) -> list[tuple[str, Mind]]:
        """Those who observed, the first to be asked first. Who is not known falls back."""
        known = []
        for agent_id, observation in observations.items():
            mind = self._minds.get(agent_id)
            if mind is None:
                why = f"no agent {agent_id!r} is registered"
                given[agent_id] = Decision(idle(why), "fallback", reason=why), None
            else:
                known.append((_priority(mind.agent, observation), agent_id, mind))
        known.sort(key=lambda one: -one[0])  # stable: equals stay in the order in which they were given
        return [(agent_id, mind) for _, agent_id, mind in known]

    def _turn(self, mind: Mind, tick: int, observation: object, now: float, due: float) -> Given | Thought:
        observation = _snapshot(observation)
        try:
            if mind.begins_again(tick):
                _end(mind.forget())
                mind.agent.reset()
            observation = mind.agent.with_result(observation)
            mind.agent.perceive(observation)
        except Exception as error:
            return mind.fall_back(f"it could not perceive: {describe(error)}"), None
        return self._told(mind, mind.turn_to(tick, observation, now, due))

    async def _wait(self, thoughts: list[Thought], due: float) -> None:
        tasks = [thought.task for thought in thoughts if thought.task is not None]
        if tasks:
            left = due - asyncio.get_running_loop().time()
            await asyncio.wait(tasks, timeout=None if due == math.inf else max(0.0, left))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()  # a bug of ours

    def _conclude(self, mind: Mind, thought: Thought, tick: int) -> Given:
        given_up = thought.task is not None and thought.task.cancelled()
        why = "the thought was given up" if given_up else f"no answer within the deadline, {self.deadline} s"
        given = mind.conclude(thought, tick, "the runtime was stopped" if self._stopped else why)
        return cast("Given", self._told(mind, given))

    def _told(self, mind: Mind, given: Given | Thought) -> Given | Thought:
        """An agent remembers what came of its thoughts, once."""
        if isinstance(given, Thought):
            return given
        decision, thought = given
        if thought is not None and decision.source in ("answer", "late"):
            try:
                mind.agent.remember(decision.action)
            except Exception as error:
                logger.warning("the memory of agent %s raised %s", mind.agent.agent_id, describe(error))
        return given

    def _replayed(self, agent_id: str, tick: int) -> Decision[A]:
        assert self._replay is not None
        mind = self._minds.get(agent_id)
        agent = mind.agent if mind is not None else Agent(agent_id)
        decision = self._replay.decision(agent_id, tick, agent.recorded)
        if decision is None:
            why = f"nothing is recorded of {agent_id} at tick {tick}"
            decision = Decision(agent.fallback_for(why), "fallback", reason=why)
        return cast("Decision[A]", decision)

    def _write(self, tick: int, observations: Mapping[str, object], given: Mapping[str, Given]) -> None:
        if self._trace is not None:
            self._trace.write(tick, [(agent_id, observations[agent_id], one) for agent_id, one in given.items()])

    # From start to stop

    def start(self) -> Awaitable[None]:
        """Ticks may come. Awaited, the backend is open too, or its error is raised."""
        self.running, self._stopped = True, False
        return _Step(self._open_now)

    def stop(self) -> Awaitable[None]:
        """Thoughts end, and ticks under way with them. Awaited, everything is closed."""
        self.running, self._stopped = False, True
        extent = self._extent
        if extent is not None:
            extent.close()

        async def closed() -> None:
            if extent is not None:
                await extent.wait_closed()

        return _Step(closed)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _open_now(self) -> None:
        self._ensure_open()
        if self._replay is None and (self._given_backend is not None or self._minds):
            needs = [self._asking_for(mind.agent) for mind in self._minds.values() if not mind.agent.decides_itself]
            for asking in dict.fromkeys(needs):
                await asking.open()

    def _ensure_open(self) -> Extent:
        """Open in the running event loop. One that ended took with it what was open there."""
        if self._stopped:
            raise RuntimeError("the runtime is stopped: start() it again before the next tick")
        if self._extent is None or not self._extent.is_open:
            self.running = True
            for mind in self._minds.values():
                mind.forget()
            thinker = Thinker(
                system_prompt=self._system_prompt,
                seed=self._sampling.seed,
                timeout=self._timeout,
                workers=self._workers,
            )
            self._extent = Extent(thinker, self._close_trace)
        return self._extent

    @property
    def _open(self) -> Extent:
        if self._extent is None:
            raise RuntimeError("the runtime has not started")
        return self._extent

    def _close_trace(self) -> None:
        if self._trace is not None:
            self._trace.close()

    # Backends

    def _asking_for(self, agent: Agent) -> Asking:
        given = agent.given_backend if agent.given_backend is not None else self._given_backend
        askings, key = self._open.askings, _key(given)
        if key not in askings:
            backend, model = self._backend_of(given)
            askings[key] = Asking(backend, model, self._sampling, self._max_inflight, self._timeout)
        return askings[key]

    def _backend_of(self, given: object) -> tuple[Backend, str | None]:
        """Made once; a SpecError where it is none."""
        key = _key(given)
        if key not in self._backends:
            is_theirs = isinstance(given, GeneratesOne | GeneratesMany) and not isinstance(given, Backend | type)
            if is_theirs:
                self._backends[key] = UsersBackend(given, self._workers), self._model
            else:
                model = self._model if key == _key(self._given_backend) else None
                self._backends[key] = open_backend(given, model=model, api_key=self._api_key)
        return self._backends[key]


def _key(given: object) -> object:
    return given if isinstance(given, str | None) else id(given)


def _end(thoughts: Iterable[Thought]) -> None:
    for thought in thoughts:
        if thought.task is not None:
            thought.task.cancel()


def _snapshot(observation: object) -> object:
    """As it is now: a world may fill the same dict again while the agent still thinks. What cannot be copied is not."""
    try:
        return deepcopy(observation)
    except Exception:
        return observation


def _priority(agent: Agent, observation: object) -> float:
    try:
        return float(agent.priority(observation) if callable(agent.priority) else agent.priority)
    except Exception as error:
        logger.warning("the priority of agent %s raised %s", agent.agent_id, describe(error))
        return 0.0


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise SpecError(f"{name} is {value!r}; it is a number of seconds above 0, or None")


def _check_count(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and (type(value) is not int or value < 1):
            raise SpecError(f"{name} is {value!r}; it is a whole number above 0")
