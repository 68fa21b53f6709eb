"""The form in which a person gives an answer: the fields of the answers, in the order of the schema.

*Judged* fields are those whose values can be compared: classes, booleans, numbers and short texts. An audit asks for
these; other fields may stay empty there. A repair begins with the answer of the model, so that every field has a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from batch_agent.messages import JsonObject
from batch_agent.trust.gold import OUTPUT, GoldField, normalised, same_json, shown_cell
from batch_agent.trust.review import AUDIT, REPAIR, Queue

SHORT = 64  # characters of a text that can be compared; the schema must say so


@dataclass(frozen=True, slots=True)
class ReviewForm:
    """The form of an answer. ``fields`` are the fields of the answers; the only field of an answer without fields is
    ``output``. ``wanted`` are the fields that an audit asks for; empty means all that can be compared."""

    fields: Sequence[GoldField]
    whole: bool  # the answer is the value of its only field
    wanted: frozenset[str] = frozenset()

    def is_judged(self, field: GoldField) -> bool:
        """Return whether an audit asks for this field, and its values can be compared."""
        longest = field.schema.get("maxLength")
        short = field.kind == "text" and isinstance(longest, int) and longest <= SHORT
        comparable = short or field.kind in ("class", "boolean", "integer", "number")
        return comparable and (not self.wanted or field.name in self.wanted)

    def required(self, queue: Queue) -> list[GoldField]:
        """Return the fields without which an answer is incomplete. An audit without judged fields requires all
        fields."""
        judged = [field for field in self.fields if self.is_judged(field)]
        return judged if queue == AUDIT and judged else [*self.fields]

    def same(self, one: JsonValue, other: JsonValue) -> bool:
        """Return whether two answers are the same. Only the fields that can be compared count; if there are none, all
        fields."""
        fields = [field for field in self.fields if self.is_judged(field)] or self.fields
        return all(_same(field, self.value(field, one), self.value(field, other)) for field in fields)

    def value(self, field: GoldField, output: JsonValue) -> JsonValue:
        """Return a field of an answer; None if it is not there."""
        if self.whole:
            return output
        return output.get(field.name) if isinstance(output, dict) else None

    def read(self, given: JsonValue, queue: Queue) -> JsonValue:
        """Return the answer that a person gave, as values of the fields; texts of a table are converted. Raises
        ValueError, which names the field and what is allowed."""
        cells = {OUTPUT: given} if self.whole else given
        if not isinstance(cells, Mapping):
            raise ValueError(f"an answer has the fields {', '.join(field.name for field in self.fields)}")
        known = {field.name: field for field in self.fields}
        if unknown := sorted(cells.keys() - known.keys()):
            raise ValueError(f"an answer has no field {unknown[0]!r}; its fields: {', '.join(known)}")
        found: JsonObject = {}
        required = {field.name for field in self.required(queue)}
        for name, field in known.items():
            cell = cells.get(name)
            if _is_missing(field, cell, given=name in cells):
                if name in required and (queue == AUDIT or not _is_optional(field)):
                    raise ValueError(f"{name} has no value")
                continue
            try:
                found[name] = None if cell is None else field.read(cell)
            except ValueError as error:
                raise ValueError(f"{name} is {shown_cell(cell)}: {error}") from None
        return found.get(OUTPUT) if self.whole else found

    def merged(self, model: JsonValue, people: JsonValue) -> JsonValue:
        """Return the answer that is delivered: the answer of people, with the model's values in the fields that they
        left empty."""
        return {**model, **people} if isinstance(model, dict) and isinstance(people, dict) else people

    def to_json(self) -> JsonObject:
        """Return the form for the page."""
        fields: list[JsonValue] = [
            {
                "name": field.name,
                "kind": field.kind,
                "choices": _values(field),
                "nullable": field.nullable,
                "judged": self.is_judged(field),
                "description": _described(field),
            }
            for field in self.fields
        ]
        return {"fields": fields, "whole": self.whole}


def _same(field: GoldField, one: JsonValue, other: JsonValue) -> bool:
    if field.kind == "unknown" and isinstance(one, str) and isinstance(other, str):
        return normalised(one) == normalised(other)
    return same_json(one, other) if field.kind == "unknown" else field.right(one, other)


def _is_missing(field: GoldField, cell: JsonValue, *, given: bool) -> bool:
    if cell is None:
        return not (given and field.nullable)
    return isinstance(cell, str) and not cell.strip() and field.kind not in ("text", "unknown")


def _is_optional(field: GoldField) -> bool:
    return field.nullable or "default" in field.schema


def _described(field: GoldField) -> str:
    said = field.schema.get("description")
    return said if isinstance(said, str) else ""


class Draft:
    """An answer that a person is giving. In a repair it begins as the answer of the model."""

    def __init__(self, form: ReviewForm, queue: Queue, model: JsonValue = None) -> None:
        self.form, self.queue = form, queue
        self.values: JsonObject = {}
        for field in form.fields:
            value = form.value(field, model)
            if queue == REPAIR and value is not None:
                self.values[field.name] = value
        self.classes = [field for field in form.fields if _values(field)]
        if queue == AUDIT and any(map(form.is_judged, self.classes)):
            self.classes = [field for field in self.classes if form.is_judged(field)]
        self._at = 0

    @property
    def field(self) -> GoldField | None:
        """The field whose values can be chosen with a key now; None if no field has a list of values."""
        return self.classes[self._at] if self.classes else None

    @property
    def choices(self) -> list[JsonValue]:
        """The values that can be chosen with a key now, in the order of the schema."""
        return [] if self.field is None else _values(self.field)

    def choose(self, value: JsonValue) -> bool:
        """Set the field to a value, and go to the next field. Returns True if the answer is complete and no other field
        has a list of values: it is then given."""
        assert self.field is not None, "there is a choice"
        self.values[self.field.name] = value
        only = len(self.classes) == 1
        self._at = (self._at + 1) % len(self.classes)
        return only and not self.missing

    @property
    def missing(self) -> list[str]:
        """The names of fields without which the answer is not complete."""
        required = self.form.required(self.queue)
        return [field.name for field in required if field.name not in self.values and not _may_lack(field, self.queue)]

    @property
    def given(self) -> JsonValue:
        """The answer, as ``ReviewForm.read`` takes it."""
        return self.values.get(OUTPUT) if self.form.whole else {**self.values}


def _may_lack(field: GoldField, queue: Queue) -> bool:
    return queue == REPAIR and _is_optional(field)


def _values(field: GoldField) -> list[JsonValue]:
    return [True, False] if field.kind == "boolean" else [*field.allowed]
