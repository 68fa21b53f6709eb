"""JSON encoding of inputs and results, for the exchange between the processes of a run, and for their record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, Invalid, OutputError, StoreError
from batch_agent.files.results import from_json, plainly, result_record, to_json, unwritten
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, BaseResult, Timings
from batch_agent.messages import Image, Usage
from batch_agent.record.codec import from_message, to_message

PLAIN = (str, int, float, bool, type(None))
LONGEST_REASON = 10_000  # characters


NAMED = b"\0"  # between the id of a row and its JSON, which never contains this byte


def encode_row(value: object, name: str | None = None) -> bytes:
    """Return an input as JSON, after the id that it has from an earlier stage, if any. Raises InputError for a value
    that JSON cannot represent."""
    _refuse_data(value)
    head = b"" if name is None else name.encode("utf-8", "surrogatepass") + NAMED
    try:
        return head + to_json(value)
    except Exception as error:  # the user's own classes can raise anything
        raise InputError(
            f"this input cannot be written as JSON, so it cannot be sent to other processes: {describe(error)}"
        ) from None


def decode_row(data: bytes, schema: OutputSchema[object] | None = None) -> tuple[object, str | None]:
    """Return the input, as an instance of the schema if its rows are outputs of another stage, and the id that it has
    from an earlier stage. Raises InputError."""
    head, named, value = data.rpartition(NAMED)
    name = head.decode("utf-8", "surrogatepass") if named else None
    try:
        return (from_json(value) if schema is None else schema.validate_json(value)), name
    except OutputError as error:  # the schema's validators may reject their own output
        raise InputError(f"this input cannot be sent to other processes: {error}") from None
    except ValueError:  # the reason why the feeder could not send it
        raise InputError(value.decode(errors="replace")[:LONGEST_REASON]) from None


def _refuse_data(value: object) -> None:
    if isinstance(value, bytes | bytearray | Image):
        raise InputError("bytes and Image objects cannot be sent to other processes: give a path or a URL")
    if isinstance(value, Mapping):
        for item in value.values():
            if not isinstance(item, PLAIN):
                _refuse_data(item)
    elif isinstance(value, list | tuple):
        for item in value:
            if not isinstance(item, PLAIN):
                _refuse_data(item)


def encode_result(
    result: AgentResult[object], schema: OutputSchema[object] | None, *, worker: int, messages: bool
) -> bytes:
    """Return a result as JSON: the fields of a result line, the number of the worker and, with ``messages``, the
    transcript."""
    result = plainly(result, schema)
    try:
        return to_json({**_record(result, messages=messages), "worker": worker})
    except Exception as error:  # the user's worker function can return anything
        failed = unwritten(result, Invalid(f"the output cannot be written as JSON: {describe(error)}"))
        return to_json({**_record(failed, messages=messages), "worker": worker})


def _record(result: AgentResult[object], *, messages: bool) -> dict[str, object]:
    record = {**result_record(result), "input": result.input, "raw_text": result.raw_text}
    if result.resumed:  # a worker computed it from the record
        record["resumed"] = True
    if messages:
        record["messages"] = [from_message(message) for message in result.messages]
    return record


def decode_result(
    data: bytes, index: int, schema: OutputSchema[object] | None, *, resumed: bool
) -> tuple[AgentResult[object], int]:
    """Return the result, with its output as an instance of the schema, and the number of its worker. Raises StoreError
    for a result that no worker wrote so."""
    try:
        typed, worker = _decoded(cast("dict[str, Any]", from_json(data)), index, resumed=resumed)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise StoreError(f"the result of row {index} in the record is damaged or forged: {describe(error)}") from None
    if schema is None or not typed.ok or typed.output is None:
        return typed, worker
    try:
        return replace(typed, output=schema.validate_json(to_json(typed.output))), worker
    except OutputError as refused:  # the schema's validators may reject their own output
        return typed.as_failure(AgentError.of(refused)), worker


def _decoded(record: dict[str, Any], index: int, *, resumed: bool) -> tuple[AgentResult[object], int]:
    error = record["error"]
    result: BaseResult[object] = BaseResult(
        index=index,
        job_id=record["job_id"],
        input=record["input"],
        ok=record["ok"],
        output=record["output"],
        error=None if error is None else AgentError(**error),
        attempts=record["attempts"],
        turns=record["turns"],
        usage=Usage(**record["usage"]),
        cost=record.get("cost"),
        timings=Timings(**record["timings"]),
        messages=tuple(to_message(message) for message in record.get("messages", ())),
        raw_text=record["raw_text"],
        repaired=record.get("repaired", False),
        truncated=record.get("truncated", False),
        resumed=resumed or record.get("resumed", False),
        chunks=record.get("chunks", 1),
        shortened=record.get("shortened", False),
        artifacts={name: Path(path) for name, path in record.get("artifacts", {}).items()},
    )
    return cast("AgentResult[object]", result), int(record.get("worker", 0))
