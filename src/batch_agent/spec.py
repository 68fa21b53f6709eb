"""BatchSpec: all options of a run, checked before the run starts.

One definition serves the Python API, spec files, the command line and the documentation. A wrong value or a misspelt
name raises SpecError, which names the allowed values. This module does not interpret a backend URL, a tool or a schema:
the package that owns it does.
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

MCP = "mcp:"  # prefix of an MCP server's address in `tools`
OLD_NAMES = {
    **{"max_concurrent": "max_inflight", "max_dispatched": "max_agents", "checkpoint_dir": "run_dir"},
    "force_resume": "on_change",  # True meant "keep"
}
SERVERS = Unset("the server's default")
TO_THE_SERVER = ", or None for the server's default"

MISSING = {
    "task": "give the message that each agent gets, such as 'Sum up {text}', where {text} is a field of the row "
    "(on the command line --task); or a worker",
    "inputs": "give the rows: a list, a table, or the path of a file (on the command line --inputs)",
}


class BatchSpec(BaseModel):
    """The options of a run. ``None`` for a limit means no limit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), hide_input_in_errors=True
    )

    # What to do
    task: Annotated[
        Text,
        Scope.STAGE,
        Compared.VALUE,
        Unset("required without a `worker`", is_none=False),
        Flag("TEXT", "message of each row; {field} becomes the value of that field", group=FlagGroup.QUESTION),
    ] = Field(
        "",
        description="Message that each agent gets. `{field}`, `{field.name}` and `{field[0]}` become values of its "
        "row: [templates.md](templates.md). Optional with a `worker`.",
    )
    template: Annotated[Literal["braces", "jinja"], Allowed("braces or jinja")] = Field(
        "braces",
        description="Template language of `task`: `braces`, or `jinja` for loops and conditions (needs jinja2).",
    )
    inputs: Annotated[Any, Scope.STAGE, NotSettable("give --inputs")] = Field(
        description="The rows; each gets one agent. A row is a dict, a string (`{input}`), a pydantic model or a "
        "dataclass. Give a list, an iterator or an async iterator (read as needed), a DataFrame, an Arrow table, a "
        "Hugging Face dataset, an open text file, or the path of a file or directory: [files.md](files.md)."
    )
    id_column: Annotated[OptionalText, Compared.VALUE, Unset("`id`, if the row has it"), Flag("NAME")] = Field(
        None,
        description="Field of a row that becomes its `job_id`. A row without a value gets its position, from 0.",
    )
    images: Annotated[Sequence[Word], Allowed("a list of names of fields")] = Field(
        (),
        description="Fields of a row that hold an image or a list of images: paths, URLs, data: URLs or bytes. In "
        "Python, a value `Image(...)` does not need this option. See [images.md](images.md).",
    )
    documents: Annotated[Literal["text", "images", "native"], Allowed("text, images or native"), Flag("FORM")] = Field(
        "text",
        description="How PDF, Word and HTML files are sent: as `text`, as `images` of their pages, or as the file "
        "itself (`native`, if the backend accepts it). See [documents.md](documents.md).",
    )
    document_column: Annotated[OptionalText, Flag("NAME")] = Field(
        None, description="Field of a row with the path of a document. Its content becomes `{text}` and `{pages}`."
    )
    image_root: Annotated[
        Directory, Unset("the working directory; on the command line, the directory of the input file")
    ] = Field(None, description="Directory for relative paths of images and documents.")
    system_prompt: Annotated[
        Text, Scope.STAGE, Compared.VALUE, Flag("TEXT", name="system", group=FlagGroup.QUESTION)
    ] = Field("", description="System prompt of all agents. Put shared text here, so that prefix caches store it once.")
    tools: Annotated[
        Sequence[Any],
        Allowed("a list of tools"),
        Scope.STAGE,
        Flag("NAME", "a tool, such as read_file or module:function; repeatable", "tool", FlagGroup.QUESTION),
    ] = Field(
        (),
        description="Tools that the agents may call: `Tool` values, functions, names of built-in tools, or "
        "`mcp:SERVER` for all tools of an MCP server.",
    )
    tool_choice: Annotated[
        JsonValue, Allowed("auto, none, required, one tool's name, or None"), Scope.STAGE, Compared.HASH, SERVERS
    ] = Field(
        None, description="`auto`, `none`, `required`, or a tool's name. The last two apply to the first turn only."
    )
    output_schema: Annotated[
        Any,
        Scope.STAGE,
        Compared.HASH,
        Unset("text"),
        Flag(
            "SCHEMA",
            "schema of each answer: module:Class, a JSON schema or its file, or its fields as "
            """'{"label": "a|b|c", "score": "number", "why": "text", "tags": ["text"]}'""",
            "schema",
            FlagGroup.QUESTION,
        ),
    ] = Field(
        None,
        description="Schema of each answer: a pydantic model, dataclass, TypedDict, `list[T]`, JSON schema, or a dict "
        'of fields such as `{"score": "number", "tags": ["text"]}`, which ignores other fields.',
    )
    samples: Annotated[
        Count, Allowed("a whole number above 0"), Compared.VALUE, Flag("N", group=FlagGroup.QUESTION)
    ] = Field(
        1,
        description="Ask each row this many times, each time by an agent of its own, and let the answers vote: "
        "[trust.md](trust.md). No sample is asked that cannot change the vote.",
    )
    vote: Annotated[
        Word | Callable[..., Any] | Mapping[str, Word | Callable[..., Any]] | None,
        Allowed('"majority", "median", a function, or a mapping of fields to these'),
        Compared.VALUE,
        Unset("`majority`"),
        Flag(
            "HOW",
            "how samples vote: majority, median or module:function; FIELD=HOW for one field, repeatable",
            group=FlagGroup.QUESTION,
        ),
    ] = Field(
        None,
        description='How samples vote: `"majority"`, `"median"`, or your own function (`"module:function"`) of the '
        "values of a field; or a mapping of fields to these: [trust.md](trust.md).",
    )
    doubt: Annotated[
        Switch, Flag(None, "tell for each field how much the model doubts its answer", group=FlagGroup.QUESTION)
    ] = Field(
        False,
        description="Tell for each field how much the model doubts its answer, from the log-probabilities of its "
        "tokens or from votes: a rank, no probability ([trust.md](trust.md)).",
    )
    examples: Annotated[
        Word | Path | Sequence[Any] | None,
        Allowed("a file, a list of pairs of row and answer, or None"),
        Scope.STAGE,
        Compared.HASH,
        Unset("none"),
        Flag("FILE", "rows with their right answers, which every agent sees", group=FlagGroup.QUESTION),
    ] = Field(
        None,
        description="Rows with their right answers, in the prompt of all agents: pairs such as "
        '`[({"text": "Fine"}, {"mood": "good"})]`, or a file whose columns are fields of rows and answers. Rows with '
        "the same content leave the score ([trust.md](trust.md)).",
    )
    worker: Annotated[
        Callable[..., Any] | None,
        Allowed("a function of a row and a context, or None"),
        Scope.STAGE,
        Compared.VALUE,
        Unset("the tool loop"),
        Flag("MODULE:FUNCTION", "your own function, called for each row", group=FlagGroup.QUESTION),
    ] = Field(
        None,
        description="Your own function, called for each row instead of the tool loop: `async def work(row, ctx)`, or "
        "a plain function, which runs in a thread. It returns the output of the row. See [agents.md](agents.md).",
    )
    on_result: Annotated[
        Callable[..., Any] | None,
        Allowed("a function, or None"),
        Scope.STAGE,
        NotSettable("it is a Python function; the command line writes every result to --output", in_files=True),
    ] = Field(
        None,
        description="Called with each `AgentResult` when its row finishes; may be async. Its first error is logged.",
    )

    # Backend and model. repr shows none of these: a URL may hold a password, and a mapping may hold a key.
    backend: Annotated[Any, Unset("`BATCH_AGENT_BACKEND`, else `local://`"), Flag("URL", "inference server")] = Field(
        None,
        description="Inference server: a URL such as `vllm://host:8000` or `openai://` ([full list](backends.md)), a "
        "mapping with `url`, `headers` and `api_key`, a list of these, or a `Backend`.",
        repr=False,
    )
    cascade: Annotated[
        Word | Path | Sequence[Any] | None,
        Allowed('a list of entries such as {"backend": "local://"}, of which the last may be "people", or its file'),
        Scope.STAGE,
        Compared.VALUE,
        Unset("one backend answers all rows"),
        Flag(
            "JSON", """models that are asked one after the other, as '[{"backend": "local://"}, "people"]', or a file"""
        ),
    ] = Field(
        None,
        description="Models that are asked one after the other, in place of `backend`: a row whose answer `escalate` "
        'names goes to the next entry, the last of which may be `"people"`. An entry has a `backend`, and may have a '
        "`name`, a `model`, an `api_key`, `prices`, sampling options, `samples`, `tools`, `max_turns` and a "
        "`system_prompt` of its own ([cascade.md](cascade.md)).",
        repr=False,
    )
    escalate: Annotated[
        Word | Callable[..., Any] | None,
        Allowed("a rule such as 'doubt > 0.3', a function of a result, or None"),
        Scope.STAGE,
        Compared.VALUE,
        Unset("`invalid`"),
        Flag("RULE", "which answers of a cascade go to the next entry, such as 'doubt > 0.3 or output.unsure'"),
    ] = Field(
        None,
        description="Which answers of a `cascade` go to its next entry: `invalid`, or comparisons of `doubt`, "
        "`doubts.FIELD`, `votes.FIELD.against` and `output.FIELD`, joined by `and`, `or`, `not` and brackets; or your "
        "own function of the result (`module:function`) ([cascade.md](cascade.md)).",
    )
    runtime: Annotated[
        Any,
        Scope.STAGE,
        Unset("the tool loop"),
        Flag("NAME", "a command-line agent that works on each row: opencode, claude-code or codex"),
    ] = Field(
        None,
        description="Command-line agent that works on each row: `opencode`, `claude-code`, `codex`, a mapping with its "
        "`name` and options, or a runtime object ([agents.md](agents.md)). A `Backend` object here sets `backend`.",
        repr=False,
    )
    model: Annotated[OptionalText, Compared.VALUE, Unset("the backend's only model"), Flag()] = Field(
        None, description="Name of the model, or `provider/model` when no backend is given."
    )
    api_key: Annotated[
        OptionalText,
        Unset("from the environment"),
        NotSettable("the key would be stored in the shell's history and in the record: use --env-file FILE"),
    ] = Field(
        None,
        description="API key. Default: the provider's environment variable (`OPENAI_API_KEY`, `ANTHROPIC_API_KEY`), or "
        "`BATCH_AGENT_API_KEY` for other servers.",
        repr=False,
    )

    # Concurrency, retries and timeouts
    max_inflight: Annotated[Limit, Scope.WHOLE, Unset("adapted to the server", is_none=False), Flag("N")] = Field(
        None,
        description="Maximum number of model calls in flight. By default the run measures the server and adapts the "
        "limit: [capacity.md](capacity.md).",
    )
    max_agents: Annotated[Limit, Scope.WHOLE, Unset("enough to keep the slots busy", is_none=False)] = Field(
        None,
        description="Maximum number of agents in memory, including agents that wait for a tool. Default: at most 32 "
        "times `max_inflight`, and at least 256.",
    )
    rpm: Annotated[Limit, Scope.WHOLE, Unset("from the provider's headers")] = Field(
        None, description="Maximum number of requests per minute to one endpoint."
    )
    tpm: Annotated[Limit, Scope.WHOLE, Unset("from the provider's headers")] = Field(
        None, description="Maximum number of tokens per minute at one endpoint, prompts and answers together."
    )
    backpressure_ceiling: Annotated[
        NotNegative | None, Allowed("a whole number, 0 or more, or None for no limit"), Scope.WHOLE
    ] = Field(
        None,
        description="No new agent starts while more requests than this wait in the server's queue. Needs a server "
        "that reports the length of its queue.",
    )
    calibrate_backend: Annotated[Switch, Scope.WHOLE] = Field(
        False,
        description="Use the first rows to measure at which number of calls in flight the throughput stops growing. "
        "The number is remembered for this endpoint and model.",
    )
    max_turns: Annotated[Limit, Scope.STAGE, Unset("1, with tools 10", is_none=False), Flag("N")] = Field(
        None,
        description="Maximum number of model calls per row. Retries of an answer that does not validate do not count.",
    )
    max_retries: Annotated[Retries, Flag("N", name="retries")] = Field(
        3,
        description="Maximum number of retries of a failed request, and of an answer that does not validate; the model "
        "gets the validation errors. `None` is refused: a request that always fails would cost without limit.",
    )
    timeout_per_agent: Annotated[TimeLimit, Flag("SECONDS", "seconds for a row, with its waits", "timeout")] = Field(
        None, description="Seconds for one row, including its waits."
    )
    timeout_per_turn: TimeLimit = Field(600.0, description="Seconds for one model call.")
    timeout_per_tool: TimeLimit = Field(120.0, description="Seconds for one tool call.")

    # Cost, budgets and routing
    prices: Annotated[
        Mapping[str, Number] | None,
        Allowed("a mapping from names to numbers, or None"),
        Unset("the provider's public prices, with `genai-prices`"),
    ] = Field(
        None,
        description="$ per million tokens as `input`, `cached`, `cache_write` and `output`, or $ per `gpu_hour` and "
        "the number of `gpus`.",
    )
    max_cost: Annotated[
        Positive | None, Allowed("a number of dollars above 0, or None for no limit"), Scope.WHOLE, Flag("DOLLARS")
    ] = Field(None, description="Maximum cost of the run in $. At the limit the run ends as `out of budget`.")
    max_total_tokens: Annotated[Limit, Scope.WHOLE, Flag("N")] = Field(
        None, description="Maximum number of tokens of the run, prompts and answers. It then ends as `out of budget`."
    )
    max_wall_time: Annotated[TimeLimit, Scope.WHOLE, Flag("SECONDS")] = Field(
        None,
        description="Seconds after which the run sends no more requests and ends as `out of budget`. Requests in "
        "flight get a short grace, and are cancelled then.",
    )
    max_outage: Annotated[TimeLimit, Scope.WHOLE, Flag("SECONDS", "seconds a server may be unreachable")] = Field(
        900.0,
        description="Seconds a server may be unreachable before the run ends as `unreachable`; it can be resumed. "
        "`None`: no limit. If no request ever reached the server, the run ends after 30 s.",
    )
    control_requests: Annotated[Switch, Scope.WHOLE] = Field(
        True,
        description="When rows fail and no other row can show why, send the server a request of a few tokens that does "
        "not depend on any row. If it is answered, the rows are at fault; if not, the server is. It is counted by rate "
        "limits and budgets like any other.",
    )
    affinity: OptionalText = Field(
        None,
        description="Field of a row. Of several servers, rows with the same value use the same one, unless it is too "
        "busy: its cache holds their shared prefix ([fleet.md](fleet.md)).",
    )
    hedge: Annotated[Seconds | None, Allowed("a number of seconds above 0, or None for no hedging"), Unset("off")] = (
        Field(
            None,
            description="Seconds after which an unanswered request is also sent to another server with a free slot. "
            "The first answer is used. Needs several servers ([fleet.md](fleet.md)).",
        )
    )
    kvflow: Annotated[bool | Literal["auto"], Allowed('True, False or "auto"')] = Field(
        "auto",
        description="Schedule agents by the server's KV cache: an agent whose context does not fit waits between two "
        "turns. `auto`: the parts that were measured to help; `True`: all parts; `False`: off ([kv.md](kv.md)).",
    )
    cache: Annotated[
        bool | Word | Path,
        Allowed("True, False or a directory"),
        Flag("DIR", "answer repeated requests from disk; write it after SPEC, or as --cache=DIR"),
    ] = Field(
        False,
        description="Answer repeated requests from a cache on disk: `True`, or its directory. Needs `temperature=0` "
        "or a `seed`.",
    )

    # Record and resume
    run_dir: Annotated[Directory, Scope.WHOLE, NotSettable("give --run-dir")] = Field(
        None,
        description="Directory that records the run, so that it can be resumed; or `redis://host:6379/0/NAME`, so that "
        "other machines can join it ([cluster.md](cluster.md)). The older name `checkpoint_dir` also sets `resume`.",
    )
    lease: Annotated[Seconds, Allowed("a number of seconds above 0"), Scope.WHOLE, Flag("SECONDS")] = Field(
        15.0,
        description="For a run in Redis: seconds without a heartbeat after which other workers take a worker's rows.",
    )
    keep: Annotated[Literal["all", "results"], Allowed("all or results"), Scope.WHOLE, Flag("WHAT")] = Field(
        "all", description="For a run in Redis: keep `all` of a finished row, or only `results`, without its turns."
    )
    processes: Annotated[
        Count | Literal["auto"] | None,
        Allowed('a whole number above 0, or "auto" for one per core'),
        Scope.WHOLE,
        Flag("N"),
        Unset("one process"),
    ] = Field(
        None,
        description="Work in this many processes of this machine; the process of the run itself only feeds them. "
        "Functions and classes of the run must be importable ([cluster.md](cluster.md)).",
    )
    feed_only: Annotated[
        Switch, Scope.WHOLE, Flag(None, "only feed rows and collect results; other processes do the work", "no_work")
    ] = Field(
        False, description="For a run in Redis: this process only feeds rows and collects results; others do the work."
    )
    cluster: Annotated[Any, Scope.WHOLE, NotSettable("give --ray", in_files=True)] = Field(
        None,
        description='Cluster whose processes work on the rows: `batch_agent.ray.Ray("auto", workers=8)` '
        "([cluster.md](cluster.md)).",
    )
    resume: Annotated[Switch, Scope.WHOLE, NotSettable("give --resume")] = Field(
        False,
        description="Continue the run recorded in `run_dir`, or start one if there is none. Without `resume`, a "
        "directory that holds a run is refused.",
    )
    retry_failed: Annotated[
        bool | Word | Sequence[Word],
        Allowed("True, False, an error type or a list of them"),
        Scope.WHOLE,
        Unset("all"),
        NotSettable("give --no-retry-failed"),
    ] = Field(
        True,
        description="Failed rows that a resumed run tries again: `True` for all, `False` for none, an error type, or a "
        "list of error types. Unless it is given, rows that people have answered are not tried again.",
    )
    retry_from: Annotated[
        Literal["auto", "start", "failure"],
        Allowed("auto, start or failure"),
        Scope.WHOLE,
        NotSettable("give --from-start or --continue"),
    ] = Field(
        "auto",
        description='Where a failed row is tried again. `"start"`: in a new conversation. `"failure"`: it continues '
        'its recorded conversation. `"auto"`: in a new conversation, unless the cause was outside of the row (an '
        "outage, a rate limit, an exception in your own worker).",
    )
    on_change: Annotated[
        Literal["keep", "resend"] | None,
        Allowed('"keep" or "resend"'),
        Scope.WHOLE,
        Unset("the resume is refused"),
        NotSettable("give --keep-answers or --resend"),
    ] = Field(
        None,
        description="What a resume does if the task, model, schema, tools or rows changed and recorded answers of rows "
        'that still exist would be dropped. `"keep"`: rows keep their recorded answers. `"resend"`: the changed '
        "rows are sent again. By default the resume is refused before anything is sent. The older name "
        '`force_resume=True` means `"keep"`.',
    )

    # How good the answers are
    gold: Annotated[
        Word | Mapping[str, Word] | Path | None,
        Allowed("a column, a mapping from fields to columns, a file with ids, a run that people have audited, or None"),
        Scope.WHOLE,
        Unset("no gold"),
        Flag(
            "COLUMN",
            "column with right answers: COLUMN, FIELD=COLUMN (repeatable), a file with ids, or an audited run",
        ),
    ] = Field(
        None,
        description="Right answers of some rows: a column (for answers with one field or none), a mapping from fields "
        "to columns, a file that is joined by id, or a run that people have audited ([review.md](review.md)). The "
        "agents never see these columns. See [trust.md](trust.md).",
    )
    gold_sample: Annotated[
        Literal["random"] | None,
        Allowed('"random" or None'),
        Scope.WHOLE,
        Unset("rows that you chose"),
        Flag("HOW", "random: the rows with gold are a random sample of all rows"),
    ] = Field(
        None,
        description='How the rows with gold were chosen. `"random"`: they are a random sample of all rows, so that '
        "their score is one of the table.",
    )
    gold_sealed: Annotated[
        Switch, Scope.WHOLE, Flag(None, "keep half of the gold unseen until score --open-sealed")
    ] = Field(
        False,
        description="Keep half of the gold unseen, until `batch-agent score --open-sealed`: for the last "
        "measurement, after prompts were chosen by the other half.",
    )
    tolerance: Annotated[
        Mapping[str, Annotated[Number, Field(ge=0)]] | None,
        Allowed("a mapping from fields to numbers, 0 or more, or None"),
        Scope.WHOLE,
        Unset("1e-9"),
        Flag("FIELD=NUMBER", "how far a number may be from its gold and still be right; repeatable"),
    ] = Field(None, description="How far a number may be from its gold and still be right, by field.")
    score: Annotated[
        Mapping[str, Any] | None,
        Allowed("a mapping from fields to functions, or to their names as module:function, or None"),
        Scope.WHOLE,
        Unset("equality, by the type of the field"),
        Flag("FIELD=MODULE:FUNCTION", "function of answer and gold that decides what is right; repeatable"),
    ] = Field(
        None,
        description="Functions that decide whether an answer is right, by field. Each is called with the answer and "
        "the gold, and returns True or False.",
    )
    by: Annotated[OptionalText, Scope.WHOLE, Unset("all rows together"), Flag("COLUMN")] = Field(
        None, description="Column of the rows: the score is also given per value of it."
    )
    groups: Annotated[OptionalText, Scope.WHOLE, Unset("each row is its own"), Flag("COLUMN")] = Field(
        None,
        description="Column of the rows with the groups by which gold was collected, such as customers. Rows of a "
        "group are alike, so that intervals are wider.",
    )
    require: Annotated[
        Word | Sequence[Word],
        Allowed("a text such as 'mood.accuracy >= 0.9', or a list of them"),
        Scope.WHOLE,
        Unset("nothing"),
        Flag("TEXT", "what the score must show, such as 'mood.accuracy >= 0.9'; else the exit status is 6; repeatable"),
    ] = Field(
        (),
        description="What the score must show: `[FIELD.]METRIC[CLASS] >= NUMBER`. `>=` tests the lower bound, `<=` the "
        "upper. On the command line, the exit status is 6 if it does not.",
    )
    pilot: Annotated[
        Count | None,
        Allowed("a whole number above 0, or None"),
        Scope.WHOLE,
        Unset("no pilot"),
        Flag("N", "run a random sample of N rows first, show what it says of all rows, and ask whether to continue"),
    ] = Field(
        None,
        description="Number of rows that run first: a random sample of the rows, the same in each run and each resume. "
        "A larger pilot contains a smaller one. `run` continues after it, and the command line asks "
        "([trust.md](trust.md)).",
    )
    pilot_key: Annotated[
        OptionalText, Scope.WHOLE, Unset("a constant, so that two prompts are tried on the same rows")
    ] = Field(None, description="Text that decides which rows the pilot has. Another text gives another sample.")
    pilot_only: Annotated[
        Switch, Scope.WHOLE, NotSettable("give --pilot without --yes: it stops after the pilot", in_files=True)
    ] = Field(False, description="Run only the rows of the pilot, and return their results in input order.")

    # People
    overlap: Annotated[
        Number,
        Field(ge=0, le=1),
        Allowed("a share from 0 to 1"),
        Flag("SHARE", "share of the rows that go to two people in a review"),
    ] = Field(
        0.1,
        description="Share of the rows that go to two people in a review, which shows how well they agree "
        "([review.md](review.md)).",
    )
    review_lease: Annotated[
        Seconds, Allowed("a number of seconds above 0"), Flag("SECONDS", "how long a row is a reviewer's own")
    ] = Field(600.0, description="Seconds for which a row that a reviewer gets goes to no other reviewer.")
    promise: Annotated[
        OptionalText,
        Scope.WHOLE,
        Unset("nothing"),
        Flag(
            "TEXT", "what the finished table must keep at 95 %, such as 'label.accuracy >= 0.96'; else the status is 6"
        ),
    ] = Field(
        None,
        description="Share of right rows that the finished table must have, with 95 % confidence: `FIELD.accuracy >= "
        "SHARE`, or `all >= SHARE`. People judge random rows for it, or the gold of a pilot does "
        "([trust.md](trust.md)).",
    )
    max_people: Annotated[Limit, Scope.WHOLE, Flag("N", "most judgements of people for the promise")] = Field(
        None,
        description="Maximum number of judgements of people for a `promise`, second and third ones included. A promise "
        "that cannot be kept within it is `impossible`.",
    )
    people_error: Annotated[
        Annotated[Number, Field(ge=0, lt=1)], Allowed("a number from 0 to below 1"), Scope.WHOLE, Flag("X")
    ] = Field(
        0.02,
        description="Share of the rows repaired by people that count as wrong for a `promise`, until 30 rows were "
        "judged by two people; from then on half of their differences.",
    )
    truth: Annotated[
        Literal["people", "gold", "last"] | None,
        Allowed('"people", "gold", "last" or None'),
        Scope.WHOLE,
        Unset("the gold of the pilot if there is one, and people"),
        Flag("WHOSE", "whose answers a promise is measured by: people, gold (of the pilot) or last (the last model)"),
    ] = Field(
        None,
        description='Whose answers a `promise` is measured by: `"people"`, who do not see the answers of models, '
        '`"gold"`, that of a pilot, or `"last"`, the last of the two models of a cascade, whose threshold is learned '
        "then ([cascade.md](cascade.md#let-the-run-learn-the-threshold)).",
    )
    beacon: Annotated[
        OptionalText, Scope.WHOLE, Unset("none"), Flag("TEXT", "text that changes which rows are audited")
    ] = Field(
        None,
        description="Text that was unknown before the run, such as a published random number. It is part of the "
        "key that draws the audited rows of a `promise`, and is refused once one is recorded.",
    )

    # Events and metrics
    sinks: Annotated[
        Sequence[Callable[..., Any]],
        Allowed("a list of functions of an event"),
        Scope.WHOLE,
        NotSettable("they are Python functions; --events FILE writes the events", in_files=True),
    ] = Field((), description="Functions that are called with each event of the run: [events.md](events.md).")
    events: Annotated[Word | Path | None, Allowed("a file, or None"), Scope.WHOLE, Flag("FILE")] = Field(
        None, description="File to which each event is appended as a line of JSON: [events.md](events.md)."
    )
    metrics_port: Annotated[
        Annotated[NotNegative, Field(le=65535)] | Word | None,
        Allowed("a port from 0 to 65535, or HOST:PORT"),
        Scope.WHOLE,
        Unset("none"),
        Flag("PORT", "serve metrics for Prometheus at this port; 0: a free port"),
    ] = Field(
        None,
        description="Port that serves metrics for Prometheus, on this machine only unless it is `HOST:PORT`. `0`: a "
        "free port, which is printed. See [metrics.md](metrics.md).",
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
        Count | None, Allowed(f"a whole number above 0{TO_THE_SERVER}"), Scope.STAGE, SERVERS, Flag("N")
    ] = Field(None, description="Maximum number of tokens of one answer.")
    truncated: Annotated[Literal["keep", "fail"], Allowed("keep or fail"), Scope.STAGE] = Field(
        "keep",
        description='What happens to free text that was cut at `max_tokens`. `"keep"`: the text is the output, and '
        'the result is marked `truncated`. `"fail"`: the row fails with `Truncated`. With `output_schema`, it always '
        "fails.",
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
    ] = Field(None, description="Nucleus sampling: total probability of the tokens to choose from.")
    seed: Annotated[Whole | None, Allowed(f"a whole number{TO_THE_SERVER}"), Compared.VALUE, SERVERS] = Field(
        None, description="Sampling seed."
    )
    stop: Annotated[Texts, Scope.STAGE, Compared.VALUE, SERVERS] = Field(
        None, description="Strings that end an answer."
    )
    extra_body: Annotated[Mapping[str, JsonValue], Allowed("a mapping from names to JSON values"), Compared.HASH] = (
        Field(
            {},
            description="Fields added to each request body unchanged. They override the fields of other options; "
            "`messages` and `stream` are refused.",
        )
    )
    nvext_agent_hints: Switch = Field(
        True,
        description="Send scheduling hints to a server that uses them (`dynamo://`): how near its end an agent is, "
        "and how long its answers usually are. See [backends.md](backends.md).",
    )
    streaming_tool_dispatch: Switch = Field(
        True,
        description="Start a read-only tool as soon as its call is complete, while the model still writes. Answers are "
        "streamed for this only while it saves time.",
    )
    predictive_prewarm: Annotated[bool | Word | Path, Allowed("True, False or the directory of an earlier run")] = (
        Field(
            False,
            description="Start the tool calls of an earlier run before the model asks for them: the directory of that "
            "run, or `True` for the run in `run_dir`. Only for cacheable tools. See [tools.md](tools.md).",
        )
    )
    prewarm_max_age: Annotated[Seconds, Allowed("a number of seconds above 0")] = Field(
        60.0, description="Seconds for which a tool result of `predictive_prewarm` stays valid."
    )

    # The prompt
    no_hoist: Annotated[Switch, Flag()] = Field(
        False, description="Do not move long values that all rows share to the system prompt."
    )
    strip_preamble: Switch = Field(
        True,
        description="Remove `x-anthropic-*:` and `x-amz-*:` lines from the start of the system prompt: they differ in "
        "each session and defeat prefix caches.",
    )

    # The context
    model_max_context: Annotated[Limit, Unset("from the server, if it reports it")] = Field(
        None,
        description="Context of the model in tokens. With it, a row that cannot fit fails as `OVERSIZED` (estimated at "
        "four bytes per token), unless `oversized` says otherwise. Without it, the server decides what fits.",
    )
    min_response_tokens: Annotated[Count, Allowed("a whole number above 0")] = Field(
        256, description="Tokens of the context that are reserved for the answer."
    )
    oversized: Annotated[Literal["fail", "chunk", "truncate"], Allowed("fail, chunk or truncate")] = Field(
        "fail",
        description='What happens to a row that cannot fit. `"fail"`: it fails. `"chunk"`: its longest field is '
        'processed in parts, and the answers are merged. `"truncate"`: only the beginning of that field is sent. The '
        "last two need the context size, from `model_max_context` or from the server.",
    )
    compaction: Annotated[Literal["auto", "off"] | Callable[..., Any], Allowed("auto, off, or a function")] = Field(
        "auto",
        description='Shorten a conversation that is about to exceed the context: `"auto"`, `"off"`, or a function '
        "(may be async) that gets the messages to remove and returns the text that replaces them.",
    )
    compaction_backend: Any = Field(
        None, description="Backend of the model that writes the text for `compaction`, like `backend`.", repr=False
    )
    compaction_model: OptionalText = Field(
        None, description="Model that writes the text for `compaction`; without `compaction_backend`, on `backend`."
    )

    def __init__(self, **options: Any) -> None:
        if options.get("checkpoint_dir") is not None:
            options.setdefault("resume", True)  # `checkpoint_dir` always resumed
        if isinstance(force := options.get("force_resume"), bool):
            options["force_resume"] = "keep" if force else None
        for old, new in OLD_NAMES.items():
            if old in options:
                options.setdefault(new, options.pop(old))  # if both are given, the new name wins
        check_names(BatchSpec, options, OLD_NAMES)
        for name in ("task", "inputs"):
            if name not in options and not (name == "task" and options.get("worker") is not None):
                raise SpecError(f"{name} is missing: {MISSING[name]}")
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
        """Return whether the user gave the option. Used for options whose default differs from None."""
        return name in self.model_fields_set

    @property
    def turn_limit(self) -> int | None:
        if self.given("max_turns"):
            return self.max_turns
        return 10 if self.tools else 1
