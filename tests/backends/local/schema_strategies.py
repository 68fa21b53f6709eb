"""Random JSON schemas of the kind pydantic writes, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from pydantic import JsonValue

Schema = dict[str, JsonValue]

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6)
scalars = st.none() | st.booleans() | st.integers(-50, 50) | st.text(max_size=5)


@st.composite
def strings(draw: st.DrawFn, longest: int = 130) -> Schema:
    low = draw(st.none() | st.integers(0, 12))
    high = draw(st.none() | st.integers(0, longest).map(lambda extra: (low or 0) + extra))
    return (
        {"type": "string"} | ({} if low is None else {"minLength": low}) | ({} if high is None else {"maxLength": high})
    )


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["integer", "number"]))
    low, span = draw(st.integers(-500, 500)), draw(st.integers(2, 800))
    bounds = draw(st.sampled_from([(), ("minimum",), ("maximum",), ("minimum", "maximum"), ("exclusiveMinimum",)]))
    return {"type": kind} | {key: low + (span if "axi" in key else 0) for key in bounds}


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(names, inner, min_size=1, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": {**properties}, "required": [*required], "additionalProperties": False}


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    low = draw(st.integers(0, 2))
    high = draw(st.none() | st.integers(low, 4))
    return {"type": "array", "items": draw(inner), "minItems": low} | ({} if high is None else {"maxItems": high})


def tuples(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": [*items], "minItems": len(items), "maxItems": len(items)}
    )


def mappings(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda values, most: {"type": "object", "additionalProperties": values, "maxProperties": most},
        inner,
        st.integers(0, 3),
    )


def schemas(longest: int = 130) -> st.SearchStrategy[Schema]:
    leaves = st.one_of(
        strings(longest),
        numbers(),
        st.sampled_from(
            [{"type": "boolean"}, {"type": "null"}, {}, {"type": ["string", "null"]}, {"$ref": "#/$defs/A"}]
        ),
        st.lists(scalars, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": [*values]}),
        scalars.map(lambda value: {"const": value}),
        st.sampled_from(["date", "time", "date-time", "uuid"]).map(lambda name: {"type": "string", "format": name}),
    )
    bodies = st.recursive(
        leaves,
        lambda inner: st.one_of(
            objects(inner),
            arrays(inner),
            tuples(inner),
            mappings(inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": [*branches]}),
        ),
        max_leaves=8,
    )
    shared = st.one_of(strings(longest), numbers(), objects(strings(longest)))
    return st.builds(lambda body, a: {**body, "$defs": {"A": a}}, bodies, shared)
