"""One call over many prompts: collects the responses in order, until all are there or the deadline has passed."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence

from batch_agent.dispatch.cancellation import first_error
from batch_agent.errors import Timeout
from batch_agent.swarm.asking import Asking
from batch_agent.swarm.response import Response

logger = logging.getLogger("batch_agent")

Sink = Callable[[Response], object]


class Scatter:
    """Holds ``n`` responses for each prompt, one after another. ``turn`` returns the agent for a prompt."""

    def __init__(self, prompts: int, turn: Callable[[int], int], asking: Asking, sink: Sink | None = None) -> None:
        self._asking = asking
        self._turn = turn
        self._sink = sink
        self._found: list[Response | None] = [None] * (prompts * asking.n)
        self._reported = False

    @property
    def responses(self) -> list[Response]:
        """Return the responses so far."""
        return [response for response in self._found if response is not None]

    async def put(self, index: int, responses: Sequence[Response], first: int = 0) -> None:
        """Store the responses to one prompt, and report them; ``first`` is the number of the first sample."""
        for sample, response in enumerate(responses, start=first):
            response.index = index
            self._found[index * self._asking.n + sample] = response
            if self._asking.on_result is not None:
                await self._tell(self._asking.on_result, response)
            if self._sink is not None:
                self._sink(response)

    async def run(self, work: Iterable[Coroutine[object, object, None]]) -> list[Response]:
        """Run all work at once and return the responses. Unfinished work fails at the deadline."""
        limit = asyncio.timeout(self._asking.deadline)
        try:
            async with limit, asyncio.TaskGroup() as tasks:
                for each in work:
                    tasks.create_task(each)
        except TimeoutError:
            if not limit.expired():
                raise
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        late = [place for place, response in enumerate(self._found) if response is None]
        for place in late:
            index, sample = divmod(place, self._asking.n)
            error = Timeout(f"not finished by the deadline, {self._asking.deadline} s")
            agent_index = -1 if self._asking.dispatch == "balanced" else self._turn(index)
            await self.put(index, [Response.failed(error, agent_index)], sample)
        return self.responses

    async def _tell(self, on_result: Sink, response: Response) -> None:
        """Call the user's function. Its errors are logged once, and fail nothing."""
        try:
            outcome = on_result(response)
            if inspect.isawaitable(outcome):
                await outcome
        except Exception:
            if not self._reported:
                self._reported = True
                logger.exception("on_result raised for prompt %d; further errors are not logged", response.index)
