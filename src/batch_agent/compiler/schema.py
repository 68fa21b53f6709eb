"""A user's output schema, resolved once: the JSON schema for the model, and the exact validation of an answer.

pydantic handles types (pydantic models, dataclasses, TypedDicts, ``list[T]``, unions, Literals …); a JSON schema
validator checks a schema given as a dict. Both report errors as ``path: message`` lines. ``outputs`` handles text that
is not quite JSON.

User schemas run the user's code. Whatever their validators raise becomes Invalid here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import re
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NoReturn, TypeVar, cast

import typing_extensions
from pydantic import VERSION, JsonValue, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import from_json, to_json

from batch_agent.errors import Invalid, NotJSON, OutputError, SpecError
from batch_agent.foreign import boundary, message_of
from batch_agent.messages import JsonObject

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
V = TypeVar("V")

ALLOWED = "a pydantic model class, a dataclass, a TypedDict, a type such as list[T], a JSON schema as a dict, or None"
ERRORS_SHOWN = 10
INPUT_SHOWN = 100  # characters
MASK = "the value"
# What makes a part of a schema of pydantic write another thing than it reads, or run the user's code.
UNLIKE = (
    *("validation_alias", "serialization_alias", "serialization_exclude", "serialization_exclude_if", "serialization"),
    *("computed_fields", "init_only", "custom_init", "post_init"),
)
# Arguments with which pydantic accepts fields by their names beside their aliases; it has them since 2.11.
BY_NAME: typing.Any = {"by_alias": True, "by_name": True} if tuple(map(int, VERSION.split(".")[:2])) >= (2, 11) else {}
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Words for types in the short form of a schema.
TYPES = {
    **dict.fromkeys(("text", "string", "str"), "string"),
    **dict.fromkeys(("number", "float"), "number"),
    **dict.fromkeys(("integer", "int"), "integer"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
}
COMBINED = ("$schema", "$ref", "anyOf", "oneOf", "allOf", "enum", "not", "if", "patternProperties")
CHOICE = "|"
SCALARS = frozenset(("string", "integer", "number", "boolean", "null"))


class OutputSchema(ABC, Generic[T_co]):
    """What each answer must be. ``json_schema`` is for models and backends, ``name`` for wires that require one."""

    def __init__(self, json_schema: JsonObject) -> None:
        self.json_schema = json_schema
        self.json_text = to_json(json_schema).decode()
        title = re.sub(r"[^A-Za-z0-9_-]+", "_", str(json_schema.get("title", "")))
        self.name = title.strip("_")[:64] or "answer"

    @classmethod
    def of(cls, value: object) -> OutputSchema[object] | None:
        """Return the schema of ``value``. None and ``str`` mean text without a schema."""
        if value is None or value is str:
            return None
        if isinstance(value, str) or inspect.isroutine(value):
            raise SpecError(f"output_schema is {_shown(value)}: give {ALLOWED}")
        try:
            if isinstance(value, Mapping):
                return _ShortSchema(value) if _is_short_form(value) else _JsonSchema(value)
            return _TypeSchema(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise SpecError(f"output_schema cannot be used: {_unusable(error)}. Give {ALLOWED}") from error

    @property
    def is_scalar(self) -> bool:
        """Return whether an answer is a plain string, number, boolean or null, never an object or array."""
        options = self.json_schema.get("anyOf", [self.json_schema])
        return isinstance(options, list) and all(map(_is_scalar, options))

    def validate_json(self, text: str | bytes) -> T_co:
        """Validate exactly. Raises NotJSON or Invalid."""
        try:
            data = text.encode() if isinstance(text, str) else text
        except UnicodeEncodeError as error:
            raise NotJSON(f"the answer is not valid Unicode: {error}") from None
        return _guarded(self._from_json, data)

    def validate_python(self, value: object) -> T_co:
        """Validate a parsed value exactly. Raises Invalid."""
        return _guarded(self._from_python, value)

    def read_written(self, text: str | bytes) -> T_co:
        """Return the value of JSON that ``to_plain`` wrote: its fields have their own names, not their aliases. Raises
        NotJSON or Invalid."""
        return _guarded(self._from_written, text.encode() if isinstance(text, str) else text)

    def read_back(self, text: str | bytes) -> T_co:
        """Return the value from which ``to_plain`` wrote this text. Raises Invalid if the schema rejects its own
        output, or if it reads another value from it."""
        if self.reads_back:
            return self.validate_json(text)
        try:
            value = self.read_written(text)
        except OutputError as error:
            raise Invalid(f"the schema rejects its own output when it is read again: {error}") from None
        if not self.is_written_as(value, from_json(text)):
            raise Invalid("the schema makes another value of its own output when it is read again")
        return value

    def is_written_as(self, value: object, plain: object) -> bool:
        """Return whether ``to_plain`` writes ``value`` as ``plain``. Raises Invalid."""
        with boundary(lambda raised: Invalid(f"the output cannot be written as JSON: {raised}"), OutputError):
            return to_json(self.to_plain(value)) == to_json(plain)

    @property
    def reads_back(self) -> bool:
        """Return whether every written value is certain to be the same after it is read again."""
        return True

    @property
    def written_schema(self) -> JsonObject:
        """The JSON schema of what ``to_plain`` writes: with the fields' own names instead of their aliases."""
        return self.json_schema

    @abstractmethod
    def to_plain(self, value: object) -> object:
        """Return a value of this schema as plain JSON data. Raises whatever the user's own serializers raise."""

    # Exact validation. Raises NotJSON, Invalid, or whatever the user's own code raises.

    @abstractmethod
    def _from_json(self, data: bytes) -> T_co: ...

    @abstractmethod
    def _from_python(self, value: object) -> T_co: ...

    def _from_written(self, data: bytes) -> T_co:
        return self._from_json(data)


