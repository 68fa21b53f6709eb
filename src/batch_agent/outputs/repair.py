"""Reads near-JSON as what it was meant to be, and writes the message to a model about its invalid answer.

Extra commas, single quotes and Python's True, False and None are corrected without guessing: strings keep every
character. Then jiter completes a truncated structure, and json-repair, which guesses, handles the rest. Every result is
validated like any answer, and marked as repaired.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import jiter
from pydantic_core import to_json

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import NotJSON, OutputError
from batch_agent.outputs.extract import TOKEN, Region
from batch_agent.outputs.surrogates import read_json

# json-repair may take quadratic time on adversarial text, and more with nesting. The limit counts all its characters
# for one answer.
REPAIR_CHARS = 8_192
REPAIR_DEPTH = 16
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = re.compile(r"\s*+[}\]]")
_ESCAPED_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def mended(found: Iterable[Region]) -> Iterator[tuple[Region, bytes]]:
    """Yield each region with JSON text that it may have been meant as, the most faithful reading first."""
    left = REPAIR_CHARS
    for region in found:
        readers = [read_json, _completed]
        left -= len(region.text)
        if left >= 0 and region.depth <= REPAIR_DEPTH:
            readers.append(_repaired)
        tidy = TOKEN.sub(_tidied, region.text)
        for read in readers:
            try:
                yield region, to_json(read(tidy))
            except (ValueError, RecursionError):
                continue


def _tidied(token: re.Match[str]) -> str:
    """Return the token in JSON syntax."""
    if token["single"] is not None:
        end = '"' if token["end"] else ""
        return f'{token["mark"]}"{_ESCAPED_OR_QUOTE.sub(_requoted, token["single"])}{end}'
    if token[0] == "," and _CLOSING.match(token.string, token.end()):
        return ""
    return _WORDS.get(token[0], token[0])


def _requoted(part: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(part[0], part[0])


def _completed(text: str) -> object:
    value: object = jiter.from_json(text.encode(), partial_mode="trailing-strings")
    return value


def _repaired(text: str) -> object:
    import json_repair  # imported here, because most runs never need it and it is slow to load

    value: object = json_repair.loads(text, skip_json_loads=True)
    if not isinstance(value, dict | list):
        raise ValueError("nothing of the structure is left")
    return value


def repair_prompt(error: OutputError, schema: OutputSchema[object]) -> str:
    """Return the message to the model after an answer that does not validate."""
    problem = "is not JSON" if isinstance(error, NotJSON) else "does not fit the JSON schema"
    return (
        f"Your answer {problem}:\n{error}\n\n"
        f"The JSON schema is:\n{schema.json_text}\n\n"
        "Answer again with the corrected JSON alone: no code fence, no text around it."
    )
