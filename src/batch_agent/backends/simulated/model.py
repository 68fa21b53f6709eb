"""EngineModel: the parameters of a simulated engine, and how a URL sets them.

Every field can be measured on a real engine or read in its log. The defaults are round numbers in the range of a
7-billion-parameter model on one large GPU; they are not measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import TypeAdapter, ValidationError
from typing_extensions import Doc

from batch_agent.backends.address import check_known
from batch_agent.errors import SpecError

POLICIES = ("fcfs", "priority")
SHORT_NAMES = {"prefill": "prefill_tokens_per_second", "decode": "step_seconds", "kv": "kv_tokens"}


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A step that computes P prompt tokens and decodes S sequences takes
    ``step_seconds + S * sequence_seconds + P / prefill_tokens_per_second``, and ``prefill_step_seconds`` more if P is
    not 0: engines have faster kernels for steps that only decode."""

    prefill_tokens_per_second: Annotated[
        float, Doc("tokens/s of prompt not found in the cache; inf: prefill is free")
    ] = 20_000.0
    step_seconds: Annotated[float, Doc("seconds that any step takes")] = 0.008
    sequence_seconds: Annotated[float, Doc("seconds that each decoding sequence adds to a step")] = 0.0001
    prefill_step_seconds: Annotated[float, Doc("seconds that a step takes longer if it computes prompt tokens")] = 0.0
    max_num_seqs: Annotated[int, Doc("sequences running at once")] = 256
    max_batched_tokens: Annotated[int, Doc("tokens one step computes; longer prompts are prefilled in chunks")] = 8_192
    kv_tokens: Annotated[int, Doc("tokens the KV cache holds; rounded down to whole blocks")] = 131_072
    offload_tokens: Annotated[int, Doc("tokens a slower memory keeps of what the cache evicts; 0: there is none")] = 0
    offload_tokens_per_second: Annotated[float, Doc("tokens/s that are loaded from there")] = 200_000.0
    block_size: Annotated[int, Doc("tokens per block; only full blocks are found again")] = 16
    prefix_caching: Annotated[bool, Doc("keep finished requests' blocks and find them again")] = True
    context_tokens: Annotated[int, Doc("prompt and answer of one request; more is refused with 400")] = 32_768
    max_queued: Annotated[int | None, Doc("requests waiting; one more is refused with 503. None: no limit")] = None
    reading_seconds: Annotated[float, Doc("age that a reading of the engine's metrics may have; 0: never late")] = 2.0
    first_reading_seconds: Annotated[float, Doc("seconds after the first request in which metrics stay at 0")] = 18.0
    policy: Annotated[Literal["fcfs", "priority"], Doc("priority: requests with a lower number run first")] = "fcfs"
    answer_tokens: Annotated[int, Doc("length of a plain text answer, unless max_tokens is smaller")] = 64
    tool_calls_per_agent: Annotated[int, Doc("turns in which an agent that has tools calls one before it answers")] = 1
    seed: Annotated[int, Doc("another seed gives other texts, tool choices and arguments")] = 0
    name: Annotated[str, Doc("the model's name on the wire")] = "simulated"

    def __post_init__(self) -> None:
        times = ("step_seconds", "sequence_seconds", "prefill_step_seconds", "reading_seconds", "first_reading_seconds")
        for field in times:
            if not (0 <= getattr(self, field) < math.inf):
                raise SpecError(f"{field} must be 0 or more seconds, not {getattr(self, field)}")
        for field in ("prefill_tokens_per_second", "offload_tokens_per_second"):
            if not getattr(self, field) > 0:
                raise SpecError(f"{field} must be above 0, not {getattr(self, field)}")
        if self.offload_tokens < 0:
            raise SpecError(f"offload_tokens must be 0 or more, not {self.offload_tokens}")
        for field in ("max_num_seqs", "max_batched_tokens", "block_size", "context_tokens", "answer_tokens"):
            if getattr(self, field) < 1:
                raise SpecError(f"{field} must be 1 or more, not {getattr(self, field)}")
        if self.tool_calls_per_agent < 0 or (self.max_queued is not None and self.max_queued < 0):
            raise SpecError("tool_calls_per_agent and max_queued must be 0 or more")
        if self.policy not in POLICIES:
            raise SpecError(f"policy must be fcfs or priority, not {self.policy!r}")
        if self.blocks * self.block_size < self.context_tokens:
            # Such a request could neither run nor finish; real engines also refuse to start.
            raise SpecError(
                f"kv_tokens={self.kv_tokens} holds {self.blocks * self.block_size} tokens in whole blocks, less than "
                f"one request of context_tokens={self.context_tokens}: raise kv_tokens or lower context_tokens"
            )

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block_size

    @classmethod
    def instant(cls) -> Self:
        """Return an engine that takes no time: what remains is the caller's own cost."""
        return cls(prefill_tokens_per_second=math.inf, step_seconds=0.0, sequence_seconds=0.0)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create the model from ``simulated://?prefill=20000&decode=0.008&kv=65536&…``: any field by its name, three by
        a short name; ``simulated://instant`` takes no time."""
        parts = urlsplit(url)
        if parts.netloc not in ("", "instant") or parts.path.strip("/"):
            raise SpecError(f"a simulated engine has no host: write simulated:// or simulated://instant, not {url!r}")
        options = {SHORT_NAMES.get(key, key): value for key, value in parse_qsl(parts.query, keep_blank_values=True)}
        check_known(options, [*SHORT_NAMES, *(field.name for field in fields(cls))], "a simulated engine has no")
        base = cls.instant() if parts.netloc else cls()
        try:
            return TypeAdapter(cls).validate_python(asdict(base) | options)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise SpecError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None
