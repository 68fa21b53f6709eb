"""Gold: the right values of some rows. What a gold cell means for a field, and when an answer equals it.

The type of a field comes from the output schema, as JSON schema. Without a schema (a record or a file that has none) it
is that of the answers, and allowed values are not checked. ``Gold`` holds the fields and the columns with their values.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

OUTPUT = "output"  # the field of an answer that has no fields
ALL = "all"  # every field that has gold on a row; no field may be called so in a score
TOLERANCE = 1e-9
MOST_KNOWN = 1000  # texts of cells whose meaning is remembered
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NULL = "null"

Kind = Literal["class", "boolean", "integer", "number", "text", "json", "unknown"]
_STEP = re.compile(r"[^.\[\]]+")


@dataclass(frozen=True, slots=True)
class GoldField:
    """A field of the answers. ``kind`` says how a cell is read and when an answer is right. ``allowed``: the values of
    a class. ``check`` raises for a value that the schema does not allow. If ``judge`` is set, it decides whether an
    answer is right."""

    name: str
    kind: Kind
    allowed: tuple[JsonValue, ...] = ()
    nullable: bool = False
    tolerance: float | None = None
    schema: JsonObject = field(default_factory=dict)
    check: Callable[[JsonValue], object] | None = None
    judge: Callable[[JsonValue, JsonValue], object] | None = None

    @property
    def is_number(self) -> bool:
        return self.kind in ("integer", "number")

    def read(self, cell: object) -> JsonValue:
        """Return the value of a cell that is not empty. Raises ValueError, which says what is allowed."""
        text = cell.strip() if isinstance(cell, str) else None
        if text == NULL and self.nullable and None not in self.allowed:
            return None
        value = self._read(cell, text)
        if self.check is not None:
            try:
                self.check(value)
            except ValueError as error:
                raise ValueError(str(error)) from None
            except Exception as error:  # a validator of the schema, which may raise anything  # noqa: BLE001
                raise ValueError(str(error).partition("\n")[0]) from None
        return value

    def _read(self, cell: object, text: str | None) -> JsonValue:
        if self.kind == "class":
            return self._class(cell, text)
        if self.kind == "boolean":
            word = str(cell).strip().casefold() if isinstance(cell, str | bool | int) else ""
            if word not in WORDS:
                raise ValueError("it is not yes, true, 1, no, false or 0")
            return WORDS[word]
        if self.is_number:
            return self._number(cell, text)
        if self.kind == "text":
            return cell if isinstance(cell, str) else json.dumps(_plain(cell), ensure_ascii=False)
        if self.kind == "unknown":
            return cell if isinstance(cell, str) else _plain(cell)
        return self._json(cell, text)

    def _class(self, cell: object, text: str | None) -> JsonValue:
        plain = _plain(cell)
        for value in self.allowed:
            if same_json(value, plain) or (text is not None and (text == value or text == class_name(value))):
                return value
        if isinstance(cell, float) and cell.is_integer() and int(cell) in self.allowed:
            return int(cell)
        raise ValueError(f"it is not one of {', '.join(map(class_name, self.allowed))}")

    def _number(self, cell: object, text: str | None) -> JsonValue:
        what = "a whole number" if self.kind == "integer" else "a number"
        if isinstance(cell, bool) or not (isinstance(cell, int | float) or text is not None):
            raise ValueError(f"it is not {what}")
        try:
            number: float = int(text) if text is not None else cast(float, cell)
        except ValueError:
            try:
                number = float(cast(str, text))
            except ValueError:
                raise ValueError(f"it is not {what}") from None
        if not math.isfinite(number) or (self.kind == "integer" and number != int(number)):
            raise ValueError(f"it is not {what}")
        return int(number) if self.kind == "integer" else number

    def _json(self, cell: object, text: str | None) -> JsonValue:
        if text is None:
            return _plain(cell)
        try:
            return cast(JsonValue, json.loads(text))
        except ValueError:
            kinds = self.schema.get("type")
            if kinds in ("array", "object"):
                raise ValueError("it is not JSON") from None
            return text

    def right(self, answer: JsonValue, gold: JsonValue) -> bool:
        """Return whether an answer is right. Raises SpecError if the user's function returns no truth value."""
        if self.judge is not None:
            return _judged(self, answer, gold)
        if answer is None or gold is None:
            return answer is None and gold is None
        if self.kind == "number":
            return _near(answer, gold, self.tolerance)
        if self.tolerance is not None and self.kind == "integer":
            return _near(answer, gold, self.tolerance)
        if self.kind == "text" and isinstance(answer, str) and isinstance(gold, str):
            return normalised(answer) == normalised(gold)
        return same_json(answer, gold)

    def label(self, value: JsonValue) -> str:
        """Return the name of the class of a value."""
        return normalised(value) if self.kind == "text" and isinstance(value, str) else class_name(value)

    def take(self, output: JsonValue) -> JsonValue:
        """Return this field of an answer; None if the answer does not have it."""
        if self.name == OUTPUT and not (isinstance(output, dict) and OUTPUT in output):
            return output
        if isinstance(output, dict) and self.name in output:
            return output[self.name]
        for step in steps_of(self.name):
            if isinstance(output, dict):
                output = output.get(step)
            elif isinstance(output, list) and re.fullmatch(r"-?\d+", step) and -len(output) <= int(step) < len(output):
                output = output[int(step)]
            else:
                return None
        return output

    def typed_by(self, answers: Iterable[JsonValue]) -> GoldField:
        """Return the field with the type of these answers; unchanged if it has a type."""
        if self.kind != "unknown":
            return self
        kinds = {_kind_of_value(answer) for answer in answers if answer is not None}
        kind: Kind = "number" if kinds == {"integer", "number"} else kinds.pop() if len(kinds) == 1 else "json"
        return replace(self, kind=kind, nullable=kind != "text")


