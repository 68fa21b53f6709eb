"""Examples of a run: rows with their right answers, which every agent sees before its own row.

They are a part of the system prompt, so that all agents share them and a changed example is another question. Each is
checked as a row of the task and as an answer of the schema before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from batch_agent.compiler.attachments import has_pictures
from batch_agent.compiler.fields import fields_of, listed
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.template import TaskTemplate, Template
from batch_agent.errors import InputError, OutputError, SpecError
from batch_agent.files.read import read_inputs
from batch_agent.files.results import from_json, to_json
from batch_agent.job import UnreadableRow
from batch_agent.messages import Document, JsonObject
from batch_agent.trust.examples import ExampleRows, shown
from batch_agent.trust.gold import OUTPUT, field_of, fields_in, is_empty, steps_of

INPUT = "input"
HEAD = "Examples of messages with their right answers:"


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a run. ``pairs`` are rows with their answers, as plain data; ``text`` shows them in the system
    prompt. ``rows`` finds rows that have the same content as an example."""

    pairs: Sequence[tuple[JsonObject, JsonValue]]
    text: str
    rows: ExampleRows

    def facts(self) -> JsonObject:
        """Return the description of the examples for the record."""
        rows: list[JsonValue] = [{INPUT: {**row}, OUTPUT: answer} for row, answer in self.pairs]
        return {"fields": [*self.rows.fields], "rows": rows}


def examples_of(given: object, task: str, language: str, schema: OutputSchema[object] | None) -> Examples:
    """Return the examples, given as a file or as pairs of row and answer. Raises SpecError for an example that lacks a
    field of the task, or whose answer the schema does not allow."""
    read = _of_file(Path(given), task, language, schema) if isinstance(given, str | Path) else _of_pairs(given)
    pairs = []
    texts = []
    used = set[str]()
    for number, (row, answer) in enumerate(read, 1):
        template = _template(task, language, row, number)
        pairs.append((row, _checked(answer, schema, number)))
        message = _rendered(template, row, number)
        texts.append(
            f"<example>\n<message>\n{message}\n</message>\n<answer>\n{shown(pairs[-1][1])}\n</answer>\n</example>"
        )
        used |= _used(template, row)
    if not pairs:
        what = f"{given} has none" if isinstance(given, str | Path) else "there are none"
        raise SpecError(f"examples: {what}; leave the option out")
    rows = ExampleRows.of(used, [row for row, _ in pairs])
    return Examples(pairs, "\n".join([HEAD, *texts]), rows)


def _of_pairs(given: object) -> Iterator[tuple[JsonObject, object]]:
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise SpecError("examples must be a file, or a list of pairs of row and answer")
    for number, pair in enumerate(given, 1):
        if isinstance(pair, Mapping) and {INPUT, OUTPUT} <= pair.keys():
            row, answer = pair[INPUT], pair[OUTPUT]
        elif isinstance(pair, list | tuple) and len(pair) == 2:
            row, answer = pair
        else:
            raise SpecError(f"examples: number {number} must be a pair of row and answer")
        yield _plain_row(row, number), answer


def _of_file(
    path: Path, task: str, language: str, schema: OutputSchema[object] | None
) -> Iterator[tuple[JsonObject, object]]:
    """Yield the examples of a file: lines with ``input`` and ``output``, or columns of rows and answers."""
    try:
        rows = [*read_inputs(path)]
    except SpecError as error:
        raise SpecError(f"examples: {str(error).replace('the inputs ', '')}") from None
    for number, row in enumerate(rows, 1):
        if isinstance(row, UnreadableRow | str):
            what = row.message if isinstance(row, UnreadableRow) else f"row {number} has no columns"
            raise SpecError(f"examples: {path}: {what}")
        if isinstance(row.get(INPUT), dict | str) and OUTPUT in row and _is_result(row):
            yield _plain_row(row[INPUT], number), row[OUTPUT]
            continue
        answer, columns = _answer_of(row, _used(_template(task, language, row, number), row), schema, path, number)
        yield _plain_row({name: cell for name, cell in row.items() if name not in columns}, number), answer


def _is_result(row: Mapping[str, object]) -> bool:
    """Return whether a line is a result, or a pair with names."""
    return isinstance(row[INPUT], dict) or "job_id" in row or {*row} == {INPUT, OUTPUT}


def _answer_of(
    row: Mapping[str, object], used: set[str], schema: OutputSchema[object] | None, path: Path, number: int
) -> tuple[object, set[str]]:
    """Return the answer that columns of a row contain, and the names of these columns. The column of a field has the
    field's name, or ``output.NAME``."""
    shape = None if schema is None else schema.json_schema
    names = fields_in(shape) or [OUTPUT]
    answer: dict[str, object] = {}
    columns: set[str] = set()
    for name in names:
        column = next((each for each in (f"{OUTPUT}.{name}", name) if each in row and each not in used), None)
        if column is None:
            continue
        columns.add(column)
        if is_empty(row[column]):
            continue
        try:
            answer[name] = field_of(shape, name).read(row[column])
        except ValueError as error:
            raise SpecError(f"examples: {path} row {number}: {column}: {error}") from None
    if not columns:
        wanted = ", ".join(repr(name) for name in names)
        raise SpecError(f"examples: {path} has no column with the answers ({wanted}); its columns: {listed(row)}")
    whole = fields_in(shape) or OUTPUT not in answer
    return (answer if whole else answer[OUTPUT]), columns


def _plain_row(row: object, number: int) -> JsonObject:
    try:
        fields = fields_of(row)
        if has_pictures(dict(fields)) or any(isinstance(value, Document) for value in fields.values()):
            raise SpecError(f"examples: number {number} has a picture or a document, and examples are text")
        return cast(JsonObject, from_json(to_json(fields)))
    except InputError as error:
        raise SpecError(f"examples: number {number}: {error}") from None


def _template(task: str, language: str, row: Mapping[str, object], number: int) -> TaskTemplate:
    try:
        if language == "jinja":
            from batch_agent.compiler.jinja import JinjaTemplate

            return JinjaTemplate(task)
        return Template.parse(task, [*row])
    except SpecError as error:
        raise SpecError(f"examples: number {number}: {error}".replace("the first input", "this example")) from None


def _rendered(template: TaskTemplate, row: JsonObject, number: int) -> str:
    try:
        return template.render(row)
    except InputError as error:
        raise SpecError(f"examples: number {number}: {error}") from None


def _used(template: TaskTemplate, row: Mapping[str, object]) -> set[str]:
    """Return the fields of a row that the task uses; all of them if it uses the whole row."""
    names = {steps_of(name)[0] for name in template.names if steps_of(name)}
    return names if names and names <= row.keys() else {*row}


def _checked(answer: object, schema: OutputSchema[object] | None, number: int) -> JsonValue:
    try:
        plain = cast(JsonValue, from_json(to_json(answer)))
    except Exception as error:  # an object of the user's own  # noqa: BLE001
        raise SpecError(f"examples: the answer of number {number} cannot be written as JSON: {error}") from None
    if schema is None:
        if not isinstance(plain, str):
            raise SpecError(f"examples: the answer of number {number} must be text: the run has no output_schema")
        return plain
    try:
        schema.validate_json(to_json(plain))
    except OutputError as error:
        raise SpecError(f"examples: the answer of number {number} does not fit the schema: {error}") from None
    return plain
