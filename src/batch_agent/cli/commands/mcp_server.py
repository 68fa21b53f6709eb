"""The tools of ``batch-agent mcp``, and the batches that they start. This module needs the package ``mcp``."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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

# Batches that a coding agent starts: each has its own run directory and process. The process is a detached
# `batch-agent run`. It continues when the MCP server ends, and another server finds it by its directory. All state
# is read from the run directory; only the child processes to reap are kept in memory.

SPEC, ROWS, LOG = "spec.json", "rows.jsonl", "log.txt"
LOG_CHARACTERS = 2000  # shown from the end of a process's log
SHOWN_CHARACTERS = 20_000  # shown of one row's output


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The arguments of a batch."""

    instruction: str
    rows: Sequence[Mapping[str, JsonValue]] | None = None
    path: str | None = None
    id_column: str | None = None
    output_schema: JsonObject | None = None
    output_path: str | None = None
    max_concurrency: int | None = None
    max_cost: float | None = None
    max_rows: int | None = None
    model: str | None = None
    system_prompt: str | None = None
    runtime: str | None = None

    def check(self) -> None:
        if (self.rows is None) == (self.path is None):
            raise SpecError("give either rows or path, the path of a CSV or JSONL file")
        if self.max_cost is None and self.max_rows is None:
            raise SpecError("a limit is required: give max_cost, in dollars, or max_rows")
        if self.max_rows is not None and self.max_rows < 1:
            raise SpecError("max_rows must be above 0")


@dataclass(slots=True)
class Batches:
    """The batches below ``directory``. ``options`` are added to the spec of each: the backend, the model."""

    directory: Path
    options: JsonObject = field(default_factory=dict)
    max_cost: float | None = None  # maximum cost of one batch
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def prepare(self, request: BatchRequest) -> str:
        """Write the spec of a new batch and return its name. Raises SpecError if the request is invalid."""
        request.check()
        name = f"mcp-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        place = self.directory / name
        place.mkdir(DIRECTORY, parents=True)
        try:
            (place / SPEC).write_bytes(to_json(self._spec(request, place)))
        except BaseException:
            self.discard(name)
            raise
        return name

    def _spec(self, request: BatchRequest, place: Path) -> dict[str, object]:
        spec: dict[str, object] = {**self.options, "task": request.instruction, "inputs": self._inputs(request, place)}
        for option, value in (
            ("output_schema", request.output_schema),
            ("max_inflight", request.max_concurrency),
            ("model", request.model),
            ("system_prompt", request.system_prompt),
            ("runtime", request.runtime),
            ("id_column", request.id_column),
            ("max_cost", _least(request.max_cost, self.max_cost)),
        ):
            if value is not None:
                spec[option] = value
        return spec

    def _inputs(self, request: BatchRequest, place: Path) -> str:
        """Return the file of rows: the given one, or one that is written beside the spec."""
        if request.path is not None:
            return str(Path(request.path).absolute())
        with (place / ROWS).open("wb") as file:
            file.writelines(to_json(row) + b"\n" for row in request.rows or ())
        return ROWS

    def plan(self, name: str, max_rows: int | None) -> JsonObject:
        """Return the plan of a prepared batch. Raises SpecError if it cannot start."""
        command = [*_command("run", str(self.directory / name / SPEC), "--dry-run", "--json"), *_limit(max_rows)]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SpecError(_words(done.stderr))
        plan: JsonObject = json.loads(done.stdout)
        plan.pop("first_prompt_pieces", None)
        return plan

    def discard(self, name: str) -> None:
        """Delete a batch that was only planned."""
        shutil.rmtree(self.directory / name)

    def start(self, name: str, request: BatchRequest) -> None:
        place = self.directory / name
        arguments = ["run", str(place / SPEC), "--run-dir", str(place), "--json", *_limit(request.max_rows)]
        if request.output_path is not None:
            arguments += ["--output", str(Path(request.output_path).absolute())]
        self._spawn(name, arguments)

    def resume(self, name: str, max_cost: float | None) -> None:
        place = self._place(name)
        if is_locked(place / LOCK):
            raise SpecError(f"{name} is running")
        cost = _least(max_cost, self.max_cost) if max_cost is not None else None
        more = [] if cost is None else ["--max-cost", str(cost)]
        self._spawn(name, ["resume", str(place), "--json", *more])

    def stop(self, name: str, *, now: bool) -> None:
        """Stop a batch. Running agents finish, unless ``now`` is True. Raises NotAlive if it is not running."""
        asyncio.run(ask(self._place(name), {"do": "cancel" if now else "drain"}))

    def status(self, name: str) -> JsonObject:
        """Return the status of a batch. ``state`` is ``starting`` until its record exists."""
        place, child = self._place(name), self._children.get(name)
        alive = child is not None and child.poll() is None
        if child is not None and not alive:
            del self._children[name]
        if not (place / RUN).exists():
            locked = bool(is_locked(place / LOCK))
            if alive or locked:
                return {"batch": name, "state": "starting"}
            return {"batch": name, "state": "failed", "why": self._log(name)}
        status = status_json(look(place))
        if alive:  # also before a resume starts, and while the last lines are written
            status["state"] = "running"
        status.pop("summary", None)
        if status["state"] == "failed":
            status.setdefault("log", self._log(name))
        return {"batch": name, "run_dir": str(place), **status}

    def results(self, name: str, offset: int, limit: int, *, failed_only: bool) -> JsonObject:
        """Return ``limit`` finished rows in input order, from ``offset`` on."""
        place = self._place(name)
        with open_run(place) as run:
            records = (record for record in run.rows if not failed_only or not record.get("ok"))
            page = list(islice(records, offset, offset + limit + 1))
        return {
            "batch": name,
            "rows": [_shown(cast("JsonObject", record)) for record in page[:limit]],
            "next_offset": offset + limit if len(page) > limit else None,
        }

    def show(self, name: str, row: str, *, full: bool) -> str:
        command = _command("show", str(self._place(name)), f"--row={row}", *(["--full"] if full else []))
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        text = done.stdout.decode(errors="replace").strip()
        if done.returncode or not text:
            raise SpecError(_words(done.stderr) or f"there is no row {row}")
        return text

    def _place(self, name: str) -> Path:
        place = self.directory / name
        if place.parent != self.directory or not (place / SPEC).exists():
            known = sorted(path.parent.name for path in self.directory.glob(f"*/{SPEC}"))
            raise SpecError(f"there is no batch {name!r}; there are {', '.join(known[-20:]) or 'none'}")
        return place

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        with (self.directory / name / LOG).open("ab") as log:
            self._children[name] = subprocess.Popen(
                _command(*arguments),
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


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "batch_agent", *arguments]


