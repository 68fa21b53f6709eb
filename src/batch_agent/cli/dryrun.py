"""``--dry-run``: what a run would do and send, shown before anything is sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import cast

from batch_agent.cli.rows import LargeFile
from batch_agent.compiler.plan import Description
from batch_agent.engine.prepare import Prepared
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, harmless, harmless_lines

SAMPLE_ROWS = 100  # enough for a mean, little enough to be quick


@dataclass(frozen=True, slots=True)
class DryRun:
    prepared: Prepared
    description: Description
    sampled: int
    rows: int | None
    rows_exact: bool

    @classmethod
    def of(cls, prepared: Prepared) -> DryRun:
        inputs = prepared.spec.inputs
        sample = _sample(inputs)
        rows, exact = prepared.plan.total, True
        if isinstance(inputs, LargeFile):
            rows, exact = inputs.expected_rows(), False
            inputs.close()
        return cls(prepared, prepared.plan.describe(sample), len(sample), rows, exact)

    @property
    def prompt_tokens(self) -> int | None:
        """Of all first requests together, nothing cached."""
        each = self.description.prefix_tokens + self.description.own_tokens
        return None if self.rows is None else self.rows * each

    @property
    def uncached_tokens(self) -> int | None:
        """The same when the shared prefix is computed once."""
        if self.rows is None:
            return None
        return self.description.prefix_tokens + self.rows * self.description.own_tokens

    def to_json(self) -> JsonObject:
        prepared, description = self.prepared, self.description
        return {
            "rows": self.rows,
            "rows_exact": self.rows_exact,
            "model": prepared.model,
            "backend": prepared.backend.name,
            "max_inflight": prepared.max_inflight,
            "max_turns": prepared.spec.turn_limit,
            "tools": [tool.spec.name for tool in prepared.tools],
            "output_schema": prepared.schema.name if prepared.schema else None,
            "hoisted": list(description.hoisted),
            "estimated_tokens": {
                "shared_prefix": description.prefix_tokens,
                "own_per_row": description.own_tokens,
                "first_requests": self.prompt_tokens,
                "first_requests_prefix_cached": self.uncached_tokens,
            },
            "system": description.system,
            "first_prompt": description.first_prompt,
            "sampled": self.sampled,
            "unusable": list(description.unusable),
        }

    def to_text(self) -> str:
        lines = [f"  {label:<15} {harmless(text)}" for label, text in self._facts()]
        parts = ["\n".join(["Plan. Nothing was sent; token counts are estimates.", "", *lines])]
        if self.description.system:
            parts.append(_headed("System prompt, the same for every row", self.description.system))
        if self.description.first_prompt:
            parts.append(_headed("First message", self.description.first_prompt))
        if self.description.unusable:
            title = f"Of the first {self.sampled:,} rows these fail before any request"
            parts.append(_headed(title, "\n".join(map(harmless, self.description.unusable))))
        return "\n\n".join(parts)

    def _facts(self) -> Iterable[tuple[str, str]]:
        prepared, description = self.prepared, self.description
        yield "rows", self._rows_text()
        yield "model", prepared.model or "the one the server has"
        yield "backend", prepared.backend.name
        yield "in flight", "no limit" if prepared.max_inflight is None else f"{prepared.max_inflight:,} model calls"
        turns = prepared.spec.turn_limit
        yield "turns", "no limit" if turns is None else f"at most {turns:,} per agent"
        if prepared.tools:
            yield "tools", ", ".join(tool.spec.name for tool in prepared.tools)
        if prepared.schema is not None:
            how = "described in the system prompt" if prepared.shapes.schema_in_prompt else "kept by the server"
            yield "output schema", f"{prepared.schema.name}, {how}"
        if description.hoisted:
            yield "hoisted", f"{', '.join(description.hoisted)}: the same in every row, moved to the system prompt"
        yield "shared prefix", f"{description.prefix_tokens:,} tokens"
        yield "own per row", f"{description.own_tokens:,} tokens, the mean of {self.sampled:,} rows"
        if self.prompt_tokens is not None and self.uncached_tokens is not None:
            cached = f"{amount(self.uncached_tokens)} with the prefix cached"
            yield "first requests", f"{amount(self.prompt_tokens)} tokens in all, {cached}"

    def _rows_text(self) -> str:
        if self.rows is None:
            return "unknown until they are read"
        return f"{self.rows:,}" if self.rows_exact else f"about {self.rows:,}, by the size of the file"


def _sample(inputs: object) -> list[object]:
    if isinstance(inputs, AsyncIterable):
        return asyncio.run(_first_of(inputs))
    return list(itertools.islice(cast("Iterable[object]", inputs), SAMPLE_ROWS))


async def _first_of(inputs: AsyncIterable[object]) -> list[object]:
    sample: list[object] = []
    async for value in inputs:
        sample.append(value)
        if len(sample) == SAMPLE_ROWS:
            break
    return sample


def _headed(title: str, text: str) -> str:
    return f"{title}\n{'-' * len(title)}\n{harmless_lines(text)}"
