import dataclasses
import enum
import socket
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Optional

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, field_validator
from typing_extensions import TypedDict

from batch_agent.errors import BadArguments, SpecError
from batch_agent.tools import Tool
from batch_agent.tools.schema import Arguments, signature_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: int = 0

    @field_validator("y")
    @classmethod
    def not_too_far(cls, y: int) -> int:
        if y > 100:
            raise KeyError("a validator's own mistake")
        return y


@dataclasses.dataclass
class Size:
    width: float
    unit: str = "m"


class Options(TypedDict, total=False):
    deep: bool


def rich(
    place: Point,
    size: Size,
    colour: Colour = Colour.RED,
    mode: Literal["fast", "slow"] = "fast",
    limit: Optional[int] = None,  # noqa: UP045
    ratio: float | None = 0.5,
    names: list[str] = (),  # type: ignore[assignment]
    counts: Mapping[str, int] = {},
    options: Options | None = None,
) -> str:
    return repr((place, size, colour, mode, limit, ratio, names, counts, options))


def parse(function: Callable[..., object], text: str) -> Arguments:
    return Tool.define(function).signature.parse(text)


def properties(function: Callable[..., object]) -> dict[str, dict[str, object]]:
    return Tool.define(function).spec.parameters["properties"]  # type: ignore[return-value]


def test_the_schema_follows_the_signature() -> None:
    schema = Tool.define(rich).spec.parameters
    found = properties(rich)
    assert schema["type"] == "object"
    assert schema["required"] == ["place", "size"]
    assert schema["additionalProperties"] is False
    assert found["place"]["$ref"] == "#/$defs/Point"
    assert found["mode"] == {"type": "string", "enum": ["fast", "slow"], "default": "fast"}
    assert found["limit"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    assert found["ratio"]["default"] == 0.5
    assert found["colour"]["default"] == "red"
    assert found["names"]["items"] == {"type": "string"}
    assert set(schema["$defs"]) == {"Point", "Size", "Colour", "Options"}  # type: ignore[arg-type]
    assert "title" not in found["limit"]
    orjson.dumps(schema)


def test_arguments_become_the_types_of_the_signature() -> None:
    values = parse(
        rich,
        '{"place": {"x": "3"}, "size": {"width": 2}, "colour": "blue", "limit": "4", "names": ["a"], '
        '"counts": {"k": 1}, "options": {"deep": true}}',
    ).values
    assert values == {
        "place": Point(x=3),
        "size": Size(2.0),
        "colour": Colour.BLUE,
        "limit": 4,
        "names": ["a"],
        "counts": {"k": 1},
        "options": {"deep": True},
    }


def google(path: str, depth: int = 1) -> None:
    """Walk a tree.

    It visits every node.

    Args:
        path: where to begin,
            as a path
        depth (int): how far
    """


def numpy(path: str, depth: int = 1) -> None:
    """Walk a tree.

    It visits every node.

    Parameters
    ----------
    path : str
        where to begin,
        as a path
    depth : int
        how far
    """


def rest(path: str, depth: int = 1) -> None:
    """Walk a tree.

    It visits every node.

    :param path: where to begin,
        as a path
    :param depth: how far
    """


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_descriptions_come_from_the_docstring(function: Callable[..., object]) -> None:
    assert Tool.define(function).description == "Walk a tree.\n\nIt visits every node."
    found = properties(function)
    assert found["path"]["description"] == "where to begin, as a path"
    assert found["depth"]["description"] == "how far"


def test_a_description_in_the_annotation_wins() -> None:
    def function(n: Annotated[int, Field(description="mine", ge=1)]) -> None:
        """Do.

        Args:
            n: theirs
        """

    assert properties(function)["n"] == {"type": "integer", "description": "mine", "minimum": 1}


def test_a_function_without_a_docstring_or_annotations_is_a_tool() -> None:
    def bare(a, b=1):  # type: ignore[no-untyped-def]
        return a, b

    assert Tool.define(bare).description == ""
    assert properties(bare) == {"a": {}, "b": {"default": 1}}
    assert parse(bare, '{"a": [1, {"b": null}]}').values == {"a": [1, {"b": None}]}


def test_names_that_pydantic_uses_itself_are_fine_as_parameters() -> None:
    def function(schema: str, model_config: int, json: str, _hidden: int = 1, copy: bool = False) -> None: ...

    assert list(properties(function)) == ["schema", "model_config", "json", "_hidden", "copy"]
    assert parse(function, '{"schema": "s", "model_config": 1, "json": "j"}').values["schema"] == "s"


@pytest.mark.parametrize("text", ["", "  ", "null", "{}"])
def test_no_arguments_can_be_said_in_several_ways(text: str) -> None:
    def function(n: int = 1) -> None: ...

    assert parse(function, text).values == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ('{"x": NaN}', "not JSON"),
        ("[1]", "must be a JSON object, not [1]"),
        ('"path"', 'must be a JSON object, not "path"'),
        ("{}", "- path: missing"),
        ('{"pth": "a"}', "- pth: there is no such argument; did you mean 'path'?"),
        ('{"path": "a", "depth": "deep"}', "- depth: Input should be a valid integer"),
        ('{"path": "a", "depth": "deep"}', '(got "deep")'),
        ('{"path": null}', "- path: Input should be a valid string (got null)"),
    ],
)
def test_wrong_arguments_are_explained(text: str, problem: str) -> None:
    with pytest.raises(BadArguments) as caught:
        parse(google, text)
    assert problem in str(caught.value)
    assert "Expected: path (string), depth (integer, optional)" in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(BadArguments) as caught:
        parse(rich, '{"place": {"x": "a"}, "mode": "medium", "colour": "green", "extra": 1}')
    message = str(caught.value)
    for name in ("place.x:", "mode:", "colour:", "extra:", "size: missing"):
        assert f"- {name}" in message
    assert 'mode ("fast" | "slow", optional)' in message
    assert "limit (integer | null, optional)" in message


