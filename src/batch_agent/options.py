"""The options of BatchSpec as keywords, for type checkers. A test compares the two."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from batch_agent.job import AgentResult

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import JsonValue

    from batch_agent.agent.context import AgentContext, BlockingContext
    from batch_agent.backends.base import Backend
    from batch_agent.events import Sink
    from batch_agent.messages import Message
    from batch_agent.run.control import Crew
    from batch_agent.runtimes.base import CommandLineRuntime
    from batch_agent.tools.base import Tool

    Worker: TypeAlias = Callable[[Any, AgentContext], Awaitable[object]] | Callable[[Any, BlockingContext], object]


class Options(TypedDict, total=False):
    """All options except ``output_schema`` and ``worker``, which have overloads. BatchSpec describes each option."""

    task: str
    template: Literal["braces", "jinja"]
    inputs: Iterable[object] | AsyncIterable[object] | Sized | Path
    id_column: str | None
    images: Sequence[str]
    documents: Literal["text", "images", "native"]
    document_column: str | None
    image_root: str | Path | None
    system_prompt: str
    samples: int
    vote: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None
    doubt: bool
    tools: Sequence[Tool[..., Any] | Callable[..., Any] | str | Sequence[Tool[..., Any]]]
    model: str | None
    backend: str | Mapping[str, JsonValue] | Sequence[str | Mapping[str, JsonValue] | Backend] | Backend | None
    cascade: str | Path | Sequence[Mapping[str, Any] | str] | None
    escalate: str | Callable[[AgentResult[Any]], object] | None
    runtime: CommandLineRuntime | str | Mapping[str, Any] | Backend | None
    api_key: str | None
    max_inflight: int | None
    max_concurrent: int | None
    rpm: int | None
    tpm: int | None
    backpressure_ceiling: int | None
    calibrate_backend: bool
    max_agents: int | None
    max_dispatched: int | None
    max_turns: int | None
    max_retries: int
    timeout_per_agent: float | None
    timeout_per_turn: float | None
    timeout_per_tool: float | None
    max_tokens: int | None
    truncated: Literal["keep", "fail"]
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    extra_body: Mapping[str, JsonValue]
    tool_choice: JsonValue
    prices: Mapping[str, float] | None
    max_cost: float | None
    max_total_tokens: int | None
    max_wall_time: float | None
    max_outage: float | None
    control_requests: bool
    affinity: str | None
    hedge: float | None
    kvflow: bool | Literal["auto"]
    cache: bool | str | Path
    run_dir: str | Path | None
    cluster: Crew | None
    processes: int | Literal["auto"] | None
    lease: float
    keep: Literal["all", "results"]
    feed_only: bool
    checkpoint_dir: str | Path | None
    resume: bool
    retry_failed: bool | str | Sequence[str]
    retry_from: Literal["auto", "start", "failure"]
    on_change: Literal["keep", "resend"] | None
    force_resume: bool
    gold: str | Mapping[str, str] | Path | None
    gold_sample: Literal["random"] | None
    gold_sealed: bool
    tolerance: Mapping[str, float] | None
    score: Mapping[str, str | Callable[[Any, Any], bool]] | None
    by: str | None
    groups: str | None
    require: str | Sequence[str]
    pilot: int | None
    examples: str | Path | Sequence[tuple[Any, Any]] | None
    pilot_key: str | None
    pilot_only: bool
    overlap: float
    review_lease: float
    promise: str | None
    max_people: int | None
    people_error: float
    truth: Literal["people", "gold", "last"] | None
    beacon: str | None
    sinks: Sequence[Sink]
    events: str | Path | None
    metrics_port: int | str | None
    telemetry: bool | None
    on_result: Callable[[AgentResult[Any]], object] | None
    no_hoist: bool
    strip_preamble: bool
    streaming_tool_dispatch: bool
    predictive_prewarm: bool | str | Path
    prewarm_max_age: float
    nvext_agent_hints: bool
    model_max_context: int | None
    min_response_tokens: int
    oversized: Literal["fail", "chunk", "truncate"]
    compaction: Literal["auto", "off"] | Callable[[Sequence[Message]], str | Awaitable[str]]
    compaction_backend: str | Mapping[str, JsonValue] | Backend | None
    compaction_model: str | None


class EveryOption(Options, total=False):
    worker: Worker | None


class ShownOptions(Options, total=False):
    """The options of a run, and those that only ``run`` and ``run_sync`` take."""

    progress: bool | None
    view: bool


class EveryShownOption(ShownOptions, EveryOption, total=False):
    """All options, as ``run`` and ``run_sync`` take them."""
