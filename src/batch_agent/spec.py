"""BatchSpec: everything a user can say about a run, checked before anything starts.

One definition serves the Python API, spec files, the command line and the documentation. A wrong value or a misspelt
name is a SpecError that says what is allowed. What a field's value means (a backend URL, a tool, a schema) is resolved
by the package that owns it, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from batch_agent.agreement import disagreements
from batch_agent.errors import SpecError
from batch_agent.option import (
    Allowed,
    Compared,
    Count,
    Directory,
    Flag,
    FlagGroup,
    Limit,
    NotNegative,
    NotSettable,
    Number,
    OptionalText,
    Positive,
    Retries,
    Scope,
    Seconds,
    Switch,
    Text,
    Texts,
    TimeLimit,
    Unset,
    Whole,
    Word,
    check_names,
    explain,
)

MCP = "mcp:"  # before the address of an MCP server, in `tools`
OLD_NAMES = {"max_concurrent": "max_inflight", "max_dispatched": "max_agents", "checkpoint_dir": "run_dir"}
SERVERS = Unset("the server's")
TO_THE_SERVER = ", or None to leave it to the server"


class BatchSpec(BaseModel):
    """What to run. ``None`` for a limit means no limit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), hide_input_in_errors=True
    )

    # What to do
    task: Annotated[
        Text,
        Scope.STAGE,
        Compared.VALUE,
        Unset("required without a `worker`", is_none=False),
        Flag("TEXT", "the message of each row; {field} is filled in", group=FlagGroup.QUESTION),
    ] = Field(
        "",
        description="Message each agent gets. `{field}`, `{field.name}` and `{field[0]}` are filled from its input; "
        "see [templates.md](templates.md). Optional beside a `worker`.",
    )
    template: Annotated[Literal["braces", "jinja"], Allowed("braces or jinja")] = Field(
        "braces",
        description="Language of `task`: `braces`, or `jinja` for loops and conditions (needs the package jinja2).",
    )
    inputs: Annotated[Any, Scope.STAGE, NotSettable("give --inputs")] = Field(
        description="One agent per row: dicts, strings (`{input}`), pydantic models or dataclasses, in a list, "
        "iterator, generator or async iterator, which is read as needed. Or a DataFrame, an Arrow table, a Hugging "
        "Face dataset, an open text file, or the path of a file or directory: [files.md](files.md)."
    )
    id_column: Annotated[
        OptionalText, Scope.STAGE, Compared.VALUE, Unset("`id`, where a row has one"), Flag("NAME")
    ] = Field(
        None,
        description="Field of a row that is its `job_id`. A row without a value there is named by its place, from 0.",
    )
    images: Annotated[Sequence[Word], Allowed("a list of names of fields")] = Field(
        (),
        description="Fields of a row that hold an image, or a list of them, as paths, URLs, data: URLs or bytes. In "
        "Python, `Image(...)` marks one without this option. See [images.md](images.md).",
    )
    documents: Annotated[Literal["text", "images", "native"], Allowed("text, images or native"), Flag("FORM")] = Field(
        "text",
        description="How PDF, Word and HTML files are sent: as their `text`, as `images` of their pages, or as files "
        "(`native`), where the backend takes them. See [documents.md](documents.md).",
    )
    document_column: Annotated[OptionalText, Flag("NAME")] = Field(
        None, description="Field of a row with the path of a document, which is read into `{text}` and `{pages}`."
    )
    image_root: Annotated[Directory, Unset("the working directory; on the command line, where the rows are")] = Field(
        None, description="Directory of images and documents whose paths are relative."
    )
    system_prompt: Annotated[
        Text, Scope.STAGE, Compared.VALUE, Flag("TEXT", name="system", group=FlagGroup.QUESTION)
    ] = Field(
        "",
        description="System prompt, the same for all agents. What they share belongs here: prefix caches hold it once.",
    )
    tools: Annotated[
        Sequence[Any],
        Allowed("a list of tools"),
        Scope.STAGE,
        Flag("NAME", "a tool: read_file, module:function; repeatable", "tool", FlagGroup.QUESTION),
    ] = Field(
        (),
        description="Tools the agents may call: `Tool` values, plain functions, names of built-in tools, `mcp:SERVER` "
        "for those of an MCP server.",
    )
    tool_choice: Annotated[
        JsonValue,
        Allowed("auto, none, required, one tool's name, or None"),
        Scope.STAGE,
        Compared.HASH,
        SERVERS,
    ] = Field(
        None,
        description="`auto`, `none`, `required`, or one tool's name. A forced choice holds for the first turn only.",
    )
    output_schema: Annotated[
        Any,
        Scope.STAGE,
        Compared.HASH,
        Unset("text"),
        Flag(
            "SCHEMA",
            "what each answer must be: module:Class, a JSON schema or its file, or its fields as "
            """'{"label": "a|b|c", "score": "number", "why": "text", "tags": ["text"]}'""",
            "schema",
            FlagGroup.QUESTION,
        ),
    ] = Field(
        None,
        description="What each answer must be: a pydantic model, dataclass, TypedDict, `list[T]` or JSON schema.",
    )
    worker: Annotated[
        Callable[..., Any] | None,
        Allowed("a function of a row and a context, or None"),
        Scope.STAGE,
        Compared.VALUE,
        Unset("the tool loop"),
        Flag("MODULE:FUNCTION", "a function of yours that works on each row", group=FlagGroup.QUESTION),
    ] = Field(
        None,
        description="Function that works on each row in place of the tool loop: `async def work(row, ctx)`, or a plain "
        "function, which runs in a thread. What it returns is the output. See [agents.md](agents.md).",
    )
    on_result: Annotated[
        Callable[..., Any] | None,
        Allowed("a function, or None"),
        Scope.STAGE,
        NotSettable("it is a Python function; the command line writes every result to --output", in_files=True),
    ] = Field(
        None,
        description="Called with each AgentResult as it finishes; may be async. An exception it raises is logged once.",
    )

    # Where. The representation shows none of these: a URL may hold a password, a mapping a key.
    backend: Annotated[Any, Unset("`BATCH_AGENT_BACKEND`, else `local://`"), Flag("URL", "where inference happens")] = (
        Field(
            None,
            description="Where inference happens: a URL such as `vllm://host:8000` or `openai://` ([all of "
            "them](backends.md)), a mapping with `url`, `headers` and `api_key`, a list of these, or a `Backend`.",
            repr=False,
        )
    )
    runtime: Annotated[
        Any,
        Scope.STAGE,
        Unset("the tool loop"),
        Flag("NAME", "a command-line agent that works on each row: opencode, claude-code or codex"),
    ] = Field(
        None,
        description="Command-line agent that works on each row: `opencode`, `claude-code`, `codex`, a mapping with its "
        "`name` and options, or a runtime object ([agents.md](agents.md)). A `Backend` object means `backend`.",
        repr=False,
    )
    model: Annotated[OptionalText, Compared.VALUE, Unset("the backend's only one"), Flag()] = Field(
        None, description="Name of the model, or `provider/model` when no backend is given."
    )
    api_key: Annotated[
        OptionalText,
        Unset("the environment's"),
        NotSettable("it would be kept in the shell's history and the record: use --env-file FILE"),
    ] = Field(
        None,
        description="API key. Not given: the service's variable (`OPENAI_API_KEY`, `ANTHROPIC_API_KEY`), or "
        "`BATCH_AGENT_API_KEY` for other servers.",
        repr=False,
    )

    # How much at once
    max_inflight: Annotated[
        Limit,
        Scope.WHOLE,
        Unset("the right number is found", is_none=False),
        Flag("N"),
    ] = Field(
        None,
        description="Most model calls in flight at once. Not given: the right number is found while the run goes; see "
        "[capacity.md](capacity.md).",
    )
    max_agents: Annotated[Limit, Scope.WHOLE, Unset("what keeps the slots busy", is_none=False)] = Field(
        None,
        description="Most agents alive at once, those waiting for a tool included. Not given: at most 32 times "
        "`max_inflight`, and at least 256.",
    )
    rpm: Annotated[Limit, Scope.WHOLE, Unset("what the provider's headers say")] = Field(
        None, description="Requests that an endpoint may be sent in any minute."
    )
    tpm: Annotated[Limit, Scope.WHOLE, Unset("what the provider's headers say")] = Field(
        None, description="Tokens, of prompts and answers, that an endpoint may be asked for in any minute."
    )
    backpressure_ceiling: Annotated[
        NotNegative | None, Allowed("a whole number, 0 or more, or None for no limit"), Scope.WHOLE
    ] = Field(
        None,
        description="No new agent starts while more requests than this wait in the engine's queue, where the engine "
        "reports its queue.",
    )
    calibrate_backend: Annotated[Switch, Scope.WHOLE] = Field(
        False,
        description="Measure on the first rows beyond which number of calls in flight the throughput stops growing, "
        "and remember it for this endpoint and model.",
    )
    max_turns: Annotated[Limit, Scope.STAGE, Unset("1, with tools 10", is_none=False), Flag("N")] = Field(
        None,
        description="Most answers a model may give before it must be done. Answers asked for again because they do "
        "not validate do not count.",
    )
    max_retries: Annotated[Retries, Flag("N", name="retries")] = Field(
        3,
        description="How often a failed request is sent again, and how often an answer that does not validate is "
        "shown to the model with its errors. `None` is refused: a request that always fails would cost without end.",
    )
    timeout_per_agent: Annotated[TimeLimit, Flag("SECONDS", "seconds for a row, waiting included", "timeout")] = Field(
        None, description="Seconds for the whole agent, waiting included."
    )
    timeout_per_turn: TimeLimit = Field(600.0, description="Seconds for one model call.")
    timeout_per_tool: TimeLimit = Field(120.0, description="Seconds for one tool call.")

    # How much in all
    prices: Annotated[
        Mapping[str, Number] | None,
        Allowed("a mapping from names to numbers, or None"),
        Unset("the public providers', with `genai-prices`"),
    ] = Field(
        None,
        description="$ per million tokens as `input`, `cached`, `cache_write` and `output`, or $ per `gpu_hour` and "
        "the number of `gpus`.",
    )
    max_cost: Annotated[
        Positive | None, Allowed("a number of dollars above 0, or None for no limit"), Scope.WHOLE, Flag("DOLLARS")
    ] = Field(None, description="$ a run may cost. At the limit it ends `out of budget`.")
    max_total_tokens: Annotated[Limit, Scope.WHOLE, Flag("N")] = Field(
        None, description="Tokens a run may use, prompts and answers together. At the limit it ends `out of budget`."
    )
    max_wall_time: Annotated[TimeLimit, Scope.WHOLE, Flag("SECONDS")] = Field(
        None, description="Seconds after which a run sends nothing more and ends `out of budget`."
    )
    max_outage: Annotated[TimeLimit, Scope.WHOLE, Flag("SECONDS", "how long a server may be unreachable")] = Field(
        900.0,
        description="Seconds that a server may be unreachable before the run ends as `unreachable`, to be resumed; "
        "`None`: for ever. A server that no request ever reached is given up after 30 s.",
    )
    affinity: OptionalText = Field(
        None,
        description="A field of the row: on several servers, rows with the same value go to the same one, whose cache "
        "has what they share, unless it is too busy ([fleet.md](fleet.md)).",
    )
    hedge: Annotated[
        Seconds | None, Allowed("a number of seconds above 0, or None to ask nobody twice"), Unset("off")
    ] = Field(
        None,
        description="Seconds after which a turn without an answer is asked of another server too, where a slot is "
        "free; the first answer counts. Needs several servers ([fleet.md](fleet.md)).",
    )
    kvflow: Annotated[bool | Literal["auto"], Allowed('True, False or "auto"')] = Field(
        "auto",
        description="Schedule agents by the engine's KV cache: one whose context does not fit waits at a turn "
        "boundary. `True`: also what was not seen to pay yet; `False`: off ([kv.md](kv.md)).",
    )
    cache: Annotated[
        bool | Word | Path,
        Allowed("True, False or a directory"),
        Flag("DIR", "answer what was asked before from disk; behind SPEC, or as --cache=DIR"),
    ] = Field(
        False,
        description="Answer requests that were answered before from disk: `True`, or a directory. Needs "
        "`temperature=0` or a `seed`.",
    )

    # The record
    run_dir: Annotated[Directory, Scope.WHOLE, NotSettable("give --run-dir")] = Field(
        None,
        description="Directory that records the run, so that it can be resumed; or `redis://host:6379/0/NAME`, where "
        "workers on other machines can join it ([cluster.md](cluster.md)). `checkpoint_dir`: this and `resume`.",
    )
    lease: Annotated[Seconds, Allowed("a number of seconds above 0"), Scope.WHOLE, Flag("SECONDS")] = Field(
        15.0,
        description="For a run in Redis: seconds without a sign of life after which a worker's rows go to others.",
    )
    keep: Annotated[Literal["all", "results"], Allowed("all or results"), Scope.WHOLE, Flag("WHAT")] = Field(
        "all",
        description="For a run in Redis: `results` drops the turns of rows that are done, and their transcripts.",
    )
    feed_only: Annotated[
        Switch, Scope.WHOLE, Flag(None, "feed rows and deliver results; other processes do all the work", "no_work")
    ] = Field(
        False,
        description="For a run in Redis: feed rows and deliver results, and leave all work to other processes.",
    )
    cluster: Annotated[Any, Scope.WHOLE, NotSettable("give --ray", in_files=True)] = Field(
        None,
        description='Cluster whose processes work on the rows: `batch_agent.ray.Ray("auto", workers=8)` '
        "([cluster.md](cluster.md)).",
    )
    resume: Annotated[Switch, Scope.WHOLE, NotSettable("give --resume")] = Field(
        False,
        description="Go on with what `run_dir` holds; where it holds nothing, begin. Without it, a directory that "
        "holds a run is refused.",
    )
    retry_failed: Annotated[
        bool | Word | Sequence[Word],
        Allowed("True, False, an error type or a list of them"),
        Scope.WHOLE,
        Unset("all"),
        NotSettable("give --no-retry-failed"),
    ] = Field(
        True,
        description="When resuming, which failed rows are tried again: `True`, `False`, an error type, or a list of "
        "them.",
    )
    force_resume: Annotated[Switch, Scope.WHOLE, NotSettable("give --force-resume")] = Field(
        False,
        description="When resuming, rows keep their recorded answers although the task, model, schema or tools "
        "changed. Rows are matched by their whole content.",
    )

    # Who watches
    sinks: Annotated[
        Sequence[Callable[..., Any]],
        Allowed("a list of functions, each of which takes an event"),
        Scope.WHOLE,
        NotSettable("they are Python functions; --events FILE writes the events", in_files=True),
    ] = Field((), description="Functions that are called with every event of the run: [events.md](events.md).")
    events: Annotated[Word | Path | None, Allowed("a file, or None"), Scope.WHOLE, Flag("FILE")] = Field(
        None, description="File to which each event is appended as a line of JSON: [events.md](events.md)."
    )
    metrics_port: Annotated[
        Annotated[NotNegative, Field(le=65535)] | Word | None,
        Allowed("a port from 0 to 65535, or HOST:PORT"),
        Scope.WHOLE,
        Unset("none"),
        Flag("PORT", "serve the run's numbers to Prometheus at this port; 0: a free one"),
    ] = Field(
        None,
        description="Port at which Prometheus finds the run's numbers, on this machine only unless it is `HOST:PORT`; "
        "`0`: a free one, which is printed. See [metrics.md](metrics.md).",
    )
    telemetry: Annotated[
        bool | None,
        Allowed("True, False or None"),
        Scope.WHOLE,
        Unset("on if `OTEL_EXPORTER_OTLP_ENDPOINT` is set and the SDK is installed"),
    ] = Field(
        None,
        description="Send traces and metrics to an OpenTelemetry collector (extra `otel`); see "
        "[metrics.md](metrics.md).",
    )

    # The model call
    max_tokens: Annotated[
        Count | None, Allowed(f"a whole number above 0{TO_THE_SERVER}"), Scope.STAGE, Compared.VALUE, SERVERS, Flag("N")
    ] = Field(None, description="Tokens one answer may have.")
    truncated: Annotated[Literal["keep", "fail"], Allowed("keep or fail"), Scope.STAGE] = Field(
        "keep",
        description='What becomes of free text that was cut at `max_tokens`. `"keep"`: it is the output, and the '
        'result is marked `truncated`; `"fail"`: the row fails with `Truncated`, as it always does with '
        "`output_schema`.",
    )
    temperature: Annotated[
        Annotated[Number, Field(ge=0, le=10)] | None,
        Allowed(f"a number from 0 to 10{TO_THE_SERVER}"),
        Compared.VALUE,
        SERVERS,
        Flag("X", group=FlagGroup.QUESTION),
    ] = Field(None, description="Sampling temperature.")
    top_p: Annotated[
        Annotated[Number, Field(gt=0, le=1)] | None,
        Allowed(f"a number above 0 and at most 1{TO_THE_SERVER}"),
        Compared.VALUE,
        SERVERS,
    ] = Field(None, description="Nucleus sampling.")
    seed: Annotated[Whole | None, Allowed(f"a whole number{TO_THE_SERVER}"), Compared.VALUE, SERVERS] = Field(
        None, description="Sampling seed."
    )
    stop: Annotated[Texts, Scope.STAGE, Compared.VALUE, SERVERS] = Field(None, description="Texts that end an answer.")
    extra_body: Annotated[Mapping[str, JsonValue], Allowed("a mapping from names to JSON values"), Compared.HASH] = (
        Field(
            {},
            description="Fields added to each request body as they are. They win over the fields of other options; "
            "`messages` and `stream` are refused.",
        )
    )
    nvext_agent_hints: Switch = Field(
        True,
        description="Tell a server that plans (`dynamo://`) how near its end an agent is and how long its answers "
        "usually take. See [backends.md](backends.md).",
    )
    streaming_tool_dispatch: Switch = Field(
        True,
        description="Start a reading tool when its call is complete, while the model still writes. Answers are "
        "streamed for this only while it saves time.",
    )
    predictive_prewarm: Annotated[bool | Word | Path, Allowed("True, False or the directory of an earlier run")] = (
        Field(
            False,
            description="Start the tool calls that a row made in an earlier run before the model asks for them: that "
            "run's directory, or `True` for what `run_dir` holds. Cacheable tools only. See [tools.md](tools.md).",
        )
    )
    prewarm_max_age: Annotated[Seconds, Allowed("a number of seconds above 0")] = Field(
        60.0, description="Seconds that a result of `predictive_prewarm` stays valid until a model asks for it."
    )

    # The prompt
    no_hoist: Annotated[Switch, Flag()] = Field(
        False, description="Do not move long values that all rows share to the system prompt."
    )
    strip_preamble: Switch = Field(
        True,
        description="Drop `x-anthropic-*:` and `x-amz-*:` lines from the start of the system prompt: they vary from "
        "session to session and defeat prefix caches.",
    )

    # The context
    model_max_context: Annotated[Limit, Unset("what the server says, where it does")] = Field(
        None,
        description="Context of the model in tokens. Given, a row that cannot fit fails as `OVERSIZED` (estimated, "
        "four bytes a token), unless `oversized` says otherwise. Not given, the server decides what fits.",
    )
    min_response_tokens: Annotated[Count, Allowed("a whole number above 0")] = Field(
        256, description="Tokens of the context that are kept for the answer."
    )
    oversized: Annotated[Literal["fail", "chunk", "truncate"], Allowed("fail, chunk or truncate")] = Field(
        "fail",
        description='What happens to a row that cannot fit. `"fail"`; `"chunk"`: its longest field is done in parts '
        'and the answers are merged; `"truncate"`: only the beginning of that field is sent. The last two need to '
        "know the context, from `model_max_context` or from the server.",
    )
    compaction: Annotated[Literal["auto", "off"] | Callable[..., Any], Allowed("auto, off, or a function")] = Field(
        "auto",
        description='A conversation that is about to outgrow the context is made shorter: `"auto"`, `"off"`, or a '
        "function from the messages that are left out to the text that replaces them; it may be async.",
    )
    compaction_backend: Any = Field(
        None, description="Where a model writes that text: anything that `backend` can be.", repr=False
    )
    compaction_model: OptionalText = Field(
        None, description="Model that writes it; without `compaction_backend`, on `backend`."
    )

    def __init__(self, **options: Any) -> None:
        if options.get("checkpoint_dir") is not None:
            options.setdefault("resume", True)  # that is what its users know it for
        for old, new in OLD_NAMES.items():
            if old in options:
                options.setdefault(new, options.pop(old))  # where both are given, the name of today counts
        check_names(BatchSpec, options, OLD_NAMES)
        for name in ("task", "inputs"):
            if name not in options and not (name == "task" and options.get("worker") is not None):
                raise SpecError(f"{name} is missing: {BatchSpec.model_fields[name].description}")
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise SpecError(explain(BatchSpec, error, options)) from None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for problem in disagreements(self.__dict__):
            raise ValueError(problem)
        return self

    def given(self, name: str) -> bool:
        """Whether the user said it; for the options where not given and None differ."""
        return name in self.model_fields_set

    @property
    def turn_limit(self) -> int | None:
        if self.given("max_turns"):
            return self.max_turns
        return 10 if self.tools else 1
