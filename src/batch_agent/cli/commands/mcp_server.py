"""The tools of ``batch-agent mcp``, and the batches that they start. This module needs the package ``mcp``."""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field, JsonValue

from batch_agent.cli.commands.status import status_json
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.record.control import ask
from batch_agent.record.lock import is_locked
from batch_agent.record.private import DIRECTORY
from batch_agent.record.reader import look, open_run
from batch_agent.record.rundir import LOCK, RUN
from batch_agent.version import __version__

SPEC = "spec.json"
ROWS = "rows.jsonl"
LOG = "log.txt"
LOG_CHARACTERS = 2000  # shown from the end of a process's log
SHOWN_CHARACTERS = 20_000  # shown of one row's output
EVERY = 1.0  # seconds between two checks of a batch: another process cannot be awaited
LONGEST_WAIT = 3600.0
INSTRUCTIONS = """\
Runs one instruction over many rows with a language model, as a batch: plan_batch, then start_batch, then batch_status
until it ends, then batch_results. A batch continues when this server ends; resume_batch continues an interrupted
batch. Finished rows are never sent again."""

T = TypeVar("T")
Tool = TypeVar("Tool", bound=Callable[..., Any])
Json = dict[str, JsonValue]
BatchName = Annotated[str, Field(description="Name of the batch, from start_batch.")]
MaxCost = Annotated[float | None, Field(description="Maximum cost in dollars. This or max_rows is required.", gt=0)]
Wait = Annotated[
    float,
    Field(description="Seconds to wait for the batch to end; progress is reported meanwhile.", ge=0, le=LONGEST_WAIT),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The arguments of a batch, with the descriptions that a coding agent reads."""

    instruction: Annotated[str, Field(description="The message for each row; {column} becomes its value.")]
    rows: Annotated[list[Json] | None, Field(description="The rows, as objects. Or give path.")] = None
    path: Annotated[str | None, Field(description="A CSV, TSV, JSONL or Parquet file of rows. Or give rows.")] = None
    id_column: Annotated[str | None, Field(description="The column that identifies a row in results.")] = None
    output_schema: Annotated[Json | None, Field(description="JSON schema of each answer. Default: free text.")] = None
    output_path: Annotated[str | None, Field(description="A .csv, .jsonl, .parquet or .xlsx file for the results.")] = (
        None
    )
    max_concurrency: Annotated[int | None, Field(description="Maximum number of model calls in flight.", ge=1)] = None
    max_cost: MaxCost = None
    max_rows: Annotated[
        int | None, Field(description="Use only the first rows. This or max_cost is required.", ge=1)
    ] = None
    model: Annotated[str | None, Field(description="The model. Default: that of this server.")] = None
    system_prompt: Annotated[
        str | None, Field(description="Text that all rows share: role, rules, reference text.")
    ] = None
    runtime: Annotated[
        str | None, Field(description="A command-line agent that works on each row, such as opencode.")
    ] = None

    def check(self) -> None:
        if (self.rows is None) == (self.path is None):
            raise SpecError("give either rows or path, the path of a CSV or JSONL file")
        if self.max_cost is None and self.max_rows is None:
            raise SpecError("a limit is required: give max_cost, in dollars, or max_rows")


def takes_batch(*omitted: str) -> Callable[[Tool], Tool]:
    """Return a decorator for a tool with ``**batch``: a client sees the arguments of a BatchRequest in its place."""

    def decorate(tool: Tool) -> Tool:
        own = inspect.signature(tool, eval_str=True)
        batch = inspect.signature(BatchRequest, eval_str=True).parameters.values()
        named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        first = [each for each in named if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        between = [each for each in batch if each.name not in omitted]
        tool.__dict__["__signature__"] = own.replace(parameters=[*first, *between, *named[len(first) :]])
        return tool

    return decorate


@dataclass(slots=True)
class Batches:
    """The batches below ``directory``, and the tools for a coding agent, which reads their signatures and docstrings.
    ``options`` are added to the spec of each batch: the backend, the model.

    Each batch has a run directory, and a process of its own, a detached `batch-agent run`. It continues when the MCP
    server ends, and another server finds it by its directory. All state is read from the run directory; only the child
    processes to reap are kept in memory.
    """

    directory: Path
    options: JsonObject = field(default_factory=dict)
    max_cost: float | None = None  # maximum cost of one batch
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @takes_batch("output_path", "max_concurrency")
    async def plan_batch(self, **batch: Any) -> Json:
        """Check a batch and return its plan: rows, tokens, cost, the first prompt. Sends nothing."""
        request = BatchRequest(**batch)

        def plan() -> Json:
            name = self._prepare(request)
            try:
                return self._plan(name, request)
            finally:
                self._discard(name)

        return await _beside(plan)

    @takes_batch()
    async def start_batch(self, ctx: Context[Any, Any], *, wait_seconds: Wait = 0, **batch: Any) -> Json:
        """Run an instruction over rows, one answer each. Returns the batch's name and state at once, or after waiting.

        The batch runs in its own process and is recorded in a directory, so it survives this server.
        """
        request = BatchRequest(**batch)

        def start() -> str:
            name = self._prepare(request)
            try:
                self._plan(name, request)  # errors are reported now, not only in a log
            except BaseException:
                self._discard(name)
                raise
            place = self.directory / name
            output = [] if request.output_path is None else ["--output", str(Path(request.output_path).absolute())]
            self._spawn(name, "run", str(place / SPEC), "--run-dir", str(place), *_limit(request), *output)
            return name

        return await self._waited(await _beside(start), wait_seconds, ctx)

    async def batch_status(self, ctx: Context[Any, Any], batch: BatchName, wait_seconds: Wait = 0) -> Json:
        """Return the progress of a batch: state (starting, running, complete, interrupted, failed, out of budget,
        unreachable), rows done and failed, rate, tokens, cost."""
        return await self._waited(batch, wait_seconds, ctx)

    async def batch_results(
        self,
        batch: BatchName,
        offset: Annotated[int, Field(description="Skip this many rows.", ge=0)] = 0,
        limit: Annotated[int, Field(description="Rows to return.", ge=1, le=200)] = 20,
        failed_only: Annotated[bool, Field(description="Only rows that failed, with their errors.")] = False,
    ) -> Json:
        """Return results of a batch in the order of its rows, also while it runs. next_offset is null at the end."""

        def read() -> Json:
            with open_run(self._place(batch)) as run:
                records = (record for record in run.rows if not failed_only or not record.get("ok"))
                page = list(islice(records, offset, offset + limit + 1))
            rows: list[JsonValue] = [_shown(cast("JsonObject", record)) for record in page[:limit]]
            return {"batch": batch, "rows": rows, "next_offset": offset + limit if len(page) > limit else None}

        return await _beside(read)

    async def show_row(
        self,
        batch: BatchName,
        row: Annotated[str, Field(description="The row's id, or its position in the inputs, from 0.")],
        full: Annotated[bool, Field(description="Do not cut long texts.")] = False,
    ) -> str:
        """Return the conversation of one row: prompts, answers, tool calls, errors, times and tokens."""

        def show() -> str:
            shown = _output("show", str(self._place(batch)), f"--row={row}", *(["--full"] if full else []))
            if not shown:
                raise SpecError(f"there is no row {row}")
            return shown

        return await _beside(show)

    async def stop_batch(
        self,
        ctx: Context[Any, Any],
        batch: BatchName,
        now: Annotated[bool, Field(description="Also stop running rows.")] = False,
        wait_seconds: Wait = 30,
    ) -> Json:
        """Stop a batch: no new row starts, running rows finish. resume_batch continues it."""
        await _beside(lambda: asyncio.run(ask(self._place(batch), {"do": "cancel" if now else "drain"})))
        return await self._waited(batch, wait_seconds, ctx)

    async def resume_batch(
        self, ctx: Context[Any, Any], batch: BatchName, max_cost: MaxCost = None, wait_seconds: Wait = 0
    ) -> Json:
        """Continue a batch that was stopped, interrupted or out of budget. Failed rows are retried."""

        def resume() -> None:
            place = self._place(batch)
            if is_locked(place / LOCK):
                raise SpecError(f"{batch} is running")
            more = [] if max_cost is None else ["--max-cost", str(self._capped(max_cost))]
            self._spawn(batch, "resume", str(place), *more)

        await _beside(resume)
        return await self._waited(batch, wait_seconds, ctx)

    async def _waited(self, batch: str, seconds: float, ctx: Context[Any, Any]) -> Json:
        """Return the status of the batch when it has ended, or after ``seconds``."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            status = await _beside(lambda: self._status(batch))
            left = until - asyncio.get_running_loop().time()
            if status["state"] not in ("starting", "running") or left <= 0:
                return status
            rows = cast("Json", status.get("rows") or {})
            done, total = rows.get("done"), rows.get("total")
            if isinstance(done, int):
                words = f"{done} rows done, {rows.get('failed')} failed"
                await ctx.report_progress(done, total if isinstance(total, int) else None, words)
            await asyncio.sleep(min(EVERY, left))

    # Blocking parts of the tools

    def _prepare(self, request: BatchRequest) -> str:
        """Write the spec of a new batch and return its name. Raises SpecError if the request is invalid."""
        request.check()
        name = f"mcp-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        place = self.directory / name
        place.mkdir(DIRECTORY, parents=True)
        try:
            (place / SPEC).write_bytes(to_json(self._spec(request, place)))
        except BaseException:
            self._discard(name)
            raise
        return name

    def _spec(self, request: BatchRequest, place: Path) -> dict[str, object]:
        """Return the spec of a batch. Given rows are written beside it."""
        inputs = ROWS if request.path is None else str(Path(request.path).absolute())
        if request.path is None:
            with (place / ROWS).open("wb") as file:
                file.writelines(to_json(row) + b"\n" for row in request.rows or ())
        given = {
            "output_schema": request.output_schema,
            "max_inflight": request.max_concurrency,
            "model": request.model,
            "system_prompt": request.system_prompt,
            "runtime": request.runtime,
            "id_column": request.id_column,
            "max_cost": self._capped(request.max_cost),
        }
        known = {option: value for option, value in given.items() if value is not None}
        return {**self.options, "task": request.instruction, "inputs": inputs, **known}

    def _capped(self, cost: float | None) -> float | None:
        return min((each for each in (cost, self.max_cost) if each is not None), default=None)

    def _plan(self, name: str, request: BatchRequest) -> JsonObject:
        """Return the plan of a prepared batch. Raises SpecError if it cannot start."""
        plan: JsonObject = json.loads(
            _output("run", str(self.directory / name / SPEC), "--dry-run", "--json", *_limit(request))
        )
        plan.pop("first_prompt_pieces", None)
        return plan

    def _discard(self, name: str) -> None:
        """Delete a batch that was only planned."""
        shutil.rmtree(self.directory / name)

    def _status(self, name: str) -> JsonObject:
        """Return the status of a batch. ``state`` is ``starting`` until its record exists."""
        place, child = self._place(name), self._children.get(name)
        alive = child is not None and child.poll() is None
        if child is not None and not alive:
            del self._children[name]
        if not (place / RUN).exists():
            if alive or is_locked(place / LOCK):
                return {"batch": name, "state": "starting"}
            return {"batch": name, "state": "failed", "why": self._log(name)}
        status = status_json(look(place))
        if alive:  # also before a resume starts, and while the last lines are written
            status["state"] = "running"
        status.pop("summary", None)
        if status["state"] == "failed":
            status.setdefault("log", self._log(name))
        return {"batch": name, "run_dir": str(place), **status}

    def _place(self, name: str) -> Path:
        place = self.directory / name
        if place.parent != self.directory or not (place / SPEC).exists():
            known = sorted(path.parent.name for path in self.directory.glob(f"*/{SPEC}"))
            raise SpecError(f"there is no batch {name!r}; there are {', '.join(known[-20:]) or 'none'}")
        return place

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.directory / name / LOG).open("ab") as log:
            self._children[name] = subprocess.Popen(
                _command(*arguments, "--json"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # it survives this server, and does not get its Ctrl-C
            )

    def _log(self, name: str) -> str:
        try:
            return _words((self.directory / name / LOG).read_bytes())
        except OSError:
            return ""


def make_server(batches: Batches) -> MCPServer[Any]:
    """Return the server with its tools."""
    server: MCPServer[Any] = MCPServer("batch-agent", version=__version__, instructions=INSTRUCTIONS)
    reads = ToolAnnotations(read_only_hint=True)
    changes = ToolAnnotations(read_only_hint=False, destructive_hint=False)
    functions: Sequence[tuple[Callable[..., Any], ToolAnnotations]] = (
        (batches.plan_batch, reads),
        (batches.start_batch, changes),
        (batches.batch_status, reads),
        (batches.batch_results, reads),
        (batches.show_row, reads),
        (batches.stop_batch, changes),
        (batches.resume_batch, changes),
    )
    for function, hints in functions:
        server.add_tool(function, annotations=hints)
    return server


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "batch_agent", *arguments]


