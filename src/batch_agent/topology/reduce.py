"""A reduction: many rows into one answer, by a tree of requests if they do not fit one.

``Tree`` decides which rows go together; it is pure. ``ReduceNode`` writes their requests and stores their answers.
A part that the server finds too long is halved. A part that fails is passed to the next level as an error, and its rows
are listed as lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar

from batch_agent.agent.prepare import Prepared
from batch_agent.compiler.tokens import estimate_tokens
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import (
    BatchAgentError,
    ContextOverflow,
    InputError,
    InternalError,
    Interrupted,
    Invalid,
    Oversized,
    SpecError,
)
from batch_agent.files.results import to_json
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, BaseResult, Failure, Placed
from batch_agent.run.run import Run
from batch_agent.topology.nodes import Item, Receiver, error_of, undone
from batch_agent.value_type import value_type

Shape = Literal["auto", "flat"] | int
KINDS = 4  # of indexes, by their remainder: a part of the tree, the two halves of a part, and what joins them


@dataclass(frozen=True, slots=True)
class Piece:
    """What a reducer reads: one result, or the answer for several. All numbers are indexes of results."""

    text: str
    tokens: int
    first: int
    last: int
    covers: tuple[int, ...] = ()  # results whose content it includes
    failed: tuple[int, ...] = ()  # failed results
    lost: tuple[int, ...] = ()  # results whose part could not be reduced

    @property
    def count(self) -> int:
        return len(self.covers) + len(self.failed) + len(self.lost)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows that are reduced together. ``merges``: the rows are answers of other parts. ``last``: its answer is the
    final one. ``whole``: the part that was too long for one request, of which this part is a half. ``joins``: the part
    whose halves this part merges."""

    level: int
    number: int
    rows: tuple[Piece, ...]
    last: bool
    merges: bool
    whole: Part | None = None
    half: int = 0
    joins: Part | None = None

    @property
    def index(self) -> int:
        """A number that no other part has. It is the same in every session, whichever part is ready first, so that a
        worker can finish the part while the pipeline is resumed. The numbers have few gaps, because results are sorted
        by an array."""
        if self.joins is not None:
            return KINDS * self.joins.index + 3
        if self.whole is not None:
            return KINDS * self.whole.index + 1 + self.half
        # Part n of level 0 is at 2n, of level 1 at 4n + 1, of level 2 at 8n + 3: each place is taken once.
        place = ((2 * self.number + 1) << self.level) - 1
        return KINDS * place

    @property
    def name(self) -> str:
        return f"{self.level}.{self.number}" if self.whole is None else f"{self.whole.name}{'ab'[self.half]}"

    @property
    def divisible(self) -> bool:
        return len(self.rows) > (2 if self.merges else 1)

    @property
    def count(self) -> int:
        return sum(row.count for row in self.rows)

    def covered(self, text: str, tokens: int) -> Piece:
        """Return the piece for the answer to this part."""
        return self._row(text, tokens, _joined(row.covers for row in self.rows), _joined(row.lost for row in self.rows))

    def lost(self, text: str, tokens: int) -> Piece:
        """Return the piece for the failure of this part."""
        return self._row(text, tokens, (), tuple(sorted(_joined((*row.covers, *row.lost) for row in self.rows))))

    def _row(self, text: str, tokens: int, covers: tuple[int, ...], lost: tuple[int, ...]) -> Piece:
        failed = _joined(row.failed for row in self.rows)
        return Piece(text, tokens, self.rows[0].first, self.rows[-1].last, covers, failed, lost)


@dataclass(slots=True)
class _Level:
    waiting: dict[int, Piece | None] = field(default_factory=dict)
    next: int = 0
    total: int | None = None
    group: list[Piece] = field(default_factory=list)
    tokens: int = 0
    closed: int = 0  # groups


