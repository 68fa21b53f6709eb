"""A run as a stage of Ray Data: it takes a lazy ``Dataset`` and returns a ``Dataset`` with the results as columns.

One actor holds the run. The tasks of the stage send their batches to it and wait for the results, so all of them share
one record and one budget. The run ends when no batch has arrived for a while. If another batch arrives later, the run
continues from its record. So if the run is recorded and the dataset is consumed again, no recorded row is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from batch_agent.api import BatchAgent
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BatchAgentError, Invalid, SpecError, StoreError
from batch_agent.files.compression import extra
from batch_agent.files.inputs import rows_of_frame
from batch_agent.files.results import from_json, result_line, unwritten
from batch_agent.files.tables import OWN, Column, Record, Type
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.ray.workers import Ray, ray_package

if TYPE_CHECKING:
    import ray.data

BATCH_ROWS, BATCHES = 256, 8  # rows per batch, and batches at once
IDLE_SECONDS = 2.0  # the run ends after this time without a batch
TYPES: dict[str, Type] = {"boolean": "bool", "integer": "int", "number": "float", "string": "text"}


def map_dataset(
    dataset: ray.data.Dataset,
    *,
    cluster: Ray | None = None,
    batch_size: int = BATCH_ROWS,
    concurrency: int = BATCHES,
    **options: Any,
) -> ray.data.Dataset:
    """Return the dataset with a result for each row. Raises SpecError.

    The new columns are ``ok``, ``output`` or ``output.FIELD`` for each field of the schema, ``error_type``,
    ``error_message``, and tokens, cost and time. The dataset is lazy: no request is sent before it is consumed.

    ``options`` are those of ``BatchAgent.run``, without ``inputs``. At most ``batch_size`` times ``concurrency`` rows
    run at once. With ``cluster`` the run has workers on the cluster; without it, it has one process.
    """
    if "inputs" in options:
        raise SpecError("inputs: the rows are those of the dataset")
    BatchAgent.plan(**options, inputs=[])  # raises for wrong options
    ray = ray_package()
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )  # the user's node, on which a run directory has the path that the user means
    if cluster is not None:
        options["cluster"] = cluster
    actor = ray.remote(DatasetRun).options(num_cpus=0, scheduling_strategy=place, max_concurrency=1000).remote(options)
    columns = result_columns(options.get("output_schema"))

    def stage(table: Any) -> Any:
        rows = rows_of_frame(table)
        assert rows is not None
        return with_results(table, columns, ray_package().get(actor.work.remote(list(rows))))

    return dataset.map_batches(
        stage, batch_size=batch_size, batch_format="pyarrow", concurrency=concurrency, num_cpus=0.01
    )


def result_columns(output_schema: object) -> list[Column]:
    """Return the columns of results, which are the same for every batch."""
    schema = OutputSchema.of(output_schema)
    properties = None if schema is None else schema.json_schema.get("properties")
    if not isinstance(properties, dict):
        outputs = [Column("output", ("output",), "text")]
    else:
        outputs = [
            Column(f"output.{name}", ("output", name), TYPES.get(str(_type_of(field)), "text"))
            for name, field in properties.items()
        ]
    return [OWN[0], *outputs, *(column for column in OWN[1:] if column.name not in ("index", "job_id"))]


def _type_of(field: object) -> object:
    """Return the JSON type of a field. For a field that can be null, return the other type."""
    if not isinstance(field, dict):
        return None
    choices = [choice for choice in field.get("anyOf", ()) if choice != {"type": "null"}]
    return _type_of(choices[0]) if len(choices) == 1 else field.get("type")


def with_results(table: Any, columns: Sequence[Column], lines: Sequence[bytes]) -> Any:
    """Return the Arrow table with the result columns. An input column with the same name becomes ``input.NAME``."""
    pyarrow = extra("pyarrow", "results as columns of a dataset")
    types = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64(), "text": pyarrow.string()}
    records = [Record(from_json(line)) for line in lines]  # type: ignore[call-overload]
    taken = {column.name for column in columns}
    table = table.rename_columns([f"input.{name}" if name in taken else name for name in table.column_names])
    for column in columns:
        cells = pyarrow.array([column.cell(record) for record in records], types[column.type])
        table = table.append_column(column.name, cells)
    return table


class DatasetRun:
    """The actor that holds the run of a stage."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._schema = OutputSchema.of(options.get("output_schema"))
        self._rows: asyncio.Queue[object] = asyncio.Queue()
        self._open: dict[int, asyncio.Future[bytes]] = {}  # by index in the current session of the run
        self._count = 0
        self._run: asyncio.Task[None] | None = None
        self._ending = False  # the run takes no more rows

    async def work(self, rows: Sequence[object]) -> list[bytes]:
        """Return the result of each row as a line of JSON."""
        while self._run is not None and self._ending:
            await asyncio.wait([self._run])
        loop = asyncio.get_running_loop()
        if self._run is None:
            self._count = 0
            self._ending = False
            self._rows = asyncio.Queue()
            self._run = loop.create_task(self._session(), name="batch-agent dataset")
        results: list[asyncio.Future[bytes]] = []
        for row in rows:
            results.append(loop.create_future())
            self._open[self._count] = results[-1]
            self._count += 1
            self._rows.put_nowait(row)
        return list(await asyncio.gather(*results))

    async def _session(self) -> None:
        recorded: JsonObject = {"resume": True} if self._options.get("run_dir") is not None else {}
        failure: BatchAgentError = StoreError("the run ended before this row was done")
        try:
            async with BatchAgent.open(**{**self._options, **recorded}, inputs=self._inputs()) as run:
                async for result in run.results():
                    if (waiter := self._open.pop(result.index, None)) is not None and not waiter.done():
                        waiter.set_result(self._line(result))
        except BatchAgentError as error:
            failure = error
        finally:
            self._run = None
            waiters, self._open = self._open, {}
            for waiter in waiters.values():
                if not waiter.done():
                    waiter.set_exception(failure)

    async def _inputs(self) -> AsyncIterator[object]:
        """Yield rows as they arrive. Ends if none arrived for a while and no row is in work."""
        while True:
            try:
                row = await asyncio.wait_for(self._rows.get(), IDLE_SECONDS)
            except TimeoutError:
                if self._open:
                    continue
                self._ending = True
                return
            yield row

    def _line(self, result: AgentResult[object]) -> bytes:
        try:
            return result_line(result, self._schema)
        except Invalid as error:
            return result_line(unwritten(result, error))
