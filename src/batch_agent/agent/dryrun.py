"""Shows what a run would do and send, before anything is sent: ``--dry-run``, and a printed plan."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO, cast

from pydantic import JsonValue

from batch_agent.agent.cascade import Cascade
from batch_agent.agent.prepare import Prepared
from batch_agent.compiler.plan import Description
from batch_agent.compiler.prices import Prices
from batch_agent.compiler.template import Piece
from batch_agent.compiler.tokens import estimate_tokens, size_bytes
from batch_agent.errors import JobError
from batch_agent.files.inputs import rows_again
from batch_agent.files.read import LazyRows
from batch_agent.foreign import name_of
from batch_agent.messages import JsonObject, Usage
from batch_agent.money import limit_dollars
from batch_agent.observe.text import amount, dollars, harmless, harmless_lines, rows
from batch_agent.scheduler.budget import FIRST_ANSWER_TOKENS, TEMPLATE_TOKENS, UNKNOWN_TEMPLATE_TOKENS
from batch_agent.trust.votes import Voting

if TYPE_CHECKING:
    from batch_agent.agent.comparison import Comparison

HEADLINE = "Plan. Nothing was sent; token counts are estimates."
SAMPLE_ROWS = 100  # enough for a mean, few enough to be quick
READ_DOCUMENTS = 5  # of a sample: reading one takes at least a tenth of a second
SHOWN_CHARACTERS = 4_000  # of the system prompt, and of each field of the first message
REPAIR_BYTES = 4_096  # around the parts of a message that asks for another answer
WORTH_MOVING = 64  # tokens; fewer are not worth advice
# Guesses for an agent with tools, of which only the run knows how many turns it takes: one turn with a call, and one
# more with the whole conversation.
CALL_TOKENS, RESULT_TOKENS = 64, 256
MANY_TOKENS = 128_000  # in a message; most models do not accept more
STYLED = ("\x1b[1;36m", "\x1b[0m")  # around filled-in values, on a terminal
MARKED = ("«", "»")  # the same elsewhere


@dataclass(frozen=True, slots=True)
class DryRun:
    prepared: Prepared
    description: Description
    sampled: int
    rows: int | None
    rows_exact: bool
    rows_note: str = ""  # replaces the usual text about the number of rows
    own_note: str = ""  # replaces the usual text about the tokens of a row

    @classmethod
    def of(cls, prepared: Prepared) -> DryRun:
        """Return the dry run of a batch that will not be run: the first rows are read from the inputs."""
        return cls._of(prepared, sample_of(prepared.spec.inputs))

    @classmethod
    def untouched(cls, prepared: Prepared) -> DryRun:
        """Return the dry run of a batch that may still be run: inputs that can be read only once are not read."""
        return cls._of(prepared, _at_hand(prepared.spec.inputs))

    @classmethod
    def _of(cls, prepared: Prepared, sample: Sequence[object]) -> DryRun:
        inputs = prepared.spec.inputs
        if sample and prepared.plan.reads(sample[0]):
            sample = sample[:READ_DOCUMENTS]
        rows, exact = prepared.plan.total, True
        if isinstance(inputs, LazyRows):
            rows, exact = inputs.expected_rows(), False
        return cls(prepared, prepared.plan.describe(sample), len(sample), rows, exact)

    @property
    def agents(self) -> int | None:
        """The number of first requests: one for each sample of each row. A vote may need fewer."""
        return None if self.rows is None else self.rows * self.prepared.spec.samples

    @property
    def schema_tokens(self) -> int:
        """Tokens of an output schema that is sent beside the messages, which many servers count."""
        prepared = self.prepared
        if prepared.schema is None or prepared.shapes.schema_in_prompt:
            return 0
        return estimate_tokens(prepared.schema.json_text)

    @property
    def prefix_tokens(self) -> int:
        """Tokens that all requests begin with: tools, schema, system prompt, the task up to its first field."""
        return self.description.prefix_tokens + self.schema_tokens

    @property
    def has_later_turns(self) -> bool:
        """Whether a row with tools needs a second turn, after a call. The requests of a worker are unknown."""
        spec = self.prepared.spec
        return bool(self.prepared.tools) and spec.worker is None and spec.turn_limit != 1

    @property
    def row_tokens(self) -> int:
        """Tokens of all prompts of an agent, with nothing cached."""
        first = self.prefix_tokens + self.description.own_tokens
        return 2 * first + CALL_TOKENS + RESULT_TOKENS if self.has_later_turns else first

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all first requests together, with nothing cached."""
        each = self.prefix_tokens + self.description.own_tokens
        return self.agents * each if self.agents is not None and self.sampled else None

    @property
    def all_tokens(self) -> int | None:
        """Tokens of all requests together, with nothing cached."""
        return self.agents * self.row_tokens if self.agents is not None and self.sampled else None

    @property
    def uncached_tokens(self) -> int | None:
        """The tokens of all requests if the shared prefix and each conversation are computed only once; None if the
        number of rows is unknown."""
        if self.agents is None or not self.sampled:
            return None
        later = CALL_TOKENS + RESULT_TOKENS if self.has_later_turns else 0
        return self.prefix_tokens + self.agents * (self.description.own_tokens + later)

    @property
    def cost(self) -> tuple[float, float] | None:
        """$ of all requests and their answers: with the shared prefix cached, and with nothing cached."""
        return None if self.prepared.prices is None else self.cost_at(self.prepared.prices)

    def cost_at(self, prices: Prices) -> tuple[float, float] | None:
        """Return what ``cost`` is at these prices. None if they are per hour, or if the number of rows is unknown."""
        agents = self.agents
        if not prices.tiers or agents is None or not self.sampled:
            return None
        first = self.prefix_tokens + self.description.own_tokens
        turns = [Usage(first, cached_tokens=self.prefix_tokens, completion_tokens=self.answer_tokens)]
        if self.has_later_turns:
            called = replace(turns[0], completion_tokens=CALL_TOKENS)
            turns = [called, replace(turns[0], prompt_tokens=self.row_tokens - first, cached_tokens=first)]
        cached = sum(map(prices.cost, turns))
        return agents * cached, agents * sum(prices.cost(replace(turn, cached_tokens=0)) for turn in turns)

    @property
    def answer_tokens(self) -> int:
        return self.prepared.spec.max_tokens or FIRST_ANSWER_TOKENS

    def _cost_basis(self) -> str:
        prices, spec = self.prepared.prices, self.prepared.spec
        if prices is None:
            return "no price is known; give prices, or install genai-prices for public providers"
        if not prices.tiers:
            return f"by the clock: {prices.source}"
        answers = "max_tokens" if spec.max_tokens else "a guess: max_tokens would bound it"
        turns = "" if spec.turn_limit == 1 else "; further turns come on top"
        requests = (
            "first requests" if not self.has_later_turns else "two turns per row (a guess: the first calls a tool)"
        )
        voting = self.prepared.voting
        samples = "" if voting is None else ", all samples" + (", of which votes need fewer" if voting.stops else "")
        return (
            f"{requests}{samples} by estimated tokens, from prefix cached to nothing cached, "
            f"answers of {self.answer_tokens:,} tokens ({answers}), {prices.source}{turns}"
        )

    def compare(
        self, *, only: str = "", gpu_price: float | None = None, tokens_per_second: float | None = None
    ) -> Comparison:
        """Return the estimated cost at each provider and model with a known price."""
        from batch_agent.agent.comparison import Comparison

        return Comparison.of([self], only=only, gpu_price=gpu_price, gpu_speed=tokens_per_second)

    def to_json(self) -> JsonObject:
        prepared, description = self.prepared, self.description
        return {
            "rows": self.rows,
            "rows_exact": self.rows_exact,
            "model": prepared.model,
            "backend": prepared.backend.name,
            "max_inflight": None if prepared.sought else prepared.max_inflight,
            "max_turns": prepared.spec.turn_limit,
            **({} if prepared.cascade is None else {"cascade": self._cascade(prepared.cascade)}),
            "samples": prepared.spec.samples,
            "samples_at_once": 1 if prepared.voting is None else prepared.voting.needed([]),
            "worker": None if prepared.spec.worker is None else name_of(prepared.spec.worker),
            "tools": [tool.spec.name for tool in prepared.tools],
            "output_schema": prepared.schema.name if prepared.schema else None,
            "hoisted": list(description.hoisted),
            "estimated_tokens": {
                "shared_prefix": self.prefix_tokens,
                "tools": prepared.plan.tool_tokens,
                "schema": self.schema_tokens,
                "own_per_row": description.own_tokens,
                "first_requests": self.prompt_tokens,
                "first_requests_prefix_cached": self._first_uncached,
                "all_requests": self.all_tokens,
                "all_requests_prefix_cached": self.uncached_tokens,
                "same_behind_a_field": description.late_tokens,
            },
            "estimated_cost": {
                "prefix_cached": self.cost[0] if self.cost else None,
                "nothing_cached": self.cost[1] if self.cost else None,
                "how": self._cost_basis(),
            },
            "system": description.system,
            "first_prompt": description.first_prompt,
            "first_prompt_pieces": [{"text": text, "filled": filled} for text, filled in description.first_pieces],
            "warning": description.warning,
            "sampled": self.sampled,
            "unusable": list(description.unusable),
        }

    def to_text(self, marks: tuple[str, str] = MARKED) -> str:
        """Return the plan as text. ``marks`` go around the values filled into the first message."""
        return f"{HEADLINE}\n\n{self.body(marks)}"

    def body(self, marks: tuple[str, str] = MARKED) -> str:
        """Return the plan as text, without the headline."""
        parts = ["\n".join(f"  {label:<15} {harmless(text)}" for label, text in self._facts())]
        if self.description.system:
            system = harmless_lines(_shortened(self.description.system))
            parts.append(_headed("System prompt, the same for every row", system))
        if self.description.first_prompt:
            how = "in colour" if marks == STYLED else f"between {marks[0]} and {marks[1]}"
            title = f"First message; the values of its row are {how}"
            parts.append(_headed(title, _marked(self.description.first_pieces, marks)))
        if self.description.unusable:
            title = f"Among the first {self.sampled:,} rows, these fail before any request"
            parts.append(_headed(title, "\n".join(map(harmless, self.description.unusable))))
        return "\n\n".join(parts)

    def _facts(self) -> Iterable[tuple[str, str]]:
        prepared, description = self.prepared, self.description
        yield "rows", self._rows_text()
        yield "model", prepared.model or "the one the server has"
        yield "backend", prepared.backend.name
        yield from _standbys(prepared)
        yield "in flight", _in_flight(prepared)
        if prepared.cascade is not None:
            yield from self._entries(prepared.cascade)
        worker = prepared.spec.worker
        if worker is not None:
            yield "worker", f"{name_of(worker)}: its requests are not known before the run"
        turns = prepared.spec.turn_limit if worker is None else prepared.spec.max_turns
        yield "turns", "no limit" if turns is None else f"at most {turns:,} per agent"
        if prepared.voting is not None:
            yield "samples", self._samples(prepared.voting)
        if prepared.doubted is not None:
            known = prepared.shapes.first.logprobs
            yield "doubt", "from log-probabilities, if the server reports them" if known else "from votes"
        if prepared.tools:
            yield "tools", ", ".join(tool.spec.name for tool in prepared.tools)
        if prepared.schema is not None:
            how = "described in the system prompt" if prepared.shapes.schema_in_prompt else "enforced by the server"
            yield "output schema", f"{prepared.schema.name}, {how}"
        if description.hoisted:
            yield "hoisted", f"{', '.join(description.hoisted)}: the same in every row, moved to the system prompt"
        yield "shared prefix", f"{self.prefix_tokens:,} tokens{self._prefix_parts()}"
        if self.sampled:
            how = self.own_note or f"the mean of {rows(self.sampled)}"
            yield "own per row", f"{description.own_tokens:,} tokens, {how}"
        if self.prompt_tokens is not None and self._first_uncached is not None:
            cached = f"{amount(self._first_uncached)} with the prefix cached"
            yield "first requests", f"{amount(self.prompt_tokens)} tokens in all, {cached}"
        if self.has_later_turns and self.all_tokens is not None and self.uncached_tokens is not None:
            cached = f"{amount(self.uncached_tokens)} with conversations cached"
            guess = f"a guess: each row calls a tool once, for a result of {RESULT_TOKENS} tokens"
            yield "all requests", f"{amount(self.all_tokens)} tokens, {cached}; {guess}"
        span = " to ".join(dict.fromkeys(map(dollars, self.cost or ())))
        yield "cost", f"{span}: {self._cost_basis()}" if span else self._cost_basis()
        if (pilot := prepared.spec.pilot) is not None:
            yield "pilot", f"{rows(pilot)} go first, a random sample; the others follow when you say so"
        if limits := self._limits():
            yield "ends at", limits
        if description.late_tokens >= WORTH_MOVING and self.rows is not None and self.rows > 1:
            text = f"{description.late_tokens:,} tokens of the task are the same in all rows, but come after a field"
            saved = amount((self.rows - 1) * description.late_tokens)
            yield "advice", f"{text}: before the first field they are computed once, which saves {saved} tokens"
        if description.warning:
            yield "warning", description.warning
        tokens = estimate_tokens(description.first_prompt)
        context = prepared.spec.model_max_context
        if tokens > MANY_TOKENS and context is None:
            size = f"{len(description.first_prompt):,} characters, about {tokens:,} tokens"
            advice = "give model_max_context, and oversized='chunk' for rows that do not fit"
            yield "warning", f"the first message has {size}, which is more than most models read: {advice}"

    def _entries(self, cascade: Cascade) -> Iterable[tuple[str, str]]:
        names = [*cascade.names(self.prepared), *(["people"] if cascade.people else ())]
        yield "cascade", f"{' → '.join(names)}; to the next entry: {cascade.rule.text}"
        for entry in cascade.later:
            each = DryRun.untouched(entry.prepared)
            most = "" if each.cost is None else f", {dollars(each.cost[1])} if all rows come to it"
            yield "then", f"{entry.prepared.model or 'the one the server has'} at {entry.prepared.backend.name}{most}"

    def _cascade(self, cascade: Cascade) -> JsonObject:
        later = [DryRun.untouched(entry.prepared) for entry in cascade.later]
        costs: list[JsonValue] = [None if each.cost is None else each.cost[1] for each in later]
        names: list[JsonValue] = [*cascade.names(self.prepared)]
        escalate: JsonObject = {"entries": names, "people": cascade.people, "escalate": cascade.rule.text}
        return escalate | {"most_cost_of_later": costs}

    def _samples(self, voting: Voting) -> str:
        voted = ", ".join(rule.field.name for rule in voting.rules)
        if not voting.stops:
            how = "all sent at once, because a batch API answers late"
        elif (first := voting.needed([])) < voting.samples:
            how = f"{first} at once, the others only where those do not decide"
        else:
            how = "all at once, because the vote needs all"
        return f"{voting.samples} of each row, {how}; voted: {voted}"

    @property
    def _first_uncached(self) -> int | None:
        """The tokens of all first requests if the shared prefix is computed only once; None if the number of rows is
        unknown."""
        if self.agents is None or not self.sampled:
            return None
        return self.prefix_tokens + self.agents * self.description.own_tokens

    def _prefix_parts(self) -> str:
        parts = [(self.prepared.plan.tool_tokens, "tools"), (self.schema_tokens, "the schema")]
        known = [f"{tokens:,} of {what}" for tokens, what in parts if tokens]
        return f", {' and '.join(known)} among them" if known else ""

    def _limits(self) -> str:
        spec = self.prepared.spec
        limits = [limit_dollars(spec.max_cost)] if spec.max_cost is not None else []
        limits += [f"{spec.max_total_tokens:,} tokens"] if spec.max_total_tokens is not None else []
        limits += [f"{spec.max_wall_time:g} s"] if spec.max_wall_time is not None else []
        return ", ".join(limits)

    def _rows_text(self) -> str:
        if self.rows_note:
            return self.rows_note
        if self.rows is None:
            return "unknown until they are read"
        return f"{self.rows:,}" if self.rows_exact else f"about {self.rows:,}, by the size of the file"