class Tree:
    """The tree of a reduction: which rows are reduced together, and in what order. ``room``: the tokens that fit
    one request; None: no known limit. Each method returns the parts that can be reduced now.

    Rows arrive in any order and are grouped by index, so that groups depend only on the rows. A group is closed by the
    first row that does not fit, and can be reduced while later rows are still in progress; the answers are the rows of
    the next level. If everything fits one group there is one reduction, of all rows.
    """

    def __init__(self, shape: Shape, room: int | None) -> None:
        self._fan_in = shape if isinstance(shape, int) else None
        self._room = room if shape == "auto" else None
        self._levels = [_Level()]
        self._halves: dict[Part, dict[int, Piece]] = {}

    def add(self, index: int, row: Piece | None) -> list[Part]:
        """Add a result; None for one that is left out."""
        self._levels[0].waiting[index] = row
        return list(self._go_on(0))

    def end(self, total: int) -> list[Part]:
        """Set the total number of results, with those left out."""
        self._levels[0].total = total
        return list(self._go_on(0))

    def reduced(self, part: Part, row: Piece) -> list[Part]:
        """Set the answer to a part, or the piece that replaces it."""
        if part.whole is not None:
            return self._join(part.whole, part.half, row)
        self._above(part.level).waiting[part.number] = row
        return list(self._go_on(part.level + 1))

    def split(self, part: Part) -> list[Part]:
        """Return the halves of a part that was too long for one request; their answers are merged."""
        middle = (len(part.rows) + 1) // 2
        parts: list[Part] = []
        for half, rows in enumerate((part.rows[:middle], part.rows[middle:])):
            if part.merges and len(rows) == 1:  # already an answer
                parts += self._join(part, half, rows[0])
            else:
                parts.append(Part(part.level, part.number, rows, False, part.merges, part, half))
        return parts

    def _join(self, whole: Part, half: int, row: Piece) -> list[Part]:
        halves = self._halves.setdefault(whole, {})
        halves[half] = row
        if len(halves) < 2:
            return []
        del self._halves[whole]
        rows = (halves[0], halves[1])
        return [Part(whole.level, whole.number, rows, whole.last, True, whole.whole, whole.half, joins=whole)]

    def _above(self, level: int) -> _Level:
        if level + 1 == len(self._levels):
            self._levels.append(_Level())
        return self._levels[level + 1]

    def _go_on(self, level: int) -> Iterator[Part]:
        here = self._levels[level]
        while here.next in here.waiting:
            row = here.waiting.pop(here.next)
            here.next += 1
            if row is None:
                continue
            if here.group and not self._fits(level, row):
                yield self._close(level)
            here.group.append(row)
            here.tokens += row.tokens
        if here.next == here.total and here.group:
            yield from self._finish(level)

    def _fits(self, level: int, row: Piece) -> bool:
        here = self._levels[level]
        if self._fan_in is not None:
            return len(here.group) < self._fan_in
        # Above the results, a group of one would make no progress.
        return self._room is None or here.tokens + row.tokens <= self._room or (level > 0 and len(here.group) < 2)

    def _close(self, level: int, *, last: bool = False) -> Part:
        here = self._levels[level]
        part = Part(level, here.closed, tuple(here.group), last, merges=level > 0)
        here.group, here.tokens = [], 0
        here.closed += 1
        return part

    def _finish(self, level: int) -> Iterator[Part]:
        part = self._close(level, last=self._levels[level].closed == 0)
        if not part.last:
            self._above(level).total = part.number + 1
        if part.merges and len(part.rows) == 1:  # already an answer
            yield from self.reduced(part, part.rows[0])
        else:
            yield part


def check_shape(shape: object) -> None:
    if shape not in ("auto", "flat") and (type(shape) is not int or shape < 2):
        raise SpecError(f"reduce_tree must be auto, flat or a number of rows above 1 (got {shape!r})")


def _joined(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(parts))


FULL = 0.75  # of the room for rows: tokens are estimates
TOO_LONG = (ContextOverflow.type, Oversized.type)
PARTIAL = "These are results {first} to {last} of a longer list."
MERGE = (
    "The list was too long to be read at once: each line below is the answer for a part of it. Give one answer for all."
)
T_co = TypeVar("T_co", covariant=True)