def _words(stderr: bytes) -> str:
    """Return the end of a command's messages."""
    return stderr.decode(errors="replace").strip().removeprefix("batch-agent: ")[-LOG_CHARACTERS:]


def _limit(max_rows: int | None) -> list[str]:
    return [] if max_rows is None else ["--limit", str(max_rows)]


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _shown(record: JsonObject) -> JsonObject:
    shown: JsonObject = {name: record.get(name) for name in ("index", "job_id", "ok", "output")}
    if not record.get("ok"):
        shown["error"] = record.get("error")
    if len(to_json(shown["output"])) > SHOWN_CHARACTERS:
        cut = record["output"] if isinstance(record["output"], str) else to_json(record["output"]).decode()
        shown["output"] = f"{cut[:SHOWN_CHARACTERS]}... (cut; show_row or the results file has the full text)"
    return shown


T = TypeVar("T")
Json = dict[str, JsonValue]

EVERY = 1.0  # seconds between two checks of a batch: another process cannot be awaited
LONGEST_WAIT = 3600.0
INSTRUCTIONS = """\
Runs one instruction over many rows with a language model, as a batch: plan_batch, then start_batch, then batch_status
until it ends, then batch_results. A batch continues when this server ends; resume_batch continues an interrupted
batch. Finished rows are never sent again."""

Instruction = Annotated[str, Field(description="The message for each row; {column} becomes its value.")]
Rows = Annotated[list[Json] | None, Field(description="The rows, as objects. Or give path.")]
InputPath = Annotated[str | None, Field(description="A CSV, TSV, JSONL or Parquet file of rows. Or give rows.")]
IdColumn = Annotated[str | None, Field(description="The column that identifies a row in results.")]
OutputSchema = Annotated[Json | None, Field(description="JSON schema of each answer. Default: free text.")]
OutputPath = Annotated[str | None, Field(description="A .csv, .jsonl or .parquet file for the results.")]
Concurrency = Annotated[int | None, Field(description="Maximum number of model calls in flight.", ge=1)]
MaxCost = Annotated[float | None, Field(description="Maximum cost in dollars. This or max_rows is required.", gt=0)]
MaxRows = Annotated[int | None, Field(description="Use only the first rows. This or max_cost is required.", ge=1)]
Model = Annotated[str | None, Field(description="The model. Default: that of this server.")]
System = Annotated[str | None, Field(description="Text that all rows share: role, rules, reference text.")]
RuntimeName = Annotated[str | None, Field(description="A command-line agent that works on each row, such as opencode.")]
BatchName = Annotated[str, Field(description="Name of the batch, from start_batch.")]
Wait = Annotated[
    float,
    Field(description="Seconds to wait for the batch to end; progress is reported meanwhile.", ge=0, le=LONGEST_WAIT),
]


def make_server(batches: Batches) -> MCPServer[Any]:
    """Return the server with its tools."""
    server: MCPServer[Any] = MCPServer("batch-agent", version=__version__, instructions=INSTRUCTIONS)
    tools = BatchTools(batches)
    reads = ToolAnnotations(read_only_hint=True)
    changes = ToolAnnotations(read_only_hint=False, destructive_hint=False)
    functions: list[tuple[Callable[..., Any], ToolAnnotations]] = [
        (tools.plan_batch, reads),
        (tools.start_batch, changes),
        (tools.batch_status, reads),
        (tools.batch_results, reads),
        (tools.show_row, reads),
        (tools.stop_batch, changes),
        (tools.resume_batch, changes),
    ]
    for function, hints in functions:
        server.add_tool(function, annotations=hints)
    return server


