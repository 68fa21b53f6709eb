"""The description of a tool for the model, from its function's signature and docstring; and the check of arguments.

Each parameter has its own pydantic validator. So a parameter may have any name, all problems of a call are reported at
once, and a default need not be JSON.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import from_json, to_json, to_jsonable_python

from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.errors import BadArguments, SpecError
from batch_agent.files.pictures import read_image
from batch_agent.foreign import describe, encodable
from batch_agent.messages import Content, Image, JsonObject
from batch_agent.tools.context import ToolContext
from batch_agent.value_type import value_type

Function = Callable[..., object]
_SHOWN_CHARACTERS = 80
_DEEPEST = 400  # levels of arguments that can be read, compared and recorded
_MISSING = inspect.Parameter.empty
_NO_JSON_FORM = (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError)
_write_identity = json.JSONEncoder(sort_keys=True, default=repr).encode


class _Generator(GenerateJsonSchema):
    """Pydantic's schema without titles that only repeat names, and without warnings about omitted defaults."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def emit_warning(self, kind: str, detail: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    adapter: TypeAdapter[object]
    default: object  # _MISSING if the model must give a value

    @property
    def required(self) -> bool:
        return self.default is _MISSING


@value_type
class Arguments:
    """The arguments of a call: ``raw`` from the model, and ``values`` for the function."""

    raw: Mapping[str, object]
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function. ``unbound``: it is a method without its ``self``."""

    parameters: Mapping[str, Parameter]
    extra: bool  # it takes **kwargs
    unbound: bool
    json_schema: JsonObject
    context: str | None = None  # the parameter that takes a ToolContext

    def parse(self, text: str) -> Arguments:
        """Return the arguments from a model's JSON text. Raises BadArguments, which names all problems."""
        raw = self._read(text)
        values: dict[str, object] = {}
        problems = []
        for name, value in raw.items():
            parameter = self.parameters.get(name)
            if parameter is not None:
                try:
                    values[name] = parameter.adapter.validate_python(value)
                except ValidationError as error:
                    problems += _problems(name, error)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # raised by a validator of the user  # noqa: BLE001
                    problems.append(f"{name}: {describe(error)}")
            elif self.extra and name != self.context:
                values[name] = value
            else:
                problems.append(self._unknown(name))
        problems += [f"{p.name}: missing" for p in self.parameters.values() if p.required and p.name not in raw]
        if problems:
            raise BadArguments(self._explain("the arguments do not fit", problems))
        return Arguments(raw, values)

    def identity(self, arguments: Arguments) -> str:
        """Return a text that is equal for equal calls. It includes defaults, and plain values as validated.

        For other values (models, secrets, sets…) it has the JSON from the model: their own serialisation may omit
        something, and two different calls must not be merged.
        """
        parts: dict[str, object] = dict(arguments.raw)
        for name, parameter in self.parameters.items():
            if name not in arguments.raw:
                if (default := _json_form(parameter.default)) is not _MISSING:
                    parts[name] = default
            elif isinstance(value := arguments.values[name], str | int | float | bool | None):
                parts[name] = value
        return _write_identity(parts)

    def _read(self, text: str) -> dict[str, object]:
        if not text.strip():
            return {}
        try:
            value = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            if "recursion limit" not in str(error):
                raise BadArguments(self._explain(f"the arguments are not JSON ({error})")) from None
            value = self._read_deep(text)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadArguments(self._explain(f"the arguments must be a JSON object, not {_shown(value)}"))
        return value

    def _read_deep(self, text: str) -> object:
        """Read arguments that are nested deeper than the usual parser goes. Integers beyond 64 bits are rounded."""
        try:
            value: object = orjson.loads(text)
        except ValueError:
            value = None
        depth, level = 0, [value]
        while level and depth <= _DEEPEST:
            depth += 1
            parts = (
                each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
            )
            level = [part for each in parts for part in each]
        if value is None or depth > _DEEPEST:
            raise BadArguments(self._explain(f"the arguments are not JSON, or nested more than {_DEEPEST} levels deep"))
        return value

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.parameters, n=1)
        return f"{name}: there is no such argument" + (f"; did you mean {near[0]!r}?" if near else "")

    def _explain(self, what: str, problems: typing.Sequence[str] = ()) -> str:
        expected = f"Expected: {self._expected()}"
        return "\n".join([f"{what}:" if problems else what, *(f"- {p}" for p in problems), expected])

    def _expected(self) -> str:
        shown = typing.cast(Mapping[str, Mapping[str, typing.Any]], self.json_schema["properties"])
        return ", ".join(
            f"{p.name} ({_type_name(shown[p.name])}{'' if p.required else ', optional'})"
            for p in self.parameters.values()
        )


