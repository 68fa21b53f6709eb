"""The lines of one batch while it runs: which line is offered next, its request, and its outcome."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, cast

from batch_agent.agent.dialogue import Dialogue
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.dispatch.policy import TakenBack
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.door import RequestRefused
from batch_agent.errors import BackendError, Interrupted, Timeout
from batch_agent.job import AgentResult, Placed
from batch_agent.messages import JsonObject, Reply
from batch_agent.run.run import Run
from batch_agent.serve.asking import (
    ClientCall,
    LineAnswer,
    ask_line,
    failed_line,
    line_needs,
    refused_for,
)
from batch_agent.serve.catalog import ServedBatch
from batch_agent.serve.line_scheduler import FIRST_GUESS, LineScheduler, LineSource, StartedLine
from batch_agent.serve.lines import BatchLine, BatchLines, UnreadableLine
from batch_agent.serve.models import ServedModels

LEAD_SECONDS = 5.0  # that lines wait for the first one with their prefix
MOST_LATER = 1024  # lines that wait for it in memory, or for a server
MOST_SKIPPED = 64  # lines for servers that are away, at one look for a line that may start


@dataclass(slots=True, eq=False)
class Granted(StartedLine):
    """A line that was started. ``expected``: the tokens that its tenant's account was charged for it."""

    line: BatchLine
    body: JsonObject
    expected: float
    reserved: int = 0  # tokens of the day
    beside: int = 0  # other requests that were in flight then
    asked: bool = False  # a request is in flight, whose tokens are not known
    tokens: int = 0
    needs: tuple[int, int] = (0, 0)  # tokens of the day, at least and at most

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def lost(self) -> int:
        """The number of tokens to count for an answer that is no longer awaited."""
        return self.reserved if self.asked else 0