def sample_of(inputs: object) -> list[object]:
    """Return the first inputs. An iterator is consumed."""
    if isinstance(inputs, AsyncIterable):
        return asyncio.run(_first_of(inputs))
    sample = list(itertools.islice(cast("Iterable[object]", inputs), SAMPLE_ROWS))
    if isinstance(inputs, LazyRows):
        inputs.close()
    return sample


def _at_hand(inputs: object) -> Sequence[object]:
    if isinstance(inputs, LazyRows):
        return inputs.first
    return () if isinstance(inputs, AsyncIterable | Iterator) else sample_of(inputs)


async def _first_of(inputs: AsyncIterable[object]) -> list[object]:
    sample: list[object] = []
    async for value in inputs:
        sample.append(value)
        if len(sample) == SAMPLE_ROWS:
            break
    return sample


def marks_for(stream: TextIO) -> tuple[str, str]:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return STYLED if stream.isatty() and not plain else MARKED


def _marked(pieces: Iterable[Piece], marks: tuple[str, str]) -> str:
    shown = ((harmless_lines(_shortened(text)), filled) for text, filled in pieces)
    return "".join(text.join(marks) if filled else text for text, filled in shown)


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    head, tail = text[: SHOWN_CHARACTERS * 3 // 4], text[-SHOWN_CHARACTERS // 4 :]
    return f"{head} [… {len(text) - len(head) - len(tail):,} characters more …] {tail}"


def _headed(title: str, text: str) -> str:
    return f"{title}\n{'-' * len(title)}\n{text}"


def _standbys(prepared: Prepared) -> Iterable[tuple[str, str]]:
    for name, standby in prepared.backend.standbys.items():
        price = "price unknown" if standby.prices is None else standby.prices.source
        yield "standby", f"{standby.model} at {name} while all other servers are down; {price}"


def _in_flight(prepared: Prepared) -> str:
    if prepared.sought:
        return "the number of model calls is found during the run"
    return "no limit" if prepared.max_inflight is None else f"{prepared.max_inflight:,} model calls"


def most_cost(prepared: Prepared, least: int | None = None) -> float | None:
    """Return the highest possible cost in $ of the answers to all rows, if each row takes all of its turns, all repairs
    and ``max_tokens``. None if nothing bounds it.

    A token has at least one byte. ``least``: tokens of the shortest prompt that the server has counted; its template
    has no more. With tools, or with pictures and files, only the context of the model bounds a prompt. Reads all
    inputs, so it may take long.
    """
    spec = prepared.spec
    prices = prepared.prices
    inputs = prepared.spec.inputs
    turns = spec.turn_limit
    answer = spec.max_tokens
    context = spec.model_max_context
    known = prices is not None and prices.tiers and turns is not None and spec.worker is None
    if not known or prices is None or turns is None or spec.oversized != "fail" or isinstance(inputs, AsyncIterable):
        return None
    requests = spec.samples * (turns + (spec.max_retries if prepared.schema is not None else 0))
    if context is not None:
        whole = Usage(context, completion_tokens=min(answer or context, context))
        return requests * prices.most(whole) * (prepared.plan.total or 0)
    if answer is None or prepared.tools:
        return None
    schema = 0 if prepared.schema is None else size_bytes(prepared.schema.json_text)
    template = UNKNOWN_TEMPLATE_TOKENS if least is None else min(least, UNKNOWN_TEMPLATE_TOKENS)
    around = size_bytes(prepared.plan.own_system) + max(TEMPLATE_TOKENS, template) + schema
    repair = answer * 2 + schema + REPAIR_BYTES  # the answer that did not fit, and the message that quotes it
    cost = 0.0
    for value in rows_again(inputs):
        if prepared.plan.shows(value):
            return None
        try:
            prompt = around + size_bytes(prepared.plan.asks(value)[1])
        except JobError:  # the row fails before a request is sent
            continue
        each = requests // spec.samples
        sizes = (Usage(prompt + number * repair, completion_tokens=answer) for number in range(each))
        cost += spec.samples * sum(map(prices.most, sizes))
    return cost
