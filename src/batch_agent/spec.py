"""BatchSpec: everything a user can say about a run, checked before anything starts.

One definition serves the Python API, spec files and the documentation. A wrong value or a misspelt name is a SpecError
that says what is allowed. What a field's value means (a backend URL, a tool, a schema) is resolved by the package that
owns it, not here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError, model_validator

from batch_agent.errors import JobError, SpecError

Count = Annotated[int, Field(gt=0, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # True and "1" are none
Dollars = Annotated[Number, Field(gt=0)]
Seconds = Annotated[Number, Field(gt=0)]
Text = Annotated[str, StringConstraints(strict=True)]

OLD_NAMES = {"max_concurrent": "max_inflight", "max_dispatched": "max_agents", "checkpoint_dir": "run_dir"}

_NO_LIMIT = ", or None for no limit"
_SERVERS = ", or None to leave it to the server"
# What an option must be, in the words of the error about one that is not.
ALLOWED = {
    **dict.fromkeys(("task", "system_prompt"), "text"),
    **dict.fromkeys(("model", "api_key", "affinity"), "text, or None"),
    "template": "braces or jinja",
    "tools": "a list of tools",
    "on_result": "a function, or None",
    **dict.fromkeys(
        ("max_inflight", "max_agents", "max_turns", "max_total_tokens", "model_max_context"),
        f"a whole number above 0{_NO_LIMIT}",
    ),
    "max_retries": "a whole number, 0 or more: without a limit, what fails every time would cost without end",
    **dict.fromkeys(
        ("timeout_per_agent", "timeout_per_turn", "timeout_per_tool", "max_wall_time", "max_outage"),
        f"a number of seconds above 0{_NO_LIMIT}",
    ),
    "hedge": "a number of seconds above 0, or None to ask nobody twice",
    "max_cost": f"a number of dollars above 0{_NO_LIMIT}",
    "max_tokens": f"a whole number above 0{_SERVERS}",
    "min_response_tokens": "a whole number above 0",
    "oversized": "fail, chunk or truncate",
    "compaction": "auto, off, or a function",
    "compaction_model": "text, or None",
    "temperature": f"a number from 0 to 10{_SERVERS}",
    "top_p": f"a number above 0 and at most 1{_SERVERS}",
    "seed": f"a whole number{_SERVERS}",
    "stop": f"a text or a list of texts{_SERVERS}",
    "extra_body": "a mapping from names to JSON values",
    "tool_choice": "auto, none, required, one tool's name, or None",
    "prices": "a mapping from names to numbers, or None",
    "cache": "True, False or a directory",
    "run_dir": "a directory, or None",
    "predictive_prewarm": "True, False or the directory of an earlier run",
    "prewarm_max_age": "a number of seconds above 0",
    "retry_failed": "True, False, an error type or a list of them",
    **dict.fromkeys(
        ("resume", "force_resume", "no_hoist", "strip_preamble", "streaming_tool_dispatch"), "True or False"
    ),
}


def _error_types(error: type[JobError]) -> set[str]:
    """Those of a backend of the user's own included."""
    return {error.type}.union(*map(_error_types, error.__subclasses__()))