def _output(*arguments: str) -> str:
    """Return the output of a command. Raises SpecError with its messages if it fails."""
    done = subprocess.run(_command(*arguments), capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SpecError(_words(done.stderr))
    return done.stdout.decode(errors="replace").strip()


def _words(stderr: bytes) -> str:
    """Return the end of a command's messages."""
    return stderr.decode(errors="replace").strip().removeprefix("batch-agent: ")[-LOG_CHARACTERS:]


def _limit(request: BatchRequest) -> list[str]:
    return [] if request.max_rows is None else ["--limit", str(request.max_rows)]


def _shown(record: JsonObject) -> JsonObject:
    shown: JsonObject = {name: record.get(name) for name in ("index", "job_id", "ok", "output")}
    if not record.get("ok"):
        shown["error"] = record.get("error")
    if len(to_json(shown["output"])) > SHOWN_CHARACTERS:
        cut = record["output"] if isinstance(record["output"], str) else to_json(record["output"]).decode()
        shown["output"] = f"{cut[:SHOWN_CHARACTERS]}... (cut; show_row or the results file has the full text)"
    return shown


async def _beside(function: Callable[[], T]) -> T:
    """Run a blocking function in a thread and return its result. Our errors become errors that the agent reads."""
    try:
        return await asyncio.to_thread(function)
    except BatchAgentError as error:
        raise ToolError(str(error)) from None