class RunningBatch(LineSource):
    """A batch that has been validated, while its lines run. ``inlet`` gets the rows of its run. ``travels``: processes
    on other machines also work on the lines, so that rows contain the whole line, and results its outcome. ``failure``:
    the reason why the lines cannot be read."""

    def __init__(
        self,
        batch: ServedBatch,
        lines: BatchLines,
        models: ServedModels,
        line_scheduler: LineScheduler,
        *,
        travels: bool,
    ) -> None:
        super().__init__(batch.id, batch.tenant, batch.deadline)
        self.batch = batch
        self.lines = lines
        self._models = models
        self._line_scheduler = line_scheduler
        self._travels = travels
        self.inlet: RowChannel[object] = RowChannel()
        self.failure: Exception | None = None
        self._suffix = batch.id.rpartition("_")[2]
        self._written = asyncio.Event()  # outcomes are to be flushed
        self._clock = asyncio.get_running_loop().time
        self._granted: dict[int, Granted] = {}
        self._refused: dict[int, RequestRefused] = {}  # by line, until its outcome is written
        self._ordered = lines.left_in_order()
        self._next: tuple[BatchLine, str, JsonObject] | None = None
        # Lines whose requests were taken back, and which start again before others.
        self._back: deque[tuple[Granted, asyncio.Future[None]]] = deque()
        self._later: deque[BatchLine] = deque()  # lines that wait for the first one with their prefix
        self._away: deque[tuple[BatchLine, str]] = deque()  # lines whose model cannot be answered now
        self._leaders: dict[bytes, float] = {}  # by prefix: the loop time until which others wait for its first line
        self.run: Run[object] | None = None

    @property
    def left(self) -> int:
        return self.lines.left

    def offer(self) -> int | None:
        if self._back:
            granted, _ = self._back[0]
            self.model, self.needs = granted.model, granted.needs
            return granted.line.size
        for _ in range(MOST_SKIPPED):
            if self._next is None and not self.closed:
                try:
                    self._next = self._next_that_fits()
                except (OSError, ValueError, sqlite3.Error) as error:
                    self.failure = error
                    self.close()
            if self._next is None:
                return None
            line, _, body = self._next
            self.model = str(body["model"])
            if not self._line_scheduler.waits(self.model):
                return line.size
            if len(self._away) >= MOST_LATER:
                return None
            self._away.append((line, self.model))
            self._next = None
        return None

    def start(self, expected: float) -> None:
        if self._back:
            granted, turn = self._back.popleft()
            granted.expected, granted.reserved = expected, self.reserved
            self._granted[granted.line.number] = granted
            if not turn.done():  # else it was cancelled just now
                turn.set_result(None)
            return
        assert self._next is not None
        (line, own, body), self._next = self._next, None
        if line.has_long_prefix and line.group not in self._leaders:
            if len(self._leaders) >= MOST_LATER:
                self._leaders.clear()
            self._leaders[line.group] = self._clock() + LEAD_SECONDS
        granted = Granted(line, body, expected, self.reserved, asked=self._travels, needs=self.needs)
        self._granted[line.number] = granted
        row: JsonObject = {"id": own, "line": line.number}
        if self._travels:
            row |= {"name": self._name(line.number), "endpoint": self.batch.endpoint, "body": body}
        self.inlet.put(Placed(line.number, row))

    def close(self) -> None:
        super().close()
        self._next = None
        self.inlet.close()

    def stop(self) -> None:
        """Start no further line, and none again: the batch was cancelled, or has expired."""
        self.close()
        while self._back:
            _, turn = self._back.popleft()
            if not turn.done():
                turn.set_exception(Interrupted("the batch ended before this line was sent again"))

    def _next_that_fits(self) -> tuple[BatchLine, str, JsonObject] | None:
        """Return the next readable line, with its custom_id and request; None if there is none now. A line that needs
        more tokens than its tenant has in a day fails."""
        limit = self._line_scheduler.ledger.limit(self.tenant)
        while (line := self._next_in_order()) is not None:
            try:
                own, body = self.lines.read(line)
            except UnreadableLine:
                self.lines.end_unreadable(line)
                self._written.set()
                continue
            if limit is None:
                return line, own, body
            longest = self._line_scheduler.account(self.tenant).longest
            usual = int(self.per_line or FIRST_GUESS)
            try:
                self.needs = line_needs(self.batch.endpoint, body, limit, longest, usual)
                return line, own, body
            except RequestRefused as refused:
                answer = failed_line(self.batch.endpoint, self._name(line.number), refused)
                self._put(line.number, own, answer)
        return None

    def _next_in_order(self) -> BatchLine | None:
        """Return the next line; None if there is none now. Lines with a long prefix wait for the answer to the first of
        them, so that the engine has computed the prefix; meanwhile other lines are returned."""
        later, away = self._later, self._away
        if away and not self._line_scheduler.waits(away[0][1]):
            return away.popleft()[0]
        if later and self._is_led(later[0].group):
            return later.popleft()
        while len(later) < MOST_LATER:
            line = next(self._ordered, None)
            if line is None:
                break
            if not line.has_long_prefix or self._is_led(line.group):
                return line
            later.append(line)
        if not later and not away:
            self.close()
        return None

    def _is_led(self, group: bytes) -> bool:
        """Return whether a line of the group may start: none was started yet, or the first one was answered or takes
        too long."""
        return self._leaders.get(group, -inf) <= self._clock()

    def _lead_over(self, group: bytes) -> None:
        if group in self._leaders:
            self._leaders[group] = -inf

    async def answer(self, row: object, dialogue: Dialogue) -> object:
        """Answer one line, as the worker of the batch's run. ``take`` writes the outcome when it is recorded."""
        assert isinstance(row, dict)
        granted = self._granted[row["line"]]
        try:
            return await self._answer(granted, dialogue)
        finally:
            self._lead_over(granted.line.group)
            if self._granted.pop(granted.line.number, None) is not None:
                self._end(granted, granted.tokens, sent=bool(granted.sent_at))

    def _end(self, granted: Granted, tokens: int, *, sent: bool) -> None:
        reserved = granted.reserved
        lost = granted.lost
        model = granted.model
        self._line_scheduler.ended(self, tokens, granted.expected, sent=sent, model=model, reserved=reserved, lost=lost)

    async def _answer(self, granted: Granted, dialogue: Dialogue) -> LineAnswer:
        def call(models: ServedModels, question: ModelRequest) -> ClientCall:
            return _LineCall(models, question, partial(self._sent, granted), granted)

        def ask(shape: RequestShape, _: object, send: Callable[[ModelRequest], ClientCall]) -> Awaitable[Reply]:
            return dialogue.ask(shape, send=send)

        name = self._name(granted.line.number)
        answer: LineAnswer | None = None
        while answer is None:
            try:
                answer = await ask_line(self._models, self.batch.endpoint, name, granted.body, ask, call)
            except BackendError as error:  # the record keeps only its message
                self._refused[granted.line.number] = refused_for(error)
                raise
            except TakenBack:
                await self._turn(granted)
        granted.tokens = answer.tokens
        account = self._line_scheduler.account(self.tenant)
        account.longest = max(account.longest, answer.completion_tokens)
        if granted.sent_at and answer.ok:
            seconds, governor = self._clock() - granted.sent_at, self._line_scheduler.governor
            beside = max(granted.beside, self._line_scheduler.inflight - 1 + governor.active)
            governor.learn_line(seconds, answer.completion_tokens, beside)
        return answer

    def started_lines(self) -> Iterable[StartedLine]:
        return self._granted.values()

    async def _turn(self, granted: Granted) -> None:
        """Wait until a line whose request was cancelled for people may start again."""
        del self._granted[granted.line.number]
        granted.asked, granted.question = False, None  # its tenant does not pay for it
        self._end(granted, 0, sent=True)
        granted.sent_at = 0.0
        turn = asyncio.get_running_loop().create_future()
        self._back.append((granted, turn))
        self._line_scheduler.touch()
        try:
            await turn
        except BaseException:
            self._back = deque(one for one in self._back if one[0] is not granted)
            raise

    def _name(self, number: int) -> str:
        return f"{self._suffix}{number:08x}"

    def _sent(self, granted: Granted, question: ClientCall, endpoint: str) -> None:
        self._line_scheduler.note_sent(endpoint)
        granted.question, granted.endpoint = question, endpoint
        if not granted.sent_at:
            granted.sent_at = self._clock()
            granted.beside = self._line_scheduler.inflight - 1 + self._line_scheduler.governor.active
            self._line_scheduler.sent(granted.model)

    def state_of(self, number: int) -> str:
        """Return the state of a line that is not done, or ""."""
        return "" if self.lines.is_done(number) else "in flight" if number in self._granted else "waiting"

    def abandon(self) -> None:
        """End lines that were started here and that the run has not begun."""
        for granted in self._granted.values():
            self._end(granted, 0, sent=bool(granted.sent_at))
        self._granted.clear()

    def take(self, result: AgentResult[object]) -> None:
        """Write the outcome of a line, which is already in the record of the run. After a kill before the outcome is
        flushed, the line is fed again and answered from the record."""
        if self._travels and (granted := self._granted.pop(result.index, None)) is not None:
            self._lead_over(granted.line.group)
            tokens = result.usage.prompt_tokens + result.usage.completion_tokens
            granted.asked = not result.ok and result.error.type == Interrupted.type
            self._end(granted, tokens, sent=True)
        if not result.ok:
            if result.error.type == Interrupted.type:
                return
            refused = self._refused.pop(result.index, None) or refused_for(result.error.exception())
            answer = failed_line(self.batch.endpoint, self._name(result.index), refused)
        elif isinstance(result.output, LineAnswer):
            answer = result.output
        else:
            told = cast("dict[str, Any]", result.output)  # of ``answer_line``
            answer = LineAnswer(told["ok"], told["outcome"])
        row = cast("dict[str, Any]", result.input)
        self._put(result.index, row["id"], answer)

    def _put(self, number: int, own: str, answer: LineAnswer) -> None:
        self.lines.put(number, own, answer.outcome, ok=answer.ok)
        self._line_scheduler.account(self.tenant).done["succeeded" if answer.ok else "failed"] += 1
        self._written.set()

    async def keep_flushed(self) -> None:
        """Flush outcomes. Those that were written in one iteration of the event loop are flushed together."""
        while True:
            await self._written.wait()
            self._written.clear()
            self.lines.flush()


class _LineCall(ClientCall):
    __slots__ = ("_granted", "_on_sent")

    def __init__(
        self, backend: ServedModels, request: ModelRequest, on_sent: Callable[[ClientCall, str], None], granted: Granted
    ) -> None:
        super().__init__(backend, request)
        self._on_sent, self._granted = on_sent, granted

    async def send(self, endpoint: str) -> Reply:
        self._on_sent(self, endpoint)
        self._granted.asked = True
        try:
            reply = await super().send(endpoint)
        except BackendError as error:
            self._granted.asked = isinstance(error, Timeout) and not error.unreached  # it may have generated all
            raise
        self._granted.asked = False
        return reply