def right(field: GoldField, answer: JsonValue, gold: JsonValue) -> bool:
    """Return whether an answer of a field is right."""
    return field.right(answer, gold)


def normalised(text: str) -> str:
    """Return a text in the form in which texts are compared: after NFKC, without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def same_json(one: JsonValue, other: JsonValue) -> bool:
    """Return whether two values are equal as JSON: true is not 1, and 1 is 1.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return one == other


def class_name(value: JsonValue) -> str:
    """Return the name of a class in a score: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def steps_of(name: str) -> list[str]:
    """Return the steps of a path in an answer, such as ``address.city`` or ``tags[0]``."""
    return _STEP.findall(name)


def is_empty(cell: object) -> bool:
    """Return whether a cell has no gold: it is missing, blank or not a number of a table."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return True
    return (isinstance(cell, float) and cell != cell) or type(cell).__name__ in ("NAType", "NaTType")


class Gold:
    """The fields that have gold, and for each the column with it."""

    def __init__(self, fields: Sequence[GoldField], columns: Mapping[str, str]) -> None:
        self.fields = {each.name: each for each in fields}
        self.columns = dict(columns)
        self._columns = [*self.columns.values()]
        self._known: dict[tuple[object, ...], Mapping[str, JsonValue]] = {}  # what texts mean that came before

    def read(self, cells: Mapping[str, object]) -> Mapping[str, JsonValue]:
        """Return the gold of a row by field, without fields whose cell is empty. Rows with equal texts get the same
        object. Raises ValueError, which names the column and the value."""
        key = tuple([cells.get(column) for column in self._columns])
        if not all(cell.__class__ is str for cell in key):
            return self._read(cells)
        known = self._known.get(key)
        if known is None:
            known = self._read(cells)
            if len(self._known) < MOST_KNOWN:
                self._known[key] = known
        return known

    def _read(self, cells: Mapping[str, object]) -> dict[str, JsonValue]:
        found: dict[str, JsonValue] = {}
        for name, column in self.columns.items():
            cell = cells.get(column)
            if is_empty(cell):
                continue
            try:
                found[name] = self.fields[name].read(cell)
            except ValueError as error:
                raise ValueError(f"{column} is {shown_cell(cell)}: {error}") from None
        return found

    def typed_by(self, answers: Sequence[JsonValue]) -> Gold:
        """Return the gold with the types of these answers, for fields without a schema."""
        typed = [each.typed_by(map(each.take, answers)) for each in self.fields.values()]
        return Gold(typed, self.columns)

    def with_rules(
        self, tolerance: Mapping[str, float], judges: Mapping[str, Callable[[JsonValue, JsonValue], object]]
    ) -> Gold:
        """Return the gold with tolerances and functions of the user. Raises SpecError for a field without gold."""
        for option, names in (("tolerance", tolerance), ("score", judges)):
            for name in names:
                if name not in self.fields:
                    raise SpecError(f"{option}: {name!r} has no gold; fields with gold: {', '.join(self.fields)}")
        for name in tolerance:
            if not self.fields[name].is_number and self.fields[name].kind != "unknown":
                raise SpecError(f"tolerance: {name} is not a number, but {self.fields[name].kind}")
        fields = [
            replace(each, tolerance=tolerance.get(each.name), judge=judges.get(each.name))
            for each in self.fields.values()
        ]
        return Gold(fields, self.columns)


