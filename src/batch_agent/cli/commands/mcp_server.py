"""The tools of ``batch-agent mcp``. This module needs the package ``mcp``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field, JsonValue

from batch_agent.cli.commands.mcp_batches import Batches, BatchRequest
from batch_agent.errors import BatchAgentError
from batch_agent.version import __version__

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