class BatchTools:
    """The tools for a coding agent. It reads their signatures and docstrings."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def plan_batch(
        self,
        instruction: Instruction,
        rows: Rows = None,
        path: InputPath = None,
        id_column: IdColumn = None,
        output_schema: OutputSchema = None,
        max_cost: MaxCost = None,
        max_rows: MaxRows = None,
        model: Model = None,
        system_prompt: System = None,
        runtime: RuntimeName = None,
    ) -> Json:
        """Check a batch and return its plan: rows, tokens, cost, the first prompt. Sends nothing."""
        request = BatchRequest(
            instruction=instruction,
            rows=rows,
            path=path,
            id_column=id_column,
            output_schema=output_schema,
            max_cost=max_cost,
            max_rows=max_rows,
            model=model,
            system_prompt=system_prompt,
            runtime=runtime,
        )

        def plan() -> Json:
            name = self._batches.prepare(request)
            try:
                return self._batches.plan(name, max_rows)
            finally:
                self._batches.discard(name)

        return await _beside(plan)

    async def start_batch(
        self,
        ctx: Context[Any, Any],
        instruction: Instruction,
        rows: Rows = None,
        path: InputPath = None,
        id_column: IdColumn = None,
        output_schema: OutputSchema = None,
        output_path: OutputPath = None,
        max_concurrency: Concurrency = None,
        max_cost: MaxCost = None,
        max_rows: MaxRows = None,
        model: Model = None,
        system_prompt: System = None,
        runtime: RuntimeName = None,
        wait_seconds: Wait = 0,
    ) -> Json:
        """Run an instruction over rows, one answer each. Returns the batch's name and state at once, or after waiting.

        The batch runs in its own process and is recorded in a directory, so it survives this server.
        """
        request = BatchRequest(
            instruction=instruction,
            rows=rows,
            path=path,
            id_column=id_column,
            output_schema=output_schema,
            output_path=output_path,
            max_concurrency=max_concurrency,
            max_cost=max_cost,
            max_rows=max_rows,
            model=model,
            system_prompt=system_prompt,
            runtime=runtime,
        )

        def start() -> str:
            name = self._batches.prepare(request)
            try:
                self._batches.plan(name, max_rows)  # errors are reported now, not only in a log
            except BaseException:
                self._batches.discard(name)
                raise
            self._batches.start(name, request)
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
        return await _beside(lambda: self._batches.results(batch, offset, limit, failed_only=failed_only))

    async def show_row(
        self,
        batch: BatchName,
        row: Annotated[str, Field(description="The row's id, or its position in the inputs, from 0.")],
        full: Annotated[bool, Field(description="Do not cut long texts.")] = False,
    ) -> str:
        """Return the conversation of one row: prompts, answers, tool calls, errors, times and tokens."""
        return await _beside(lambda: self._batches.show(batch, row, full=full))

    async def stop_batch(
        self,
        ctx: Context[Any, Any],
        batch: BatchName,
        now: Annotated[bool, Field(description="Also stop running rows.")] = False,
        wait_seconds: Wait = 30,
    ) -> Json:
        """Stop a batch: no new row starts, running rows finish. resume_batch continues it."""
        await _beside(lambda: self._batches.stop(batch, now=now))
        return await self._waited(batch, wait_seconds, ctx)

    async def resume_batch(
        self, ctx: Context[Any, Any], batch: BatchName, max_cost: MaxCost = None, wait_seconds: Wait = 0
    ) -> Json:
        """Continue a batch that was stopped, interrupted or out of budget. Failed rows are retried."""
        await _beside(lambda: self._batches.resume(batch, max_cost))
        return await self._waited(batch, wait_seconds, ctx)

    async def _waited(self, batch: str, seconds: float, ctx: Context[Any, Any]) -> Json:
        """Return the status of the batch when it has ended, or after ``seconds``."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            status = await _beside(lambda: self._batches.status(batch))
            left = until - asyncio.get_running_loop().time()
            if status["state"] not in ("starting", "running") or left <= 0:
                return status
            rows = cast("Json", status.get("rows") or {})
            done, total = rows.get("done"), rows.get("total")
            if isinstance(done, int):
                words = f"{done} rows done, {rows.get('failed')} failed"
                await ctx.report_progress(done, total if isinstance(total, int) else None, words)
            await asyncio.sleep(min(EVERY, left))


async def _beside(function: Callable[[], T]) -> T:
    """Run a blocking function in a thread and return its result. Our errors become errors that the agent reads."""
    try:
        return await asyncio.to_thread(function)
    except BatchAgentError as error:
        raise ToolError(str(error)) from None