@value_type
class Reduction(BaseResult[T_co]):
    """How a reduction ended, and what it covers: the indexes of the results that are in the answer (``covers``), of
    those that failed, and of those lost with a part that could not be reduced. ``requests`` were answered, on
    ``levels`` levels."""

    covers: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    requests: int = 0
    levels: int = 0

    __repr__ = BaseResult.__repr__


class ReduceNode:
    run: Run[Any]

    def __init__(
        self, name: str, prompt: str, shape: Shape, prepared: Prepared, channel: RowChannel[object], out: Receiver
    ) -> None:
        self.name, self.prepared = name, prepared
        self.results: list[AgentResult[Any]] = []
        self.reduction: Reduction[Any] | None = None
        self._prompt = prompt
        self._inlet = channel
        self._out = out
        self._tree = Tree(shape, room_for_rows(prompt, prepared))
        self._count = 0  # rows put
        self.failed_before = 0  # rows among them that came as failures
        self._sent: dict[int, Part] = {}  # by index
        self._highest = -1  # index that was sent
        self._requests = 0
        self._broken: AgentError | None = None  # error of the first part that could not be reduced

    # Rows in

    def put(self, item: Item) -> None:
        self._count += 1
        self.failed_before += item.error is not None
        self._send(self._tree.add(item.index, None if item.left_out else leaf(item)))

    async def room(self) -> bool:
        return await self._inlet.room()

    def close(self, why: str) -> None:
        if self.reduction is not None:
            return
        if why:
            self._fail(AgentError.of(Interrupted(why)), why)
            return
        self._send(self._tree.end(self._count))
        if not self._sent and self.reduction is None:
            self._fail(AgentError.of(InputError("there is nothing to reduce: there are no results")))

    def _send(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if any(row.covers for row in part.rows):
                # The last part is sent when all others have ended: its result comes after theirs.
                index = (self._highest // KINDS + 1) * KINDS if part.last else part.index
                self._highest = max(self._highest, index)
                self._sent[index] = part
                self._inlet.put(self._row(index, part))
            else:  # no request for a part without content
                message = f"all of results {part.rows[0].first} to {part.rows[-1].last} failed"
                self._settle(part, self._broken or AgentError.of(InputError(message)))

    def _row(self, index: int, part: Part) -> Placed:
        return Placed(index, {"id": part.name, "prompt": wording(self._prompt, part)})

    def unanswered(self, answers: Mapping[int, object]) -> list[Placed]:
        """Return the requests without a recorded answer. ``answers`` are the recorded ones as plain data, by index."""
        while answered := [index for index in self._sent if index in answers]:
            for index in answered:
                part = self._sent.pop(index)
                line = _line(_head("ok", part), output=answers[index])
                self._send([] if part.last else self._tree.reduced(part, part.covered(*line)))
        return [self._row(index, part) for index, part in self._sent.items()]

    # Answers

    def take(self, result: AgentResult[Any]) -> None:
        part = self._sent.pop(result.index)
        self._requests += 1
        self.results.append(result)
        if self.reduction is not None:
            return
        if result.error is not None:
            if result.error.type in TOO_LONG and part.divisible:
                self._send(self._tree.split(part))
            elif result.error.type != Interrupted.type:  # the end of the run is a better reason
                self._settle(part, result.error, result)
        elif part.last:
            self._finish(result, part.covered("", 0), part.level)
        else:
            self._pass_on(part, result)

    def _pass_on(self, part: Part, result: AgentResult[Any]) -> None:
        schema = self.prepared.schema
        try:
            plain = result.output if schema is None else schema.to_plain(result.output)
            line = _line(_head("ok", part), output=plain)
        except Exception as error:  # the user's own serializers may raise anything  # noqa: BLE001
            self._settle(part, _unwritable(error), result)
        else:
            self._send(self._tree.reduced(part, part.covered(*line)))

    def _settle(self, part: Part, error: AgentError, result: AgentResult[Any] | None = None) -> None:
        """Handle a part without an answer."""
        row = part.lost(*_line(_head("error", part), error=_told(error)))
        if result is not None:
            self._broken = self._broken or error
        if part.last:
            failed = Failure(0, part.name, None, False, None, error)
            self._finish(result or failed, row, part.level)
        else:
            self._send(self._tree.reduced(part, row))

    def end(self) -> None:
        if self.reduction is None:
            why = undone(self.name, self.run.statistics())
            self._fail(AgentError.of(Interrupted(why)), why)

    def fail(self, error: BatchAgentError) -> None:
        """Fail the reduction. The results that were to be reduced are kept."""
        if isinstance(error, InternalError):
            raise error
        if self.reduction is None:
            self._fail(error_of(error))

    def _fail(self, error: AgentError, why: str = "") -> None:
        self._finish(Failure(0, "", None, False, None, error), Piece("", 0, 0, 0), 0, why)

    def _finish(self, result: AgentResult[Any], row: Piece, level: int, why: str = "") -> None:
        known = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        about = {"covers": row.covers, "failed": row.failed, "lost": row.lost}
        known |= {"index": 0, **about, "requests": self._requests, "levels": level + 1}
        self.reduction = Reduction(**known)
        self._out.put(Item(0, result.output, result.error))
        self._inlet.close()
        self._out.close(why)


def room_for_rows(prompt: str, prepared: Prepared) -> int | None:
    """Return how many tokens of rows fit one request; None if the model's context is unknown. Raises SpecError if
    nothing would fit."""
    spec = prepared.spec
    if spec.model_max_context is None:
        return None
    answer = max(spec.min_response_tokens, spec.max_tokens or 0)
    words = prepared.plan.prefix_tokens + estimate_tokens(prompt + PARTIAL + MERGE)
    room = int((spec.model_max_context - answer - words) * FULL)
    if room <= 0:
        raise SpecError(
            f"reduce: the prompt (about {words:,} tokens) and the answer ({answer:,}) leave no room for results in "
            f"model_max_context {spec.model_max_context:,}"
        )
    return room


def wording(prompt: str, part: Part) -> str:
    """Return the request for a part. Only ``{n}`` is filled; every other brace is text."""
    words = [prompt.replace("{n}", str(part.count))]
    if part.merges:
        words.append(MERGE)
    elif not part.last:
        words.append(PARTIAL.format(first=part.rows[0].first, last=part.rows[-1].last))
    return "\n\n".join([*words, "\n".join(row.text for row in part.rows)])


def leaf(item: Item) -> Piece:
    """Return a result in the form in which the reducer reads it."""
    index = item.index
    if item.error is None:
        try:
            return Piece(*_line(_told_row("ok", item), output=item.value), index, index, covers=(index,))
        except Exception as error:  # the user's own classes may raise anything  # noqa: BLE001
            item = dataclasses.replace(item, error=_unwritable(error))
    assert item.error is not None
    line = _line(_told_row("error", item), error=_told(item.error))
    return Piece(*line, index, index, failed=(index,))


def _told_row(status: str, item: Item) -> dict[str, object]:
    carried = {"carried": item.carried} if item.carried else {}
    return {"status": status, "index": item.index, **carried}


def _head(status: str, part: Part) -> dict[str, object]:
    return {"status": status, "index": part.number, "results": [part.rows[0].first, part.rows[-1].last]}


def _told(error: AgentError) -> dict[str, str]:
    return {"type": error.type, "message": error.message}


def _unwritable(error: Exception) -> AgentError:
    return AgentError.of(Invalid(f"the output cannot be written as JSON: {describe(error)}"))


def _line(head: dict[str, object], **more: object) -> tuple[str, int]:
    text = to_json(head | more).decode()
    return text, estimate_tokens(text) + 1