def gold_of(
    given: str | Mapping[str, str],
    schema: JsonObject | None,
    *,
    known: bool = True,
    columns: Sequence[str] = (),
    seen: Sequence[str] | None = None,
) -> Gold:
    """Return the fields with gold. ``given`` is a column, or the column of each field. ``columns`` are the columns of a
    gold file, each of which is a field. ``known``: False if the schema of the answers is unknown; ``seen`` are then the
    fields of the answers, if there are answers. Raises SpecError."""
    wanted: Mapping[str, str]
    names = fields_in(schema) if known else seen
    if columns:
        wanted = {name: name for name in columns}
        if len(columns) == 1 and names is not None and not names:
            wanted = {OUTPUT: columns[0]}
    elif isinstance(given, str):
        wanted = {only_field(names or ()): given}
    else:
        wanted = given
    if not wanted:
        raise SpecError("gold names no field")
    if repeated := sorted({column for column in wanted.values() if [*wanted.values()].count(column) > 1}):
        raise SpecError(f"gold: the column {repeated[0]} is named for more than one field")
    return Gold([field_of(schema, name, known=known) for name in wanted], wanted)


def fields_in(schema: JsonObject | None) -> list[str]:
    """Return the names of the fields of the answers; empty if an answer has no fields."""
    node = {} if schema is None else _resolved(schema, schema)[0]
    properties = node.get("properties")
    return [*properties] if isinstance(properties, dict) else []


def fields_of_answers(answers: Iterable[JsonValue]) -> list[str]:
    """Return the names of the fields that some answers have; empty if the answers are no objects."""
    return [*dict.fromkeys(name for answer in answers if isinstance(answer, dict) for name in answer)]


def only_field(names: Sequence[str]) -> str:
    """Return the field of answers that have at most one. Raises SpecError if there are several."""
    if len(names) > 1:
        raise SpecError(
            f"gold: an answer has {len(names)} fields ({', '.join(names)}): say which column has the gold of which "
            f'field, such as gold={{"{names[0]}": "column"}}'
        )
    return names[0] if names else OUTPUT


def field_of(schema: JsonObject | None, name: str, *, known: bool = True) -> GoldField:
    """Return a field of a schema. A schema of None means that answers are text. Raises SpecError if there is no such
    field."""
    if not known:
        return GoldField(name, "unknown", nullable=True)
    if schema is None:
        if name != OUTPUT:
            raise SpecError(f"gold: the answers are text, so their only field is {OUTPUT!r}, not {name!r}")
        return GoldField(name, "text")
    node, nullable = _resolved(schema, schema)
    if name == OUTPUT and OUTPUT not in fields_in(schema):
        names = fields_in(schema)
        if len(names) == 1:
            return replace(field_of(schema, names[0]), name=names[0])
        return _typed(name, node, nullable, schema)
    reached = ""
    properties = node.get("properties")
    whole = isinstance(properties, dict) and name in properties
    for step in [name] if whole else steps_of(name):
        node, inner = _inside(node, step, schema, f"{name!r}", reached)
        nullable = nullable or inner
        reached = f"{reached}.{step}" if reached else step
    return _typed(name, node, nullable, schema)


def _inside(node: JsonObject, step: str, root: JsonObject, name: str, reached: str) -> tuple[JsonObject, bool]:
    properties, items = node.get("properties"), node.get("items")
    if isinstance(properties, dict) and step in properties:
        inner = properties[step]
    elif re.fullmatch(r"-?\d+", step) and isinstance(items, dict):
        inner = items
    elif isinstance(properties, dict) and properties:
        where = f"{reached} of the answers" if reached else "an answer"
        raise SpecError(f"gold: {where} has no field {name}; its fields: {', '.join(properties)}")
    elif isinstance(node.get("additionalProperties"), dict):
        inner = node["additionalProperties"]
    elif not node or (node.get("type") == "object" and not properties):
        inner = {}
    else:
        raise SpecError(f"gold: the answers have no field {name}; gold of an answer without fields is of {OUTPUT!r}")
    return _resolved(inner if isinstance(inner, dict) else {}, root)