def documentation_of(function: Function) -> tuple[str, Mapping[str, str]]:
    """Return the docstring without its sections, and the description of each parameter."""
    text = inspect.getdoc(_plain_function(function)) or ""
    if not text and not isinstance(function, types.FunctionType | types.MethodType | functools.partial):
        text = inspect.getdoc(type(function)) or ""
    import docstring_parser  # here, because a run without tools does not need it

    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return text, {}
    parts = (parsed.short_description, parsed.long_description)
    described = {p.arg_name.lstrip("*"): " ".join((p.description or "").split()) for p in parsed.params}
    return "\n\n".join(part for part in parts if part), described


def signature_of(function: Function, name: str, described: Mapping[str, str]) -> Signature:
    """Return the parameters of a function. Raises SpecError, with ``name`` in the message."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise SpecError(f"tool {name} has no signature to read: wrap it in a function with named parameters") from None
    hints = _hints(function, name)
    # The model must not see the arguments that a partial has bound: they may be secrets.
    bound = function.keywords if isinstance(function, functools.partial) else {}
    found: dict[str, Parameter] = {}
    extra = unbound = False
    context: str | None = None
    for index, item in enumerate(signature.parameters.values()):
        if index == 0 and item.name in ("self", "cls"):
            unbound = True
        elif item.kind is item.VAR_KEYWORD:
            extra = True
        elif item.kind in (item.VAR_POSITIONAL, item.POSITIONAL_ONLY):
            raise SpecError(f"tool {name}: {item} has no name that a model can use; give it a named parameter instead")
        elif item.name in bound:
            continue
        elif ToolContext in (hint := hints.get(item.name), *typing.get_args(hint)):
            if context is not None:
                raise SpecError(f"tool {name}: {context} and {item.name} both take a ToolContext; one is enough")
            context = item.name
        elif parameter := _parameter(name, item, hints):
            found[item.name] = parameter
    return Signature(found, extra, unbound, _json_schema(found, extra, described), context)


def _plain_function(function: Function) -> Function:
    """Return the function that has the annotations and the docstring."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return function
    return typing.cast(Function, type(function).__call__)


def is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(_plain_function(function))


