"""One agent from start to end: a worker gets a row and a context, and ends with an output or an error.

An agent owns its conversation and its tally. Slots, tools and the backend belong to the run (``Resources``). A failure
of this job alone is a JobError and becomes part of its result. Any other exception is a bug of this package and stops
the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias, cast

from batch_agent.agent.loop import InnerWorker, tool_loop
from batch_agent.agent.prepare import Prepared
from batch_agent.agent.turn import Resources
from batch_agent.agent.user_worker import UserWorker, bounded
from batch_agent.agent.work import Work
from batch_agent.dispatch.spending import Spending
from batch_agent.errors import AgentTimeout, Interrupted, JobError, RecordUnreadable
from batch_agent.job import AgentError, AgentResult, BaseResult, Job
from batch_agent.messages import JsonObject, Message, content_shown
from batch_agent.record.journal import FailedBefore, Trail
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.forecast import AgentProgress

AgentWorker: TypeAlias = InnerWorker | UserWorker
UNREADABLE = (
    "the record of this row is damaged, and it contains a write that was begun: the row is not run again, because "
    "that could write twice. Check what it wrote; to run it again, give the row another id. ({reason})"
)


class Agent:
    def __init__(self, job: Job, resources: Resources, trail: Trail, worker: AgentWorker) -> None:
        self.job = job
        self.error: JobError | None = None
        self.recorded: AgentResult[object] | None = None  # its result, once it is being written to disk
        self._verdict: AgentError | None = None
        self._output: object = None
        self.stopped_by: JobError | None = None  # the error of an early stop
        self._task: asyncio.Task[object] | None = None  # while it works
        self.tasks: Sequence[asyncio.Task[None]] = ()  # the tasks that run it until its result is delivered
        self._deadline = resources.timeout_per_agent
        self._trail = trail
        self._worker = worker
        self._work = Work(job, resources, trail, worker)

    async def run(self, ticket: Ticket | None) -> AgentResult[object]:
        """Return the result, with a JobError as part of it. ``ticket``: a slot already requested."""
        work, deadline = self._work, self._deadline
        work.ticket = ticket
        limit = None if deadline is None else asyncio.timeout(max(0.0, deadline - work.seconds_before))
        self._task = task = asyncio.current_task()
        if self.stopped_by is not None and task is not None:
            task.cancel()
        try:
            if self._trail.past.unreadable:
                raise RecordUnreadable(UNREADABLE.format(reason=self._trail.past.unreadable))
            if limit is None:
                self._output = await work.run()
            else:
                async with limit:
                    self._output = await work.run()
            if work.failure is not None:  # the worker's output cannot replace this failure
                raise work.failure
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            turns = work.tally.turns
            self.fail(AgentTimeout(f"timeout_per_agent, {deadline:g} s, is over after {turns} answers of the model"))
        except JobError as error:
            self.fail(error)
        except asyncio.CancelledError:
            if self.stopped_by is None or task is None or task.uncancel():  # another cancellation is for the whole run
                raise
            self.fail(self.stopped_by)
        finally:
            self._task = None
            await work.close()
        return self.result()

    def stop(self, error: JobError) -> None:
        """End the agent now with this error, unless it has ended."""
        if self.stopped_by is None:
            self.stopped_by = error
            if self._task is not None:
                self._task.cancel()

    def anew(self, resources: Resources) -> Agent:
        """Return an agent for the same job that starts again."""
        again = Agent(self.job, resources, self._trail.anew(), self._worker)
        again.tasks = self.tasks
        return again

    def conversation(self) -> JsonObject:
        """Return the messages so far, and the answer that is being streamed."""
        return self._work.shown()

    def fail(self, error: JobError) -> None:
        self.error, self._output = error, None
        self._verdict = error.failed.error if isinstance(error, FailedBefore) else AgentError.of(error)

    def record_end(self, result: AgentResult[object]) -> None:
        """Record the end of the agent in its trail. An interrupted agent has not ended."""
        if isinstance(self.error, Interrupted):
            return
        if not self._trail.past.unreadable:  # nothing is added to an unreadable record
            self._work.end(self._verdict)
        self.recorded = result

    async def settle(self) -> None:
        await self._trail.settle()

    def result(self) -> AgentResult[object]:
        work, tally = self._work, self._work.tally
        result: BaseResult[object] = BaseResult(
            index=self.job.index,
            job_id=self.job.job_id,
            input=self.job.input,
            ok=self._verdict is None,
            output=self._output,
            error=self._verdict,
            attempts=tally.attempts,
            turns=tally.turns,
            usage=tally.usage,
            cost=tally.cost,
            timings=tally.timings(work.seconds()),
            messages=_kept(work.messages),
            raw_text=work.text,
            repaired=work.repaired and self._verdict is None,
            truncated=work.truncated and self._verdict is None,
            resumed=not self._trail.fresh,
            shortened=self.job.shortened,
            artifacts=work.artifacts,
        )
        return cast("AgentResult[object]", result)

    @property
    def progress(self) -> AgentProgress:
        return self._work.progress

    @property
    def turns(self) -> int:
        return self._work.tally.turns


def _kept(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages for the result. Images become placeholders, because results stay in memory."""
    return tuple(
        message if isinstance(message.content, str) else replace(message, content=content_shown(message.content))
        for message in messages
    )


@asynccontextmanager
async def open_worker(prepared: Prepared, inner: InnerWorker | None, spending: Spending) -> AsyncIterator[AgentWorker]:
    """Yield the worker of a run: the user's worker, a built-in one (``inner``), or the tool loop."""
    if prepared.spec.worker is None:
        yield tool_loop if inner is None else bounded(inner)
        return
    from batch_agent.gateway.gateway import Gateway  # it includes an HTTP server, which other runs do not need

    async with Gateway() as gateway:
        yield UserWorker(prepared.spec.worker, prepared, gateway, spending)
