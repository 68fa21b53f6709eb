"""EngineModel: the numbers that a simulated engine is made of, and how a URL spells them.

Every field is one the person who plans a run can measure on a real engine or read in its log. The defaults are round
numbers in the range of a 7-billion-parameter model on one large GPU; they are nobody's measurement.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, fields
from typing import Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import TypeAdapter, ValidationError

from batch_agent.errors import SpecError

POLICIES = ("fcfs", "priority")
SHORT_NAMES = {"prefill": "prefill_tokens_per_second", "decode": "step_seconds", "kv": "kv_tokens"}


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A step that computes P prompt tokens and decodes S sequences takes
    ``step_seconds + S * sequence_seconds + P / prefill_tokens_per_second``."""

    prefill_tokens_per_second: float = 20_000.0  # tokens/s of prompt not found in the cache; inf: prefill is free
    step_seconds: float = 0.008  # seconds that any step takes
    sequence_seconds: float = 0.0001  # seconds that each decoding sequence adds to a step
    max_num_seqs: int = 256  # sequences running at once
    max_batched_tokens: int = 8_192  # tokens one step computes; longer prompts are prefilled in chunks
    kv_tokens: int = 131_072  # tokens the KV cache holds; rounded down to whole blocks
    block_size: int = 16  # tokens per block; only full blocks are found again
    prefix_caching: bool = True
    context_tokens: int = 32_768  # prompt and answer of one request; more is refused with 400
    max_queued: int | None = None  # requests waiting; one more is refused with 503. None: no limit
    policy: Literal["fcfs", "priority"] = "fcfs"  # priority: the lower number of a request goes sooner
    answer_tokens: int = 64  # length of a plain text answer, unless max_tokens is smaller
    tool_calls_per_agent: int = 1  # turns in which an agent that has tools calls one before it answers
    seed: int = 0  # another seed gives other texts, tool choices and arguments
    name: str = "simulated"  # the model's name on the wire

    def __post_init__(self) -> None:
        for field in ("step_seconds", "sequence_seconds"):
            if not (0 <= getattr(self, field) < math.inf):
                raise SpecError(f"{field} must be 0 or more seconds, not {getattr(self, field)}")
        if not self.prefill_tokens_per_second > 0:
            raise SpecError(f"prefill_tokens_per_second must be above 0, not {self.prefill_tokens_per_second}")
        for field in ("max_num_seqs", "max_batched_tokens", "block_size", "context_tokens", "answer_tokens"):
            if getattr(self, field) < 1:
                raise SpecError(f"{field} must be 1 or more, not {getattr(self, field)}")
        if self.tool_calls_per_agent < 0 or (self.max_queued is not None and self.max_queued < 0):
            raise SpecError("tool_calls_per_agent and max_queued must be 0 or more")
        if self.policy not in POLICIES:
            raise SpecError(f"policy must be fcfs or priority, not {self.policy!r}")
        if self.blocks * self.block_size < self.context_tokens:
            # Such a request could neither run nor finish; real engines refuse to start as well.
            raise SpecError(
                f"kv_tokens={self.kv_tokens} holds {self.blocks * self.block_size} tokens in whole blocks, less than "
                f"one request of context_tokens={self.context_tokens}: raise kv_tokens or lower context_tokens"
            )

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block_size

    @classmethod
    def instant(cls) -> Self:
        """An engine that takes no time at all: what is left is what the caller itself costs."""
        return cls(prefill_tokens_per_second=math.inf, step_seconds=0.0, sequence_seconds=0.0)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``simulated://?prefill=20000&decode=0.008&kv=65536&…``: any field by its name, three by a short one;
        ``simulated://instant`` takes no time."""
        parts = urlsplit(url)
        if parts.netloc not in ("", "instant") or parts.path.strip("/"):
            raise SpecError(f"a simulated engine is nowhere: write simulated:// or simulated://instant, not {url!r}")
        options = {SHORT_NAMES.get(key, key): value for key, value in parse_qsl(parts.query, keep_blank_values=True)}
        names = [field.name for field in fields(cls)]
        for name in options.keys() - set(names):
            near = difflib.get_close_matches(name, [*names, *SHORT_NAMES], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". There are: {', '.join([*SHORT_NAMES, *names])}"
            raise SpecError(f"a simulated engine has no {name!r}{hint}")
        base = cls.instant() if parts.netloc else cls()
        try:
            return TypeAdapter(cls).validate_python(asdict(base) | options)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise SpecError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None
