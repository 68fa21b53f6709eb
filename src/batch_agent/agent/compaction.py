"""Keeps the conversations of a run within the model's context: when to cut one, and who summarises the removed part.

``compiler.compaction`` decides what is removed. A summary is requested from a model like a turn, but after all turns.
If that fails, a list of the removed calls replaces the summary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from batch_agent.agent.agent import Tally
from batch_agent.agent.dialogue import Resources, TurnCall
from batch_agent.agent.prepare import Prepared, only_model
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler import compaction
from batch_agent.compiler.compaction import Cut, history_tokens, left_out, note, plan_cut, stated
from batch_agent.dispatch.cancellation import worker_boundary
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.errors import ContextOverflow, JobError, WorkerFailed
from batch_agent.job import Job
from batch_agent.messages import Conversation, Message, Usage
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.record.steps import Compacted
from batch_agent.scheduler.capacity import START
from batch_agent.scheduler.ordering import LAST, AgentForecast

if TYPE_CHECKING:
    from batch_agent.agent.dialogue import Dialogue

logger = logging.getLogger("batch_agent")

Teller = Callable[[Sequence[Message]], str | Awaitable[str]]
TRUSTED = 0.75  # part of the context that an estimate may fill if the server counts no tokens
MARGIN = 0.02  # part of the context by which a prompt may be longer than expected
PATIENCE = 15.0  # seconds that a separate server for summaries may be unreachable
SUMMARISE = Message(
    "system",
    "You are given the first steps of an agent's work, which will be removed from its context. Write what it must know "
    "to continue without them: facts with their exact numbers, names, paths, ids and quotations, what was tried and "
    "what came of it, decisions, what is still open. Leave out nothing that a later answer could depend on, and add "
    "nothing. At most 300 words, no introduction.",
)


@dataclass(slots=True, eq=False)
class Compactor:
    """``context`` is the model's context in tokens, from the spec or from the server's messages. ``prefix_tokens`` is
    the estimate of the shared prefix. ``summaries`` has the backend for summaries, and ``shape`` the kind of
    request."""

    mode: Literal["auto", "off"] | Teller
    context: int | None
    min_response_tokens: int
    prefix_tokens: int = 0
    summaries: Resources | None = None
    shape: RequestShape | None = None

    def excess(self, dialogue: Dialogue) -> int:
        """Return by how many tokens the next prompt should be shortened; 0 if it fits."""
        if self.mode == "off" or self.context is None:
            return 0
        room, foreseen = self.context, dialogue.foreseen()
        if foreseen is None:
            room, foreseen = int(TRUSTED * self.context), self._estimated(dialogue)
        if foreseen is None or foreseen <= compaction.THRESHOLD * room:
            return 0
        return foreseen - int(compaction.TARGET * room)

    def foreseen(self, dialogue: Dialogue) -> int | None:
        """Return the tokens of the next prompt, or a high estimate; None before the first answer."""
        foreseen = dialogue.foreseen()
        if foreseen is None and (estimated := self._estimated(dialogue)) is not None:
            return int(estimated / TRUSTED)
        return foreseen

    def _estimated(self, dialogue: Dialogue) -> int | None:
        own = dialogue.estimated()
        return None if own is None else self.prefix_tokens + own

    def fitted(self, shape: RequestShape, prompt: int | None) -> RequestShape:
        """Return the shape with ``max_tokens`` limited to what a prompt of ``prompt`` tokens leaves of the context."""
        if shape.max_tokens is None or self.context is None or prompt is None:
            return shape
        room = max(self.context - prompt - int(MARGIN * self.context), self.min_response_tokens)
        return shape if shape.max_tokens <= room else replace(shape, max_tokens=room)

    def after(self, error: ContextOverflow, shape: RequestShape, dialogue: Dialogue) -> tuple[RequestShape, int]:
        """Return how to repeat a request that was too long for the server: the shape to use, and by how many tokens to
        shorten the prompt. (shape, 0) means that nothing helps."""
        says = stated(str(error))
        self.context = says.context or self.context
        prompt = says.prompt or self.foreseen(dialogue)
        if self.context is not None and prompt is not None and prompt + self.min_response_tokens <= self.context:
            smaller = self.fitted(shape, prompt)
            if smaller is not shape:
                return smaller, 0
        if self.mode == "off":
            return shape, 0
        if self.context is not None and prompt is not None:
            return shape, max(1, prompt - int(compaction.TARGET * self.context))
        return shape, history_tokens(dialogue.own_asked) // 2

    async def compact(self, dialogue: Dialogue, excess: int, job: Job, tally: Tally, digest: str) -> Compacted | None:
        """Cut the conversation by about ``excess`` tokens, before the request with this digest. Returns None if too
        little of it can be removed."""
        own, before = dialogue.own, dialogue.cut
        told = self.summaries is not None or callable(self.mode)
        cut = plan_cut(own, before, excess, told=told)
        if not self._is_worth(cut, dialogue, excess):
            return None
        summary, usage = "", Usage()
        if cut.kept_from > before.kept_from and told:
            summary, usage = await self._tell(own, before, cut, job, tally)
            if not summary:
                cut = plan_cut(own, before, excess, told=False)
        if cut.kept_from > before.kept_from:
            cut = replace(cut, note=note(own, cut, summary))
        dialogue.compact(cut)
        return Compacted(cut, usage, digest)

    def _is_worth(self, cut: Cut, dialogue: Dialogue, excess: int) -> bool:
        saved = history_tokens(dialogue.own_asked) - history_tokens(cut.apply(dialogue.own))
        return saved >= (excess // 4 if self.context is None else compaction.WORTH * self.context)

    async def _tell(self, own: Sequence[Message], before: Cut, cut: Cut, job: Job, tally: Tally) -> tuple[str, Usage]:
        if callable(self.mode):
            return await _told_by(self.mode, list(left_out(own, cut))), Usage()
        since = left_out(own, cut)[len(left_out(own, before)) :]
        return await self._summary(before.note, since, job, tally)

    async def _summary(self, known: str, gone: Sequence[Message], job: Job, tally: Tally) -> tuple[str, Usage]:
        """Return a summary of the removed messages and of the earlier one (``known``); "" if that fails."""
        r, shape = self.summaries, self.shape
        assert r is not None and shape is not None
        steps = "\n\n".join(filter(None, [job.prompt, known, *map(_written, gone)]))
        request = ModelRequest(shape, Conversation([SUMMARISE, Message("user", steps)]), job.job_id)
        own_tally = Tally(tally.counted, turns=tally.turns)
        progress = AgentForecast(LAST, model=shape.model)
        try:
            turn = TurnCall(r, request, job.index, own_tally, None, None)
            reply = await r.dispatcher.ask(turn, r.policy, progress=progress, observer=turn)
            summary = strip_reasoning(reply.text)
        except JobError as error:
            logger.warning("row %s: the summary failed, a list of the removed calls replaces it: %s", job.index, error)
            summary = ""
        tally.pay(own_tally.usage, own_tally.cost)
        return summary, own_tally.usage


async def _told_by(teller: Teller, gone: Sequence[Message]) -> str:
    """Return the text of the user's compaction function."""
    with worker_boundary("the compaction failed:"):
        told = teller(gone)
        if inspect.isawaitable(told):
            told = await told
    if not isinstance(told, str):
        raise WorkerFailed(f"the compaction gave {type(told).__name__} instead of a text for the removed messages")
    return told


