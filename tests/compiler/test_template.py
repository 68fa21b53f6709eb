"""Which braces are fields and which are text."""

from __future__ import annotations

import json
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.compiler.template import Template
from batch_agent.errors import InputError, SpecError

NAMES = ("path", "lang", "größe", "First Name")
VALUES = {name: f"<{name}>" for name in NAMES}


def fill(text: str, values: dict[str, str] = VALUES) -> str:
    return Template.parse(text, values.keys()).render(values)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("Review {path} in {lang}", "Review <path> in <lang>"),
        ("{path}{path}", "<path><path>"),
        ("no field", "no field"),
        ("{größe} {First Name}", "<größe> <First Name>"),
        ('{"file": "{path}"}', '{"file": "<path>"}'),
        ('{"a": {"b": {path}}}', '{"a": {"b": <path>}}'),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("{} { other } {0} {a-b} {%} {path: text}", "{} { other } {0} {a-b} {%} {path: text}"),
        ("{path, lang} {'path'} {path = 1} {the path of it}", "{path, lang} {'path'} {path = 1} {the path of it}"),
        ("{other: x} {{path: x}} {{other}}", "{other: x} {path: x} {other}"),
        ("{{path!r}} {{path:>10}} {{% for %}}", "{path!r} {path:>10} {% for %}"),
        ("{{{path}}}", "{<path>}"),
        ("{{{{path}}}}", "{{path}}"),
        ('{{"a": {{"b": "{path}"}}}}', '{"a": {"b": "<path>"}}'),
        ('{"a": {{other.x}}}', '{"a": {other.x}}'),
        ("open {{ and close }}", "open { and close }"),
        ("}} before {{", "} before {"),
        ("a lone { and {path} and }", "a lone { and <path> and }"),
        ("{\npath}", "{\npath}"),
        ("{paths and { path and {{path", "{paths and { path and {path"),
    ],
)
def test_only_fields_are_filled_and_every_other_brace_is_text(text: str, filled: str) -> None:
    assert fill(text) == filled


def test_an_identifier_that_is_no_field_is_an_error_that_names_it_and_the_fields() -> None:
    with pytest.raises(SpecError) as caught:
        Template.parse("Review {pth} now", ("path", "lang"))
    message = str(caught.value)
    assert "{pth}" in message
    assert "path, lang" in message
    assert "Did you mean {path}?" in message
    assert "{{pth}}" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{path}}", "task has {{path}}, and doubled braces are text here: write {path} to fill in the field"),
        ("Review {{ path }}.", "write {path} to fill in"),
        ("{{ path.x }}", "write {path.x} to fill in"),
        ("{{ path[0] | upper }}", "write {path[0]} to fill in"),
        ('{"a": {{path}}}', "template='jinja'"),
        ("{{First Name}}", "{{{{First Name}}}} sends {{First Name}}"),
        ("{{path}", "task has {{path}: write {path}"),
        ("{path}}", "task has {path}}: write {path}"),
        ("{path:>5}", "task has {path:>5}, and values go in as they are: write {path}"),
        ("{path!r}", "{{path!r}} sends the braces as text"),
        ("{path.x:.2f}", "write {path.x}"),
        ("{% for x in path %}", "which is Jinja: say template='jinja'"),
        ("Review {path", "task has {path without a closing brace: write {path} to fill in the field ({{path sends"),
        ("Review {path. Answer {lang}", "task has {path without a closing brace"),
        ('{path\n{"a": 1}', "task has {path without a closing brace"),
        ("Sort {First Name, please", "write {First Name}"),
        ("Sort {path.x", "write {path}"),
        ("{pth.x}", "task names the field {pth}, which the first input does not have"),
        ("{pth.x}", "Did you mean {path.x}? Write {{pth.x}} to send the braces as text."),
        ("{pth[0]}", "Did you mean {path[0]}?"),
    ],
)
def test_what_another_template_language_would_fill_in_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=re.escape(says)):
        fill(text)


@given(st.text("{}path.:!>5[0] ", max_size=14))
def test_whatever_str_format_would_fill_in_is_filled_in_the_same_or_refused(text: str) -> None:
    try:
        formatted = text.format(path="<path>")
    except (ValueError, LookupError, AttributeError):
        return
    try:
        filled = fill(text, {"path": "<path>"})
    except SpecError:
        return
    except InputError:  # an attribute of text, say
        return
    assert filled == formatted


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{Produkt Name}", "Product Name"),
        ("{product name}", "Product Name"),
        ("{ Product Name }", "Product Name"),
        ("{Product  Name}", "Product Name"),
        ("{Product-Name}", "Product Name"),
        ("{product_name}", "Product Name"),
        ("{ID}", "id"),
        ("{ id }", "id"),
        ("{Prcie (EUR)}", "Price (EUR)"),
    ],
)
def test_words_that_resemble_a_field_are_an_error_that_names_it(text: str, field: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"Did you mean {{{field}}}? Write {{{text}}} to send the braces")):
        Template.parse(f"Sort {text}", ("Product Name", "id", "Price (EUR)"))


def test_a_name_with_a_space_is_text_unless_the_input_has_exactly_that_field() -> None:
    assert Template.parse("{First Name}", ("other",)).names == ()
    assert Template.parse("{First Name}", ("First Name",)).names == ("First Name",)


def test_a_bound_field_becomes_text_wherever_it_stands() -> None:
    bound = Template.parse("{a} {b} {a}", ("a", "b")).bind({"a": "{b}"})
    assert bound.names == ("b",)
    assert bound.fill(["x"]) == "{b} x {b}"


names = st.sampled_from(NAMES[:2])
plain = st.text(st.characters(exclude_characters="{}", exclude_categories=("Cs",)), max_size=8)
anything = st.text(max_size=12)


@given(st.lists(st.one_of(plain, st.just("{{"), st.just("}}"), names.map("{{{}}}".format)), max_size=12), anything)
def test_a_template_that_str_format_accepts_means_the_same_here(pieces: list[str], value: str) -> None:
    text = "".join(pieces)
    values = {"path": value, "lang": value}
    assert fill(text, values) == text.format(**values)


@given(anything, anything, plain, plain)
def test_braces_in_values_are_never_expanded(first: str, second: str, between: str, after: str) -> None:
    values = {"path": first + "{lang}{{path}}", "lang": "{path}" + second}
    assert fill("{path}" + between + "{lang}" + after, values) == values["path"] + between + values["lang"] + after


letters = st.text(string.ascii_letters + ' ",:[]', max_size=10)
json_values = st.recursive(
    st.none() | st.integers() | letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3),
    max_leaves=12,
)


@given(json_values, st.sampled_from([None, 2]))
def test_json_in_a_task_is_sent_as_written(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert fill(text) == text


@given(st.text("{}ab ", max_size=30))
def test_any_mixture_of_braces_is_refused_or_parses_and_text_outside_them_is_never_lost(text: str) -> None:
    try:
        template = Template.parse(text, _words(text))
    except SpecError:
        return
    filled = template.fill([f"{{{name}}}" for name in template.names])
    assert filled.replace("{", "").replace("}", "") == text.replace("{", "").replace("}", "")


def _words(text: str) -> set[str]:
    """Everything that could be a name in the text, so that no identifier is unknown."""
    return set(text.replace("{", " ").replace("}", " ").split())


@given(st.text("{}ab ", max_size=30))
def test_without_adjacent_braces_nothing_but_fields_is_touched(text: str) -> None:
    spaced = text.replace("{", " { ").replace("}", " } ")
    assert fill(spaced, {"c": "!"}) == spaced
