"""JSON encoding of inputs and results, with which the processes of a run exchange and record them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, Invalid, OutputError, StoreError
from batch_agent.files.results import from_json, result_line, to_json, unwritten
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, BaseResult, Earlier, Timings
from batch_agent.messages import Image, Message, Usage
from batch_agent.outputs.validate import parse_output
from batch_agent.record.codec import from_message, to_message
from batch_agent.record.store import RowChange

# A line that orjson wrote, and can read: what it cannot write exactly, the slow encoder writes with spaces.
QUICK = re.compile(rb'\{"index":\d')
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
    except Exception as error:  # the user's own classes can raise anything  # noqa: BLE001
        raise InputError(
            f"this input cannot be written as JSON, so it cannot be sent to other processes: {describe(error)}"
        ) from None


def decode_row(data: bytes, schema: OutputSchema[object] | None = None) -> tuple[object, str | None]:
    """Return the input, as an instance of the schema if its rows are outputs of another stage, and the id that it has
    from an earlier stage. Raises InputError."""
    head, named, value = data.rpartition(NAMED)
    name = head.decode("utf-8", "surrogatepass") if named else None
    try:
        return (from_json(value) if schema is None else schema.read_back(value)), name
    except OutputError as error:
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
    """Return a result as three lines of JSON: the line of the result files; the number of the worker, and whether it
    computed the result from the record; and the texts that the files do not have, which are decoded when they are first
    read. The texts include the transcript if ``messages`` is set."""
    try:
        line = result_line(result, schema)
    except Invalid as error:  # the user's worker function can return anything
        result = unwritten(result, error)
        line = result_line(result)
    if schema is not None and result.ok and result.output is not None and not schema.reads_back:
        try:
            instance_of(schema.to_plain(result.output), schema, result)
        except OutputError as error:  # no other process could read it: it is no result there and here
            result = result.as_failure(AgentError.of(error))
            line = result_line(result)
    texts = [result.raw_text, [from_message(message) for message in result.messages] if messages else ()]
    return line + to_json([worker, result.resumed]) + b"\n" + to_json(texts)


READY = bytes, type(None)  # results that need not be encoded


class ResultEncoder:
    """Makes JSON of the results in a commit. ``schema`` is that of the outputs."""

    def __init__(self, schema: OutputSchema[object] | None = None, *, messages: bool = True) -> None:
        self._schema, self._messages = schema, messages

    def changes(self, changes: Sequence[RowChange], worker: int) -> list[RowChange]:
        """Return the changes of a worker with JSON instead of results."""
        return [each if isinstance(each.result, READY) else self._written(each, worker) for each in changes]

    def _written(self, change: RowChange, worker: int) -> RowChange:
        result = cast("AgentResult[object]", change.result)
        written = encode_result(result, self._schema, worker=worker, messages=self._messages)
        return replace(change, result=written)


def encode_record(record: Mapping[str, object], worker: int) -> bytes:
    """Return a recorded result in the form of ``encode_result``, without its transcript."""
    line = {name: value for name, value in record.items() if name != "messages"}
    return to_json(line) + b"\n" + to_json([worker, False]) + b"\n" + to_json([record.get("raw_text"), ()])


def line_of(data: bytes) -> bytes:
    """Return the line of a result for the result files."""
    return data[: data.index(b"\n") + 1]


def decode_result(
    data: bytes, index: int, schema: OutputSchema[object] | None, *, resumed: bool, value: object = None
) -> tuple[AgentResult[object], int]:
    """Return the result, with its output as an instance of the schema, and the number of its worker. ``value`` is the
    input, if it is known here. Raises StoreError for a result that was not written by a worker."""
    try:
        typed, worker = _decoded(data, index, resumed=resumed)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(index, error) from None
    if value is not None:
        typed.input = value  # type: ignore[misc]  # it was made here
    if schema is None or not typed.ok or typed.output is None:
        return typed, worker
    try:
        typed.output = instance_of(typed.output, schema, typed)  # type: ignore[misc]
        if typed.samples:
            typed.samples = tuple(_sample_of(each, schema) for each in typed.samples)  # type: ignore[misc]
    except OutputError as refused:
        return typed.as_failure(AgentError.of(refused)), worker
    return typed, worker


def instance_of(plain: object, schema: OutputSchema[object], result: AgentResult[object]) -> object:
    """Return the output of a result as an instance of the schema. ``plain`` is its JSON. If the schema writes values in
    another form than it reads, the model's text is read again, as the worker did. Raises OutputError if neither gives
    an output with this JSON."""
    if not schema.reads_back and result.raw_text:
        with suppress(OutputError):
            value = parse_output(result.raw_text, schema).value
            if schema.is_written_as(value, plain):
                return value
    return schema.read_back(to_json(plain))


def _sample_of(plain: object, schema: OutputSchema[object]) -> object:
    """Return the output of a sample, as plain JSON if the schema cannot read what it has written."""
    try:
        return None if plain is None else schema.read_back(to_json(plain))
    except OutputError:
        return plain


def _decoded(data: bytes, index: int, *, resumed: bool) -> tuple[AgentResult[object], int]:
    line, head, texts = data.split(b"\n")
    record: dict[str, Any] = orjson.loads(line) if QUICK.match(line) else cast("dict[str, Any]", from_json(line))
    worker, was_resumed = orjson.loads(head)
    error = record["error"]
    result: BaseResult[object] = BaseResult(
        index,
        record["job_id"],
        record["input"],
        record["ok"],
        record["output"],
        None if error is None else AgentError(**error),
        record["attempts"],
        record["turns"],
        Usage(**record["usage"]),
        record.get("cost"),
        Timings(**record["timings"]),
        repaired=record.get("repaired", False),
        truncated=record.get("truncated", False),
        resumed=resumed or was_resumed,
        chunks=record.get("chunks", 1),
        shortened=record.get("shortened", False),
        artifacts={name: Path(path) for name, path in record.get("artifacts", {}).items()},
        votes=record.get("votes"),
        samples=tuple(record.get("samples", ())),
        doubts=record.get("doubts"),
        answered_by=record.get("answered_by"),
        earlier=tuple(map(_earlier_of, record.get("earlier", ()))),
        waits_for=record.get("waits_for"),
    )
    result.read_later(partial(_texts, texts, index))
    return cast("AgentResult[object]", result), int(worker)


def _earlier_of(record: Mapping[str, Any]) -> Earlier:
    error = record["error"]
    return Earlier(
        record["name"],
        record["output"],
        None if error is None else AgentError(**error),
        record.get("doubts"),
        record.get("votes"),
        Usage(**record["usage"]),
        record.get("cost"),
    )


def _texts(data: bytes, index: int) -> tuple[str, tuple[Message, ...]]:
    """Return the model's last text, and the transcript."""
    try:
        raw_text, messages = cast("tuple[str, list[object]]", from_json(data))
        return raw_text, tuple(to_message(message) for message in messages)
    except (ValueError, TypeError) as error:
        raise _damaged(index, error) from None


def _damaged(index: int, error: Exception) -> StoreError:
    return StoreError(f"the result of row {index} in the record is damaged or forged: {describe(error)}")