def _written(message: Message) -> str:
    """Return a message as text for a model that is not part of the conversation."""
    calls = "".join(f"\ncalls {call.name}({call.arguments})" for call in message.tool_calls)
    return f"{'result' if message.role == 'tool' else message.role}: {message.content}{calls}"


@asynccontextmanager
async def open_compactor(prepared: Prepared, resources: Resources) -> AsyncIterator[Compactor]:
    """Yield the compactor of a run. A separate server for summaries has its own slots."""
    spec = prepared.spec
    compactor = Compactor(
        spec.compaction, prepared.context, spec.min_response_tokens, prefix_tokens=prepared.plan.prefix_tokens
    )
    if prepared.summaries is None:
        yield compactor
        return
    backend, model = prepared.summaries
    if backend is prepared.backend:
        compactor.shape = RequestShape(model or "", extra_body=spec.extra_body)
        compactor.summaries = replace(resources, schema=None, keeps_cut_text=False)
        yield compactor
        return
    able = backend.capabilities
    most = able.default_inflight or START
    dispatcher = Dispatcher(backend, most, servers=backend.servers, max_outage=PATIENCE)
    dispatcher.spending = resources.dispatcher.spending
    try:
        async with backend:
            compactor.shape = RequestShape(model or await only_model(backend, spec, "compaction_model"))
            compactor.summaries = replace(
                resources, backend=backend, dispatcher=dispatcher, schema=None, keeps_cut_text=False
            )
            yield compactor
    finally:
        dispatcher.close()