def test_a_validator_that_breaks_is_a_wrong_argument_too() -> None:
    with pytest.raises(BadArguments, match="place: KeyError"):
        parse(rich, '{"place": {"x": 1, "y": 101}, "size": {"width": 1}}')


def test_keyword_parameters_take_any_argument() -> None:
    def function(n: int, **rest: object) -> None: ...

    assert "additionalProperties" not in Tool.define(function).spec.parameters
    assert parse(function, '{"n": "1", "more": [2]}').values == {"n": 1, "more": [2]}


def test_a_default_of_none_allows_null() -> None:
    def function(n: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    assert parse(function, '{"n": null}').values == {"n": None}


def test_a_default_without_a_json_form_does_not_matter() -> None:
    marker = object()

    def function(n: int | None = marker, *, sock: socket.socket | None = None, call: Callable[[], int] = int) -> None:  # type: ignore[assignment]
        ...

    assert properties(function) == {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    signature = Tool.define(function).signature
    assert signature.identity(signature.parse("{}")) != signature.identity(signature.parse('{"n": null}'))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(*args: int): ...", r"\*args"),
        ("def f(a, /): ...", "named parameter"),
        ("def f(s: socket.socket): ...", "cannot give a value for s"),
        ("def f(a: 'Nowhere'): ...", "annotations cannot be read"),
        ("def f(a: int = Field(1)): ...", "Annotated"),
        ("f = iter", "no signature"),
    ],
)
def test_a_signature_that_no_model_can_use_is_a_spec_error(source: str, message: str) -> None:
    names: dict[str, Callable[..., object]] = {}
    exec(source, {"socket": socket, "Field": Field}, names)
    with pytest.raises(SpecError, match=message):
        Tool.define(names["f"])


CLOSURES = """
from __future__ import annotations
from pydantic import BaseModel

def make(used):
    class Query(BaseModel):
        words: str

    def wanted(query: Query) -> str:
        return query.words if isinstance(query, Query) else ""

    def unwanted(query: Query) -> str:
        return query.words

    return wanted if used else unwanted
"""


def test_an_annotation_may_name_a_local_class_that_the_closure_uses() -> None:
    module: dict[str, Callable[..., Callable[..., object]]] = {}
    exec(CLOSURES, module)
    tool = Tool.define(module["make"](used=True))
    assert tool(**tool.signature.parse('{"query": {"words": "bees"}}').values) == "bees"
    with pytest.raises(SpecError, match=r"tool unwanted: .*'Query' is not defined.*move the type to the module"):
        Tool.define(module["make"](used=False))


def identity(function: Callable[..., object], text: str) -> str:
    signature = Tool.define(function).signature
    return signature.identity(signature.parse(text))


def test_calls_are_the_same_when_defaults_and_types_make_them_so() -> None:
    same = identity(google, '{"path": "a"}')
    assert identity(google, '{"depth": 1, "path": "a"}') == same
    assert identity(google, '{"path": "a", "depth": "1"}') == same
    assert identity(google, '{"path": "a", "depth": 2}') != same


def test_two_secrets_are_never_taken_for_one() -> None:
    def function(key: SecretStr, keys: list[SecretStr] | None = None) -> None: ...

    assert identity(function, '{"key": "a"}') != identity(function, '{"key": "b"}')
    assert identity(function, '{"key": "a", "keys": ["x"]}') != identity(function, '{"key": "a", "keys": ["y"]}')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.one_of(st.text(), json_values.map(lambda v: __import__("json").dumps(v))))
def test_whatever_a_model_sends_is_arguments_or_a_readable_error(text: str) -> None:
    signature = Tool.define(rich).signature
    try:
        arguments = signature.parse(text)
    except BadArguments as error:
        assert "Expected:" in str(error)
    else:
        assert signature.identity(arguments)


@pytest.mark.parametrize(("depth", "is_read"), [(150, True), (300, True), (398, True), (1000, False), (100_000, False)])
def test_deeply_nested_arguments_are_read_or_refused_in_words(depth: int, is_read: bool) -> None:
    signature = signature_of(lambda_of_lists, "take", {})
    text = '{"n": ' + "[" * depth + "]" * depth + "}"
    if is_read:
        assert signature.identity(signature.parse(text))
    else:
        with pytest.raises(BadArguments, match="nested more than 400 levels"):
            signature.parse(text)


def lambda_of_lists(n: list[object]) -> None:
    """Take a list."""
