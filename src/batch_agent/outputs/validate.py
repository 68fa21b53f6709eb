"""Parses a model's text to a value of the user's schema, exactly if possible and tolerantly otherwise.

1. The whole text, with its reasoning and then without. If the reasoning is never closed, there is no answer. JSON that
   violates the schema ends here: a part of it that happens to fit would be a silent error.
2. Parts of prose: code fences, then outermost objects and arrays. Of several that validate the last one wins, because
   models think first and conclude at the end. An object inside a sentence is not the answer: the sentence may be a
   refusal.
3. The same parts read as near-JSON, and, if the schema is a string, number or Literal, the plain text.

Anything except the whole answer, or a code fence that is the whole answer, is marked as repaired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, NotJSON, OutputError
from batch_agent.outputs.extract import Region, fences, last_regions, lone_fence, strip_reasoning
from batch_agent.outputs.repair import mended
from batch_agent.value_type import value_type

T = TypeVar("T")

LAST_REGIONS = 32  # an answer with more bracketed regions is searched only from the end
IN_A_SENTENCE = "it has JSON inside a sentence, which may be an example or a refusal and not the answer"


@value_type
class Parsed(Generic[T]):
    value: T
    repaired: bool  # read from text that was not valid JSON as written


def parse_output(text: str, schema: OutputSchema[T]) -> Parsed[T]:
    """Parse the text. Raises NotJSON, or Invalid with the errors of the likeliest part of the text."""
    raw = text.strip().removeprefix("\ufeff")
    try:
        return Parsed(schema.validate_json(raw), repaired=False)
    except NotJSON:
        pass
    except Invalid:
        if not schema.is_scalar:
            raise
    try:
        answer = strip_reasoning(raw)
    except OutputError as error:
        raise NotJSON(str(error)) from None
    return _scalar(answer, schema) if schema.is_scalar else _structure(answer, schema)


def _scalar(answer: str, schema: OutputSchema[T]) -> Parsed[T]:
    """Parse an answer that is only a value, alone or in a code fence; or a word without quotes."""
    parts = [answer, *reversed(fences(answer))]
    failures: list[OutputError] = []
    for part in parts:
        try:
            return Parsed(schema.validate_json(part), repaired=part not in (answer, lone_fence(answer)))
        except OutputError as error:
            failures.append(error)
    for part in parts:
        with suppress(Invalid):
            return Parsed(schema.validate_python(part), repaired=True)
    raise failures[0]


def _structure(answer: str, schema: OutputSchema[T]) -> Parsed[T]:
    fenced = lone_fence(answer)
    try:
        return Parsed(schema.validate_json(answer if fenced is None else fenced), repaired=False)
    except NotJSON as error:
        failure: OutputError = error
    weight = 0
    for region, json in _candidates([*reversed(fences(answer)), answer]):
        try:
            value = schema.validate_json(json)
            if region.apart:
                return Parsed(value, repaired=True)
            reason: OutputError = NotJSON(IN_A_SENTENCE)
        except NotJSON:
            continue
        except Invalid as invalid:
            reason = invalid
        if len(region.text) > weight:
            failure, weight = reason, len(region.text)
    raise failure


def _candidates(parts: Sequence[str]) -> Iterator[tuple[Region, str | bytes]]:
    found = dict.fromkeys(region for part in parts for region in last_regions(part, LAST_REGIONS))
    yield from ((region, region.text) for region in found)
    yield from mended(found)