class _TypeSchema(OutputSchema[object]):
    def __init__(self, kind: object) -> None:
        self._adapter = TypeAdapter(cast("type[object]", modern_typed_dicts(kind)))
        super().__init__(self._adapter.json_schema())

    def _from_json(self, data: bytes) -> object:
        return self._adapter.validate_json(data)

    def _from_python(self, value: object) -> object:
        return self._adapter.validate_python(value)

    def _from_written(self, data: bytes) -> object:
        return self._adapter.validate_json(data, **BY_NAME)

    @functools.cached_property
    def reads_back(self) -> bool:
        return _reads_back(self._adapter.core_schema)

    @functools.cached_property
    def written_schema(self) -> JsonObject:
        return self._adapter.json_schema(by_alias=False)

    def to_plain(self, value: object) -> object:
        # A validator may have returned another type than declared; it is then written as it is.
        plain: object = self._adapter.dump_python(value, mode="json", warnings=False)
        return plain


class _JsonSchema(OutputSchema[object]):
    def __init__(self, given: Mapping[object, object]) -> None:
        import jsonschema_rs  # imported here, because few runs need it and it is slow to load

        schema = cast(JsonObject, from_json(to_json(given)))
        _check_types(schema, "")
        super().__init__(schema)
        # The mask keeps whole answers out of the messages.
        self._validator = jsonschema_rs.validator_for(schema, validate_formats=True, retriever=no_retrieval, mask=MASK)

    def _from_json(self, data: bytes) -> object:
        try:
            value = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise _not_json(str(error), data) from None
        return self._from_python(value)

    def _from_python(self, value: object) -> object:
        errors = [
            # If the message does not mention the value, it names a property, and the value would be everything around
            # it.
            _line(error.instance_path, error.message, _got(error.instance) if MASK in error.message else "")
            for error in self._validator.iter_errors(value)
        ]
        if errors:
            raise Invalid(_lines(errors))
        return value

    def to_plain(self, value: object) -> object:
        return value


class _ShortSchema(_JsonSchema):
    """A schema in its short form. Its fields are all that the model is asked for; other fields in an answer are
    ignored."""

    def __init__(self, given: Mapping[object, object]) -> None:
        super().__init__(cast("Mapping[object, object]", written_out(cast(JsonObject, given))))

    def _from_python(self, value: object) -> object:
        return super()._from_python(_without_extras(value, self.json_schema))


def _without_extras(value: object, schema: JsonValue) -> object:
    """Return the value without the fields that the schema does not name."""
    if not isinstance(schema, dict):
        return value
    properties = schema.get("properties")
    if isinstance(value, dict) and isinstance(properties, dict):
        return {name: _without_extras(item, properties[name]) for name, item in value.items() if name in properties}
    if isinstance(value, list):
        return [_without_extras(item, schema.get("items")) for item in value]
    return value


# The short form of a schema has the fields of an answer with their types:
#     {"label": "a|b|c", "score": "number", "why": "text", "tags": ["text"], "place": {"city": "text"}}
def is_json_schema(value: Mapping[str, object]) -> bool:
    return (
        value.get("type") in JSON_TYPES
        or isinstance(value.get("properties"), dict)
        or any(name in value for name in COMBINED)
    )


def _is_short_form(value: Mapping[object, object]) -> bool:
    """Return whether a dict can only be a short form: each value is the type of a field."""
    if not all(isinstance(name, str) for name in value) or is_json_schema(cast("Mapping[str, object]", value)):
        return False
    try:
        written_out(cast(JsonObject, value))
    except SpecError:
        return False
    return True


