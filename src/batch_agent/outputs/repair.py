"""Text that is nearly JSON, read by the libraries that are made for it; and what a model is told about its answer.

A truncated structure is completed by jiter, anything else by json-repair. What comes out has been guessed in part: it
is validated like any answer, and marked as repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jiter
import json_repair
from pydantic_core import to_json

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import NotJSON, OutputError
from batch_agent.outputs.extract import Region

# json-repair searches back and forth: its time grows with the square of hostile text, and faster with nesting. The
# characters are counted over all it is given of one answer.
REPAIR_CHARS = 8_192
REPAIR_DEPTH = 16


def mended(found: Iterable[Region]) -> Iterator[tuple[Region, bytes]]:
    """Each region with JSON that it may have been meant to be, the more faithful reading first."""
    left = REPAIR_CHARS
    for region in found:
        readers = [_completed]
        left -= len(region.text)
        if left >= 0 and region.depth <= REPAIR_DEPTH:
            readers.append(_repaired)
        for read in readers:
            try:
                yield region, to_json(read(region.text))
            except (ValueError, RecursionError):
                continue


def _completed(text: str) -> object:
    value: object = jiter.from_json(text.encode(), partial_mode="trailing-strings")
    return value


def _repaired(text: str) -> object:
    value: object = json_repair.loads(text, skip_json_loads=True)
    if not isinstance(value, dict | list):
        raise ValueError("nothing of the structure is left")
    return value


def repair_prompt(error: OutputError, schema: OutputSchema[object]) -> str:
    """What the model is shown after an answer that does not validate."""
    problem = "is not JSON" if isinstance(error, NotJSON) else "does not fit the JSON schema"
    return (
        f"Your answer {problem}:\n{error}\n\n"
        f"The JSON schema is:\n{schema.json_text}\n\n"
        "Answer again with the corrected JSON alone: no code fence, no text around it."
    )
