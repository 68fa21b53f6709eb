"""Rows on which several agents work: what their results have in common with that of the row (``Several``), and a row
that does not fit and is processed in parts (``Parts``): the results of the parts, and the one result of the row.

Each part is an agent with its own record; so is each request that merges answers. The batch starts them, and this
module counts them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import cast

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Interrupted, JobError
from batch_agent.files.results import plainly, to_json
from batch_agent.job import JOINED, AgentError, AgentResult, BaseResult, Job, Timings
from batch_agent.messages import Usage

NOT_BEGUN = "the run ended before every part of this row was begun"


class Several(ABC):
    """A row on which several agents work, each with its own record. ``recorded`` is None: only the ends of the agents
    are recorded, not that of the row."""

    recorded: None = None

    def __init__(self, job: Job) -> None:
        self.job = job
        self.error: AgentError | None = None
        self.tasks: list[asyncio.Task[None]] = []  # tasks that work on it
        self._began = asyncio.get_running_loop().time()

    def fail(self, error: JobError) -> None:
        self.error = AgentError.of(error)

    @abstractmethod
    def result(self) -> AgentResult[object]: ...

    def summed(
        self, results: Sequence[AgentResult[object]], last: AgentResult[object] | None, chunks: int = 1
    ) -> BaseResult[object]:
        """Return the result of the row, with the output and the texts of ``last``, and the sum of what all agents have
        used."""
        costs = [result.cost for result in results if result.cost is not None]
        models = [name for result in results if result.answered_by for name in result.answered_by.split(JOINED)]
        return BaseResult(
            index=self.job.index,
            job_id=self.job.job_id,
            input=self.job.input,
            ok=self.error is None,
            output=last.output if last is not None and self.error is None else None,
            error=self.error,
            attempts=1 + sum(max(0, result.attempts - 1) for result in results) if results else 0,
            turns=sum(result.turns for result in results),
            usage=reduce(add, (result.usage for result in results), Usage()),
            cost=sum(costs) if costs else None,
            timings=self._timings(results),
            messages=last.messages if last is not None else (),
            raw_text=last.raw_text if last is not None else "",
            repaired=self.error is None and any(result.repaired for result in results),
            truncated=self.error is None and any(result.truncated for result in results),
            resumed=bool(results) and all(result.resumed for result in results),
            chunks=chunks,
            shortened=self.job.shortened,
            answered_by=JOINED.join(dict.fromkeys(models)) or None,
        )

    def _timings(self, results: Sequence[AgentResult[object]]) -> Timings:
        """Return the sums over all agents; ``total`` is the wall time of the row."""
        timings = [result.timings for result in results]
        first = [timing.first_token for timing in timings if timing.first_token is not None]
        return Timings(
            sum(timing.queued for timing in timings),
            sum(timing.inference for timing in timings),
            sum(timing.tool_wait for timing in timings),
            asyncio.get_running_loop().time() - self._began,
            first[0] if first else None,
        )


class Parts(Several):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._results: dict[int, AgentResult[object]] = {}  # of the parts
        self._merges: list[AgentResult[object]] = []
        self._begun = 0
        self._every: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False

    def begin(self) -> int:
        """Count another part that begins, and return its position."""
        self._begun += 1
        return self._begun - 1

    def close(self) -> None:
        """Record that no more parts will begin."""
        self._closed = True
        if self._begun < len(self.job.parts) and self.error is None:
            self.fail(Interrupted(NOT_BEGUN))
        self._settle()

    def end(self, place: int, result: AgentResult[object]) -> None:
        self._results[place] = result
        if result.error is not None and self.error is None:
            where = f"part {place + 1} of {len(self.job.parts)}: "
            self.error = replace(result.error, message=where + result.error.message)
        self._settle()

    async def wait(self) -> None:
        """Wait until every part that was begun has ended."""
        await self._every

    def _settle(self) -> None:
        if self._closed and len(self._results) == self._begun and not self._every.done():
            self._every.set_result(None)

    def answers(self, schema: OutputSchema[object] | None) -> list[str]:
        return self._texts([self._results[place] for place in sorted(self._results)], schema)

    def merged(self, results: Sequence[AgentResult[object]], schema: OutputSchema[object] | None) -> list[str]:
        """Add the results of one level of merging, and return their answers."""
        self._merges += results
        return self._texts(results, schema)

    def _texts(self, results: Sequence[AgentResult[object]], schema: OutputSchema[object] | None) -> list[str]:
        """Return the answers as text for a model. If one of them failed or cannot be written, the row fails."""
        plain = [plainly(result, schema) for result in results]
        self.error = next((result.error for result in plain if result.error is not None), None)
        return [_text(result.output) for result in plain]

    def result(self) -> AgentResult[object]:
        """Return the result of the last merge, with the usage of all others added."""
        results = [*(self._results[place] for place in sorted(self._results)), *self._merges]
        result = self.summed(results, results[-1] if results else None, len(self.job.parts))
        return cast("AgentResult[object]", result)


def _text(output: object) -> str:
    return output if isinstance(output, str) else to_json(output).decode()
