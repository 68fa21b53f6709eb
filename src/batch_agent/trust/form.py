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
    """``fields`` are those of the answers; the only one of an answer without fields is ``output``. ``wanted`` are the
    fields that an audit is about; empty: all that can be judged."""

    fields: Sequence[GoldField]
    whole: bool  # the answer is the value of its only field
    wanted: frozenset[str] = frozenset()

    def is_judged(self, field: GoldField) -> bool:
        """Return whether answers of a field can be compared, and an audit asks for it."""
        longest = field.schema.get("maxLength")
        short = field.kind == "text" and isinstance(longest, int) and longest <= SHORT
        comparable = short or field.kind in ("class", "boolean", "integer", "number")
        return comparable and (not self.wanted or field.name in self.wanted)

    def required(self, queue: Queue) -> list[GoldField]:
        """Return the fields without which an answer is not complete. Without judged fields, an audit needs all."""
        judged = [field for field in self.fields if self.is_judged(field)]
        return judged if queue == AUDIT and judged else [*self.fields]

    def same(self, one: JsonValue, other: JsonValue) -> bool:
        """Return whether two answers are the same, by the fields that can be compared, or by all of them."""
        fields = [field for field in self.fields if self.is_judged(field)] or self.fields
        return all(_same(field, self.value(field, one), self.value(field, other)) for field in fields)

    def value(self, field: GoldField, output: JsonValue) -> JsonValue:
        """Return a field of an answer; None if it is not there."""
        if self.whole:
            return output
        return output.get(field.name) if isinstance(output, dict) else None

    def read(self, given: JsonValue, queue: Queue) -> JsonValue:
        """Return the answer that a person gave: values, or texts of a table that mean values. Raises ValueError, which
        names the field and what is allowed."""
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
        """Return the answer that is delivered: that of people, with the fields that they left open as the model has
        them."""
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
    """An answer while a person gives it. In a repair it begins with that of the model."""

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
        """The field whose values have keys now; None if no field has a choice of values."""
        return self.classes[self._at] if self.classes else None

    @property
    def choices(self) -> list[JsonValue]:
        """The values that have keys now, in the order of the schema."""
        return [] if self.field is None else _values(self.field)

    def choose(self, value: JsonValue) -> bool:
        """Set the field to a value, and go to the next field. True: there is no other choice, and nothing is missing,
        so that the answer is given."""
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