class BatchSpec(BaseModel):
    """What to run. ``None`` for a limit means no limit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), hide_input_in_errors=True
    )

    task: Text = Field(description="The message each agent gets; {field} is filled from its input.")
    template: Literal["braces", "jinja"] = Field(
        "braces",
        description="The language of the task: braces, in which {field}, {field.name} and {field[0]} are filled in; or "
        "jinja, with loops and conditions.",
    )
    inputs: Any = Field(
        description="One agent per row: dicts, strings ({input}), pydantic models or dataclasses, in a list, "
        "iterator, generator or async iterator; or a DataFrame, an Arrow table, a Hugging Face dataset, an open text "
        "file, or the path of a file or directory."
    )
    system_prompt: Text = Field("", description="The same for all agents; everything shared belongs here.")
    tools: Sequence[Any] = Field((), description="Tools the agents may call: Tool values or plain functions.")
    output_schema: Any = Field(
        None, description="What each answer must be: a pydantic model, dataclass, TypedDict, list[T] or JSON schema."
    )
    model: Text | None = Field(
        None, description="The model's name, or provider/model. Without it, the one model the server has."
    )
    # Neither is shown: a URL may hold a password, a mapping a key.
    backend: Any = Field(
        None,
        description="Where inference happens: a URL, a mapping with a url, a list of these, or a Backend.",
        repr=False,
    )
    runtime: Any = Field(None, description="A Backend object; another way to say backend=.", repr=False)
    api_key: Text | None = Field(
        None, description="The key, where it is not in the provider's environment variable.", repr=False
    )
    max_inflight: Count | None = Field(
        None,
        description="Model calls in flight at once, never more. Not given: what suits the backend. None: no limit.",
    )
    max_agents: Count | None = Field(
        None,
        description="Agents alive at once, those waiting for a tool included. Not given: what keeps the slots busy, at "
        "most 32 times max_inflight (and at least 256). None: no limit.",
    )
    max_turns: Count | None = Field(
        None,
        description="Answers a model may give before it must be done; those asked for again because they do not "
        "validate come on top. Not given: 1, or 10 with tools.",
    )
    max_retries: Annotated[int, Field(ge=0, strict=True)] = Field(
        3,
        description="How often a failed request is sent again, and how often an answer that does not validate is "
        "shown to the model with its errors.",
    )
    timeout_per_agent: Seconds | None = Field(None, description="Seconds an agent has in all, waiting included.")
    timeout_per_turn: Seconds | None = Field(600.0, description="Seconds one model call may take.")
    timeout_per_tool: Seconds | None = Field(120.0, description="Seconds one tool call may run.")
    max_tokens: Count | None = Field(None, description="Tokens one answer may have.")
    temperature: Annotated[Number, Field(ge=0, le=10)] | None = Field(None, description="Sampling temperature.")
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = Field(None, description="Nucleus sampling.")
    seed: Annotated[int, Field(strict=True)] | None = Field(None, description="Sampling seed.")
    stop: Text | Sequence[Text] | None = Field(None, description="Texts that end an answer.")
    extra_body: Mapping[str, JsonValue] = Field(
        {}, description="Fields added to each request body as they are; messages and stream are not theirs to set."
    )
    tool_choice: JsonValue = Field(
        None, description="auto, none, required, or one tool's name; for the first turn when it forces a call."
    )
    prices: Mapping[str, Number] | None = Field(
        None,
        description="$ per million tokens as input, cached, cache_write and output, or $ per gpu_hour and how many "
        "gpus. Not given: the public providers' prices, where genai-prices is installed.",
    )
    max_cost: Dollars | None = Field(None, description="$ a run may cost; at the limit it ends out of budget.")
    max_total_tokens: Count | None = Field(
        None, description="Tokens a run may use, prompts and answers together; at the limit it ends out of budget."
    )
    max_wall_time: Seconds | None = Field(
        None, description="Seconds after which a run sends nothing more and ends out of budget."
    )
    max_outage: Seconds | None = Field(
        900.0,
        description="Seconds that a server may be unreachable before the run ends as unreachable, to be resumed; None: "
        "for ever. A server that never answered is given up after 15 s.",
    )
    affinity: Text | None = Field(
        None,
        description="A field of the row: on several servers, rows with the same value go to the same one, which has "
        "what they share in its cache, as long as it is not too busy.",
    )
    hedge: Seconds | None = Field(
        None,
        description="Seconds after which a turn that has no answer is asked of another server too, where a slot is "
        "free; the first answer counts. Needs several servers.",
    )
    cache: bool | Text | Path = Field(
        False,
        description="Answer requests that were answered before from disk: True, or a directory. "
        "Needs temperature 0 or a seed.",
    )
    run_dir: Text | Path | None = Field(
        None,
        description="The directory that records the run, so that it can be resumed. checkpoint_dir: this and resume.",
    )
    resume: bool = Field(
        False, description="Go on with what run_dir holds; where it holds nothing, begin. Needs run_dir."
    )
    retry_failed: bool | Text | Sequence[Text] = Field(
        True, description="When resuming: which failed rows are tried again: all, none, or those of these error types."
    )
    force_resume: bool = Field(
        False,
        description="When resuming: rows keep recorded answers although the task, model, schema or tools changed.",
    )
    on_result: Callable[..., Any] | None = Field(
        None, description="Called with each AgentResult as it finishes; may be async."
    )
    no_hoist: bool = Field(False, description="Send each message as written; do not move shared values forward.")
    strip_preamble: bool = Field(
        True, description="Drop lines that vary per session (x-anthropic-*:, x-amz-*:) from the system prompt's start."
    )
    streaming_tool_dispatch: bool = Field(
        True, description="Start a tool when its call is complete, while the model is still talking, where that pays."
    )
    predictive_prewarm: bool | Text | Path = Field(
        False,
        description="Start the tool calls that a row made in an earlier run before the model asks for them: that run's "
        "directory, or True for what run_dir holds. Cacheable tools only.",
    )
    prewarm_max_age: Seconds = Field(
        60.0, description="Seconds that a result made by predictive_prewarm stays good while no model asks for it."
    )
    model_max_context: Count | None = Field(None, description="The model's context in tokens.")
    min_response_tokens: Count = Field(256, description="Tokens of the context that are kept for the answer.")
    oversized: Literal["fail", "chunk", "truncate"] = Field(
        "fail",
        description="What becomes of an input that does not fit model_max_context: it fails, its longest field is done "
        "in parts whose answers are merged, or only the beginning of that field is sent.",
    )
    compaction: Literal["auto", "off"] | Callable[..., Any] = Field(
        "auto",
        description="A conversation that is about to outgrow the context is made shorter: auto, off, or a function "
        "from the messages that are left out to the text that stands for them; may be async.",
    )
    compaction_backend: Any = Field(
        None, description="Where a model writes that text: a URL, a mapping with a url, or a Backend.", repr=False
    )
    compaction_model: Text | None = Field(
        None, description="The model that writes it; on compaction_backend, or, without one, on backend."
    )

    def __init__(self, **options: Any) -> None:
        if options.get("checkpoint_dir") is not None:
            options.setdefault("resume", True)  # that is what its users know it for
        for old, new in OLD_NAMES.items():
            if old in options:
                options.setdefault(new, options.pop(old))  # where both are given, the name of today counts
        self._check_names(options)
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise SpecError(_explain(error, options)) from None

    @classmethod
    def _check_names(cls, options: Mapping[str, object]) -> None:
        for name in options.keys() - cls.model_fields.keys():
            near = difflib.get_close_matches(name, [*cls.model_fields, *OLD_NAMES], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". Options: {', '.join(sorted(cls.model_fields))}"
            raise SpecError(f"there is no option {name!r}{hint}")
        for name in ("task", "inputs"):
            if name not in options:
                raise SpecError(f"{name} is missing: {cls.model_fields[name].description}")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.backend is not None and self.runtime is not None:
            raise ValueError("backend and runtime mean the same: give one of them")
        for name in ("resume", "force_resume"):
            if getattr(self, name) and self.run_dir is None:
                raise ValueError(f"{name} needs run_dir, the directory to resume from")
        if isinstance(self.run_dir, str) and not self.run_dir.strip():
            raise ValueError("run_dir is empty: name a directory, or leave it out to record nothing")
        if self.predictive_prewarm is True and self.run_dir is None:
            raise ValueError("predictive_prewarm needs an earlier run: give its directory in place of True, or run_dir")
        if isinstance(self.predictive_prewarm, str) and not self.predictive_prewarm.strip():
            raise ValueError("predictive_prewarm is empty: name the directory of an earlier run")
        retry = (self.retry_failed,) if isinstance(self.retry_failed, str) else self.retry_failed
        known = _error_types(JobError)
        for name in () if isinstance(retry, bool) else retry:
            if name not in known:
                raise ValueError(f"retry_failed: there is no error type {name!r}; there are {', '.join(sorted(known))}")
        if not self.task.strip():
            raise ValueError("task is empty: it is the message each agent gets")
        if self.model is not None and not self.model.strip():
            raise ValueError("model is empty: name one, or leave it out for the one model the server has")
        if self.model_max_context is not None and self.model_max_context <= self.min_response_tokens:
            raise ValueError("model_max_context must be larger than min_response_tokens, which is kept for the answer")
        if self.oversized != "fail" and self.model_max_context is None:
            raise ValueError(f"oversized={self.oversized!r} needs model_max_context: what fits is not known without it")
        given = [name for name in ("compaction_backend", "compaction_model") if getattr(self, name) is not None]
        if given and self.compaction != "auto":
            raise ValueError(f"{given[0]} names a model to write what compaction, which is not auto, does without")
        return self

    def given(self, name: str) -> bool:
        """Whether the user said it; for the options where not given and None differ."""
        return name in self.model_fields_set

    @property
    def turn_limit(self) -> int | None:
        if self.given("max_turns"):
            return self.max_turns
        return 10 if self.tools else 1


def _explain(error: ValidationError, options: Mapping[str, object]) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        if name in ALLOWED:
            lines.append(f"{name}: must be {ALLOWED[name]} (got {_kind(options[name])})")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    return "; ".join(dict.fromkeys(lines))


def _kind(value: object) -> str:
    """What was given. Numbers are shown; anything else may be a secret that got into the wrong option."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    kinds: dict[type, str] = {str: "text", list: "a list of something else", dict: "a mapping of something else"}
    return kinds.get(type(value), type(value).__name__)
