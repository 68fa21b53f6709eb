"""Converts the return value of a user's worker into the output of its row: JSON, validated by the schema if there is
one.

The output is recorded as JSON and read back from it, also the first time, so a resumed row has the same output.
"""

from __future__ import annotations

import json

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, OutputError, WorkerFailed
from batch_agent.foreign import boundary, describe
from batch_agent.outputs.validate import parse_output

NOT_JSON = (
    "the return value of the worker is not JSON: {reason}. Return text, numbers, lists and mappings, or give "
    "output_schema a class and return an instance of it"
)


def write_output(returned: object, schema: OutputSchema[object] | None) -> tuple[str, object, bool]:
    """Return the output as JSON text, the output itself, and whether its JSON was repaired."""
    if schema is None:
        text = _to_text(returned)
        return text, json.loads(text), False
    value, repaired = _valid(returned, schema)
    with boundary(lambda raised: Invalid(f"the output cannot be written as JSON: {raised}")):  # the user's serializers
        plain = schema.to_plain(value)
    text = _to_text(plain)
    return text, schema.validate_json(text), repaired


def read_output(text: str, schema: OutputSchema[object] | None) -> object:
    """Return a recorded output. Raises Invalid if the schema no longer accepts it."""
    return json.loads(text) if schema is None else schema.validate_json(text)


def _valid(returned: object, schema: OutputSchema[object]) -> tuple[object, bool]:
    """Return an instance, a mapping or JSON text as a value of the schema, and whether its JSON was repaired."""
    if not isinstance(returned, str):
        return schema.validate_python(returned), False
    try:
        parsed = parse_output(returned, schema)
    except OutputError:
        if not schema.is_scalar:
            raise
        return schema.validate_python(returned), False
    return parsed.value, parsed.repaired


def _to_text(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise WorkerFailed(NOT_JSON.format(reason=describe(error))) from None