def _hints(function: Function, name: str) -> Mapping[str, object]:
    plain = _plain_function(function)
    try:
        return typing.get_type_hints(plain, localns=_captured(plain), include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        raise SpecError(
            f"tool {name}: its annotations cannot be read ({describe(error)}); a type in an annotation must be a "
            "global of the function's module, or a local of the enclosing function that the tool's code also uses. "
            "Other local types are lost with `from __future__ import annotations`: move the type to the module"
        ) from None


def _captured(function: Function) -> dict[str, object]:
    """Return the variables of enclosing functions in a closure: an annotation stored as text may name one."""
    plain = inspect.unwrap(function)
    plain = plain.__func__ if isinstance(plain, types.MethodType) else plain
    found: dict[str, object] = {}
    if isinstance(plain, types.FunctionType):
        for variable, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                found[variable] = cell.cell_contents
    return found


def _parameter(tool: str, item: inspect.Parameter, hints: Mapping[str, object]) -> Parameter | None:
    """Return the parameter. None if its type has no JSON form and it has a default, which the function then uses."""
    if isinstance(item.default, FieldInfo):
        raise SpecError(f"tool {tool}: write {item.name}: Annotated[..., Field(...)], with a plain default or none")
    hint = hints.get(item.name, object if item.annotation is _MISSING else item.annotation)
    if hint is object:
        hint = typing.Any
    if item.default is None:
        hint = typing.Optional[hint]  # noqa: UP045 - hint is a value here
    try:
        adapter: TypeAdapter[object] = TypeAdapter(typing.cast(typing.Any, hint))
        adapter.json_schema(schema_generator=_Generator)
    except PydanticUserError as error:
        if item.default is not _MISSING and isinstance(error, _NO_JSON_FORM):
            return None
        reason = str(error).splitlines()[0]
        raise SpecError(f"tool {tool}: a model cannot give a value for {item.name}: {reason}") from None
    return Parameter(item.name, adapter, item.default)


def _json_schema(parameters: Mapping[str, Parameter], extra: bool, described: Mapping[str, str]) -> JsonObject:
    schemas, shared = TypeAdapter.json_schemas(
        [(name, "validation", parameter.adapter) for name, parameter in parameters.items()], schema_generator=_Generator
    )
    properties: JsonObject = {}
    for name, parameter in parameters.items():
        fragment = dict(schemas[name, "validation"])
        if described.get(name):
            fragment.setdefault("description", described[name])
        if (default := _json_form(parameter.default)) is not _MISSING:
            fragment["default"] = default
        properties[name] = fragment
    schema: JsonObject = {"type": "object", "properties": properties}
    if required := [p.name for p in parameters.values() if p.required]:
        schema["required"] = list(required)
    if not extra:
        schema["additionalProperties"] = False
    if "$defs" in shared:
        schema["$defs"] = shared["$defs"]
    return schema


def _json_form(default: object) -> typing.Any:
    """Return a default as JSON, or _MISSING if it has no JSON form."""
    if default is _MISSING:
        return _MISSING
    try:
        return to_jsonable_python(default, inf_nan_mode="strings")
    except ValueError:
        return _MISSING


def _problems(name: str, error: ValidationError) -> list[str]:
    out = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join([name, *(str(part) for part in item["loc"])])
        out.append(f"{where}: {item['msg'].removeprefix('Value error, ')} (got {_shown(item['input'])})")
    return out


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _type_name(fragment: Mapping[str, typing.Any]) -> str:
    """Return the type of a parameter as a short text, from its JSON schema."""
    if "const" in fragment:
        return json.dumps(fragment["const"])
    if "enum" in fragment:
        return " | ".join(json.dumps(value) for value in fragment["enum"])
    if "anyOf" in fragment:
        return " | ".join(dict.fromkeys(_type_name(option) for option in fragment["anyOf"]))
    if "$ref" in fragment:
        return str(fragment["$ref"]).rpartition("/")[2]
    return str(fragment.get("type", "any"))


# Default maximum of a result, about fifty pages. A conversation holds several results, and each later turn sends them
# again.
MAX_TOKENS = 16_000


def render_result(value: object, max_tokens: int | None) -> Content:
    """Return a text that is followed by images with its images, and any other result as text. Raises InputError for an
    image that models do not accept."""
    match value:
        case (str(text), Image(), *_):
            images = (read_image(part) for part in value[1:] if isinstance(part, Image))
            return (cut_tokens(text, max_tokens), *images)
    return render(value, max_tokens)


def render(value: object, max_tokens: int | None) -> str:
    """Return text unchanged and other values as JSON; objects without a JSON form become their ``str``."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, bytes | bytearray):
        text = _bytes_text(bytes(value))
    else:
        text = to_json(value, bytes_mode="base64", inf_nan_mode="strings", fallback=str).decode()
    return cut_tokens(text, max_tokens)


def _bytes_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"[{len(data)} bytes that are not text, in base64]\n{base64.b64encode(data).decode()}"


def cut_tokens(text: str, max_tokens: int | None) -> str:
    """Return the first ``max_tokens`` of a text, plus a line that says how much is missing.

    Only the returned part of a long text is encoded, so the missing amount is an estimate. Lone surrogates become
    question marks: a file name may contain them, but a request cannot.
    """
    if max_tokens is None or len(text) <= max_tokens:
        return text if text.isascii() else encodable(text)
    limit = max_tokens * BYTES_PER_TOKEN
    head = text[:limit]  # a character is at least one byte
    data = head.encode(errors="replace")
    if len(head) == len(text) and len(data) <= limit:
        return encodable(text)
    shown = data[:limit].decode(errors="ignore")
    total = len(data) / len(head) * len(text)
    missing = math.ceil((total - len(shown.encode())) / BYTES_PER_TOKEN)
    return (
        f"{shown}\n[cut: this is the beginning; about {missing} of {math.ceil(total / BYTES_PER_TOKEN)} tokens "
        "are left out]"
    )
