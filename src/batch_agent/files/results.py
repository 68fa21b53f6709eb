"""Results as lines of JSON. All result files are made from these lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from operator import attrgetter

import orjson
import pydantic_core
from pydantic import BaseModel

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, Earlier, Timings, UnreadableRow
from batch_agent.messages import Attachment, Usage

# Read here, because orjson takes long to read a dataclass with slots.
_USAGE = [field.name for field in dataclasses.fields(Usage)]
_TIMINGS = [field.name for field in dataclasses.fields(Timings)]
_usage_of, _timings_of = attrgetter(*_USAGE), attrgetter(*_TIMINGS)


def result_line(result: AgentResult[object], schema: OutputSchema[object] | None = None) -> bytes:
    """Return one result as a line of JSON, without the transcript; with the model's raw text if it failed. ``schema``
    writes the output, if it is not plain yet.

    Raises Invalid if the output cannot be written: its class may have its own serializers.
    """
    record = result_record(result)
    if not result.ok:
        record["raw_text"] = result.raw_text
    elif schema is not None:
        record["output"] = _plain_output(result.output, schema)
        if result.samples:
            record["samples"] = [_plain_output(sample, schema) for sample in result.samples]
    return record_line(record)


def result_record(result: AgentResult[object]) -> dict[str, object]:
    """Return the fields that a result has wherever it is written, without texts of the model."""
    record: dict[str, object] = {
        "index": result.index,
        "job_id": result.job_id,
        "ok": result.ok,
        "output": result.output,
        "error": None if result.error is None else error_record(result.error),
        "attempts": result.attempts,
        "turns": result.turns,
        "usage": dict(zip(_USAGE, _usage_of(result.usage), strict=True)),
        "timings": dict(zip(_TIMINGS, _timings_of(result.timings), strict=True)),
        "input": None if isinstance(result.input, UnreadableRow) else result.input,
    }
    if result.cost is not None:
        record["cost"] = result.cost
    if result.repaired:
        record["repaired"] = True
    if result.truncated:
        record["truncated"] = True
    if result.chunks > 1:
        record["chunks"] = result.chunks
    if result.shortened:
        record["shortened"] = True
    if result.artifacts:
        record["artifacts"] = {name: str(path) for name, path in result.artifacts.items()}
    if result.votes is not None:
        record["votes"], record["samples"] = result.votes, result.samples
    if result.doubts is not None:
        record["doubt"], record["doubts"] = result.doubt, result.doubts
    if result.answered_by is not None:
        record["answered_by"] = result.answered_by
    if result.earlier:
        record["earlier"] = [earlier_record(each) for each in result.earlier]
    if result.waits_for is not None:
        record["escalated"], record["waits_for"] = True, result.waits_for
    return record


def earlier_record(earlier: Earlier) -> dict[str, object]:
    """Return the fields of an answer that a later entry of the cascade replaced. Its output is plain JSON already."""
    record: dict[str, object] = {
        "name": earlier.name,
        "output": earlier.output,
        "error": error_record(earlier.error),
        "usage": dict(zip(_USAGE, _usage_of(earlier.usage), strict=True)),
    }
    if earlier.cost is not None:
        record["cost"] = earlier.cost
    if earlier.doubts is not None:
        record["doubt"], record["doubts"] = earlier.doubt, earlier.doubts
    if earlier.votes is not None:
        record["votes"] = earlier.votes
    return record


def error_record(error: AgentError | None) -> dict[str, object] | None:
    """Return the fields of an error. The traceback is only among them if there is one."""
    if error is None:
        return None
    fields = dataclasses.asdict(error)
    return fields if error.traceback else {name: value for name, value in fields.items() if name != "traceback"}


def record_line(record: Mapping[str, object]) -> bytes:
    """Return a record as a line. An ``input`` that cannot be written is omitted. Raises Invalid if the line still
    cannot be written."""
    try:
        return to_json(record) + b"\n"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if record["input"] is None:
            raise _unwritable(error) from error
    return record_line({**record, "input": None})


def plainly(result: AgentResult[object], schema: OutputSchema[object] | None) -> AgentResult[object]:
    """Return the result with its output as plain JSON, written by the schema. If it cannot be written, the result is a
    failure."""
    if schema is None or not result.ok:
        return result
    try:
        return result.with_output(_plain_output(result.output, schema))
    except Invalid as error:
        return unwritten(result, error)


def _plain_output(output: object, schema: OutputSchema[object]) -> object:
    try:
        return None if output is None else schema.to_plain(output)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _unwritable(error) from error


def _unwritable(error: BaseException) -> Invalid:
    return Invalid(f"the output cannot be written as JSON: {describe(error)}")


def unwritten(result: AgentResult[object], error: Invalid) -> AgentResult[object]:
    """Return the result as a failure, because its output cannot be written."""
    return result.as_failure(AgentError.of(error))


def to_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # Integers beyond 64 bits and lone surrogates: a model can write them, but orjson refuses them.
        return _to_json_slowly(value).encode("ascii")


def from_json(data: bytes) -> object:
    """Return the value that ``to_json`` wrote. Raises ValueError if the data is not JSON."""
    value: object
    try:
        value = pydantic_core.from_json(data)  # orjson rounds integers beyond 64 bits
    except ValueError:
        try:
            value = json.loads(data)  # also reads lone surrogates, and is five times slower
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    return value


def _to_json_slowly(value: object) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:  # NaN and infinity, which become null as with orjson
        text = json.dumps(value, default=_plain)
        return json.dumps(json.loads(text, parse_constant=lambda _: None))


def _plain(value: object) -> object:
    if isinstance(value, Attachment):
        return value.mark if value.is_data else value.url
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    return value.value if isinstance(value, Enum) else str(value)