def written_out(fields: JsonObject) -> JsonObject:
    """Return the full JSON schema of a short form. Raises SpecError."""
    if not fields:
        raise SpecError('names no field; give fields as {"label": "a|b|c"}')
    properties: JsonObject = {name: _field(name, value) for name, value in fields.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _field(name: str, value: JsonValue) -> JsonObject:
    if isinstance(value, dict):
        return value if is_json_schema(value) else written_out(value)
    if isinstance(value, list) and len(value) == 1:
        return {"type": "array", "items": _field(name, value[0])}
    if isinstance(value, str) and value in TYPES:
        return {"type": TYPES[value]}
    choices = value.split(CHOICE) if isinstance(value, str) else []
    if len(choices) > 1 and all(choice.strip() for choice in choices):
        return {"type": "string", "enum": [choice.strip() for choice in choices]}
    schema = f"; the type of a JSON schema is {', '.join(JSON_TYPES)}" if name == "type" else ""
    raise SpecError(
        f"{name} is {to_json(value).decode()}: a field is text, number, integer, boolean, a choice such as a|b|c, "
        f"a list of one of these or an object{schema}"
    )


def _check_types(schema: JsonValue, where: str) -> None:
    """Raise ValueError for a ``type`` that does not exist in JSON schema. The message names its place, the nearest
    type, and all types."""
    if isinstance(schema, list):
        for item in schema:
            _check_types(item, where)
    if not isinstance(schema, dict):
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str) and kind not in JSON_TYPES:
            near = difflib.get_close_matches(kind, JSON_TYPES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"the type {kind!r}{where} is unknown: {hint}The types are {', '.join(JSON_TYPES)}")
    for name, part in schema.items():
        if name in ("properties", "$defs", "definitions", "patternProperties") and isinstance(part, dict):
            for field, inner in part.items():
                _check_types(inner, f"{where or ' of'} {field}")
        elif name in ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "not"):
            _check_types(part, where)


def _is_scalar(schema: JsonValue) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    return SCALARS.issuperset(kinds if isinstance(kinds, list) else [kinds]) or "enum" in schema


def no_retrieval(uri: str) -> NoReturn:
    raise ValueError(f"a schema may only refer to itself, not to {uri}")


def _reads_back(node: object) -> bool:
    """Return whether no part of a pydantic schema runs the user's code, or writes a field in another form than it
    reads."""
    if isinstance(node, Mapping):
        if str(node.get("type", "")).startswith("function") or node.get("init") is False:
            return False
        return not any(map(node.get, UNLIKE)) and all(_reads_back(node[name]) for name in node if name != "metadata")
    return all(map(_reads_back, node)) if isinstance(node, list | tuple) else True


VALIDATION = boundary(lambda raised: Invalid(f"the schema's own validation raised {raised}"), OutputError)


def _guarded(read: Callable[[V], T], value: V) -> T:
    with VALIDATION:
        try:
            return read(value)
        except ValidationError as error:
            raise _explained(error, value) from None


def _explained(error: ValidationError, value: object) -> OutputError:
    details = error.errors(include_url=False, include_context=False)
    if details[0]["type"] == "json_invalid" and not details[0]["loc"]:
        return _not_json(details[0]["msg"].removeprefix("Invalid JSON: "), value)
    return Invalid(
        _lines(
            # The input of a missing field is everything around it, which does not help.
            _line(item["loc"], item["msg"], "" if item["type"] == "missing" else _got(item["input"]))
            for item in details
        )
    )


def _not_json(reason: str, data: object) -> NotJSON:
    text = data.decode(errors="replace") if isinstance(data, bytes) else str(data)
    return NotJSON(f"not JSON: {reason}; the text is {_shown(text)}")


def _lines(lines: Iterable[str]) -> str:
    every = list(dict.fromkeys(lines))
    more = [f"… and {len(every) - ERRORS_SHOWN} more"] if len(every) > ERRORS_SHOWN else []
    return "\n".join(every[:ERRORS_SHOWN] + more)


def _line(path: Iterable[str | int], message: str, got: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return f"{where or 'the answer'}: {message}{got}"


def _got(value: object) -> str:
    return f", got {_shown(value)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= INPUT_SHOWN else f"{text[:INPUT_SHOWN]}…"


def _unusable(error: BaseException) -> str:
    message = message_of(error).split("\n\n", 1)[0].rstrip(".")
    if isinstance(error, PydanticSchemaGenerationError):  # the rest is advice to pydantic's own users
        message = message.partition(". Set `arbitrary_types_allowed")[0]
        return message.replace("Unable to generate pydantic-core schema for", "there is no JSON schema for")
    return message or type(error).__name__


def modern_typed_dicts(kind: object) -> object:
    """Return the schema with each ``typing.TypedDict`` in it rebuilt with ``typing_extensions``: before Python 3.12,
    ``typing.TypedDict`` lacks data that pydantic needs, and pydantic refuses it. At run time, both are dicts."""
    if sys.version_info >= (3, 12):
        return kind
    if isinstance(kind, type) and typing.is_typeddict(kind):
        return _rebuilt(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin in (typing.Literal, typing.Annotated):
        return kind
    modern = tuple(modern_typed_dicts(argument) for argument in arguments)
    if all(new is old for new, old in zip(modern, arguments, strict=True)):
        return kind
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, modern)
    return origin[modern]


def _rebuilt(kind: type) -> object:
    hints = typing.get_type_hints(kind, include_extras=True)
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset(hints))
    fields = {name: _marked(hint, name in required) for name, hint in hints.items()}
    make = cast("Callable[[str, dict[str, object]], type]", typing_extensions.TypedDict)
    modern = make(kind.__name__, fields)
    modern.__doc__ = kind.__doc__  # the schema's description
    return modern


def _marked(hint: object, required: bool) -> object:
    origin = typing.get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        return origin[modern_typed_dicts(typing.get_args(hint)[0])]
    marker = typing.Required if required else typing.NotRequired
    return marker[modern_typed_dicts(hint)]