def _resolved(node: JsonObject, root: JsonObject) -> tuple[JsonObject, bool]:
    """Return a part of a schema with its references resolved, and whether it may be null."""
    nullable = False
    for _ in range(100):  # a reference may lead to itself
        if isinstance(reference := node.get("$ref"), str):
            found: JsonValue = root
            for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
                step = step.replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, dict) else None
            node = found if isinstance(found, dict) else {}
            continue
        if isinstance(every := node.get("allOf"), list) and len(every) == 1 and isinstance(every[0], dict):
            node = every[0]
            continue
        options = node.get("anyOf", node.get("oneOf"))
        if isinstance(options, list):
            rest = [option for option in options if isinstance(option, dict) and option.get("type") != NULL]
            nullable = nullable or len(rest) < len(options)
            if len(rest) == 1:
                node = rest[0]
                continue
        return node, nullable
    return {}, nullable


def _typed(name: str, node: JsonObject, nullable: bool, root: JsonObject) -> GoldField:
    kinds = node.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    nullable = nullable or NULL in names
    names = [each for each in names if each != NULL]
    values = node.get("enum", [node["const"]] if "const" in node else None)
    merged = _choices(node, root)
    if values is None and merged:
        values = merged
    kind: Kind
    if isinstance(values, list):
        kind = "class"
        nullable = nullable or None in values
        if all(isinstance(value, bool) for value in values) and len(values) == 2:
            kind = "boolean"
    else:
        found = {"string": "text", "boolean": "boolean", "integer": "integer", "number": "number"}
        kind = cast(Kind, found.get(str(names[0]), "json")) if len(names) == 1 else "json"
        if {*names} == {"integer", "number"}:
            kind = "number"
    definitions: JsonObject = {each: root[each] for each in ("$defs", "definitions") if each in root}
    allowed = tuple(value for value in values if value is not None) if isinstance(values, list) else ()
    return GoldField(name, kind, allowed if kind == "class" else (), nullable, schema={**definitions, **node})


def _choices(node: JsonObject, root: JsonObject) -> list[JsonValue]:
    """Return the values of a choice that the schema writes as several alternatives, each with values of its own."""
    options, values = node.get("anyOf", node.get("oneOf")), list[JsonValue]()
    for option in options if isinstance(options, list) else ():
        inner = _resolved(option, root)[0] if isinstance(option, dict) else {}
        if inner.get("type") == NULL:
            continue
        some = inner.get("enum", [inner["const"]] if "const" in inner else None)
        if not isinstance(some, list):
            return []
        values += some
    return values


def _judged(each: GoldField, answer: JsonValue, gold: JsonValue) -> bool:
    assert each.judge is not None
    try:
        said = each.judge(answer, gold)
    except Exception as error:  # the user's function may raise anything
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SpecError(
            f"score: the function of {each.name} raised {what} for {shown_cell(answer)} and {shown_cell(gold)}"
        ) from error
    if said not in (True, False):
        raise SpecError(f"score: the function of {each.name} returned {shown_cell(said)}; it must return True or False")
    return bool(said)


def _near(answer: JsonValue, gold: JsonValue, tolerance: float | None) -> bool:
    numbers = [value for value in (answer, gold) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < 2:
        return same_json(answer, gold)
    gap = abs(numbers[0] - numbers[1])
    if tolerance is None:
        return gap <= TOLERANCE
    return gap <= tolerance + 1e-12 * max(1.0, abs(numbers[1]))  # 1.11 - 1.10 is not exactly 0.01


def _plain(cell: object) -> JsonValue:
    if isinstance(cell, Mapping):
        return {str(name): _plain(item) for name, item in cell.items()}
    if isinstance(cell, list | tuple):
        return [_plain(item) for item in cell]
    return cell if isinstance(cell, str | int | float | bool | None) else str(cell)


def _kind_of_value(value: JsonValue) -> Kind:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "text" if isinstance(value, str) else "json"


def shown_cell(value: object) -> str:
    """Return a value as text for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def named_problems(problems: Iterator[tuple[str, str]], most: int = 5) -> str:
    """Return the first problems, each with the rows that have it, as one sentence; "" if there are none."""
    shown: list[str] = []
    more = 0
    for row, problem in problems:
        if len(shown) < most:
            shown.append(f"row {row}: {problem}")
        else:
            more += 1
    return "; ".join(shown) + (f"; and {more:,} more" if more else "")
