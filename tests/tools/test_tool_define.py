import asyncio
import functools
import json

import pytest

from batch_agent.errors import SpecError
from batch_agent.messages import ToolCall
from batch_agent.tools import Tool, http_get, read_file, resolve_tools
from batch_agent.tools.schema import MAX_TOKENS


def plain(text: str, times: int = 1) -> str:
    """Repeat a text."""
    return text * times


class Shelf:
    def __init__(self, book: str) -> None:
        self.book = book

    def plain(self, page: int) -> str:
        """Read a page."""
        return f"{self.book}, page {page}"

    @Tool.define(cacheable=True)
    def look(self, page: int) -> str:
        """Read a page.

        Args:
            page: which one
        """
        return f"{self.book}, page {page}"

    @Tool.define
    async def write(self, page: int) -> str:
        return f"wrote {page}"

    def __call__(self, page: int) -> str:
        """Read it aloud."""
        return self.plain(page)


class AsyncCaller:
    async def __call__(self, n: int) -> int:
        return n + 1


def test_the_decorator_works_without_parentheses_and_the_tool_is_still_the_function() -> None:
    tool = Tool.define(plain)
    assert isinstance(tool, Tool)
    assert tool("ab", times=2) == "abab"
    assert (tool.name, tool.description) == ("plain", "Repeat a text.")
    assert tool.spec.name == "plain"


def test_the_decorator_works_with_parentheses() -> None:
    @Tool.define(name="double", description="Twice.", max_tokens=5, rate_limit="60/min", timeout=2, effect="read")
    def twice(n: int) -> int:
        return 2 * n

    assert twice(4) == 8
    assert (twice.name, twice.description) == ("double", "Twice.")
    assert (twice.max_tokens, twice.rate_limit, twice.timeout) == (5, 1.0, 2)


def test_a_tool_has_a_limit_unless_it_says_none() -> None:
    assert Tool.define(plain).max_tokens == MAX_TOKENS
    assert Tool.define(plain, max_tokens=None).max_tokens is None
    assert Tool.web_search.max_tokens == MAX_TOKENS


async def test_an_async_tool_is_called_as_the_coroutine_function_it_was() -> None:
    @Tool.define()
    async def later(n: int) -> int:
        return n

    assert await later(3) == 3


@pytest.mark.parametrize(
    ("options", "cacheable", "effect", "declared"),
    [
        ({}, False, "write", False),
        ({"cacheable": True}, True, "read", True),
        ({"cacheable": False}, False, "read", True),
        ({"effect": "read"}, False, "read", True),
        ({"effect": "write"}, False, "write", True),
        ({"effect": "write", "cacheable": False}, False, "write", True),
        ({"effect": "read", "cacheable": True}, True, "read", True),
    ],
)
def test_what_is_declared_decides_what_may_be_shared(
    options: dict[str, object], cacheable: bool, effect: str, declared: bool
) -> None:
    tool = Tool.define(plain, **options)  # type: ignore[call-overload]
    assert (tool.cacheable, tool.effect, tool.declared) == (cacheable, effect, declared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cacheable": True, "effect": "write"}, "choose one"),
        ({"effect": "both"}, "'read' or 'write'"),
        ({"ttl": 5}, "ttl needs cacheable=True"),
        ({"ttl": 0, "cacheable": True}, "ttl is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.5}, "a whole number above 0"),
        ({"max_concurrent": 0}, "max_concurrent is 0; it must be a whole number above 0"),
        ({"timeout": "10"}, "timeout is '10'"),
        ({"rate_limit": "often"}, "rate_limit is 'often'"),
        ({"cache_key": str}, "cache_key needs"),
        ({"timeout": True}, "timeout is True"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"cacheable": "yes"}, "cacheable is 'yes'; it must be True or False"),
        ({"cache_key": 5, "cacheable": True}, "cache_key is 5; it must be a function"),
        ({"name": 5}, "name is 5; it must be text"),
        ({"name": "has space"}, "not a valid tool name"),
        ({"name": ""}, "not a valid tool name"),
    ],
)
def test_a_wrong_option_is_a_spec_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Tool.define(plain, **options)  # type: ignore[call-overload]


def test_a_tool_cannot_be_changed_and_does_not_show_its_inside() -> None:
    tool = Tool.define(plain)
    with pytest.raises(AttributeError):
        tool.name = "other"  # type: ignore[misc]
    assert "function" not in repr(tool)


@pytest.mark.parametrize(
    ("value", "name", "arguments", "text"),
    [
        (plain, "plain", {"text": "a", "times": 2}, "aa"),
        (Shelf("Emma").plain, "plain", {"page": 2}, "Emma, page 2"),
        (Shelf("Emma").look, "look", {"page": 2}, "Emma, page 2"),
        (Shelf("Emma").write, "write", {"page": 2}, "wrote 2"),
        (Shelf("Emma"), "Shelf", {"page": 2}, "Emma, page 2"),
        (AsyncCaller(), "AsyncCaller", {"n": 2}, "3"),
        (functools.partial(plain, times=3), "plain", {"text": "a"}, "aaa"),
        (functools.partial(plain, "b"), "plain", {"times": 2}, "bb"),
        (functools.partial(AsyncCaller(), n=3), "AsyncCaller", {}, "4"),
        (lambda: 1, "", {}, ""),
    ],
)
async def test_functions_methods_closures_partials_and_objects_are_tools(
    open_pool, value: object, name: str, arguments: dict[str, object], text: str
) -> None:
    if not name:
        with pytest.raises(SpecError, match="not a valid tool name"):
            resolve_tools([value])
        return
    (tool,) = resolve_tools([value])
    assert tool.name == name
    async with open_pool(tool) as pool:
        outcome = await pool.start(ToolCall("1", name, json.dumps(arguments))).wait()
    assert (outcome.text, outcome.ok) == (text, True)


async def test_a_function_that_returns_an_awaitable_is_awaited(open_pool) -> None:
    def hidden(n: int) -> object:
        return asyncio.sleep(0, result=n)

    async with open_pool(hidden) as pool:
        assert (await pool.start(ToolCall("1", "hidden", '{"n": 7}')).wait()).text == "7"


def test_what_a_partial_has_bound_is_not_shown_to_the_model() -> None:
    (tool,) = resolve_tools([functools.partial(plain, times=5)])
    assert list(tool.spec.parameters["properties"]) == ["text"]  # type: ignore[arg-type]


def test_a_method_needs_its_object() -> None:
    with pytest.raises(SpecError, match=r"instance\.look"):
        resolve_tools([Shelf.look])
    with pytest.raises(SpecError, match=r"instance\.plain"):
        resolve_tools([Shelf.plain])


def test_the_built_in_tools_are_attributes_and_have_names() -> None:
    names = ["read_file", "http_get", "web_search", "python_eval", "claude_code"]
    assert resolve_tools(names) == tuple(getattr(Tool, name) for name in names)
    assert [tool.name for tool in resolve_tools(names)] == names
    assert all(tool.description for tool in resolve_tools(names))


def test_a_plain_function_is_undeclared() -> None:
    (tool,) = resolve_tools([plain])
    assert (tool.declared, tool.effect) == (False, "write")


@pytest.mark.parametrize("value", [3, None, int, object(), "write_file"])
def test_anything_else_is_a_spec_error_that_names_what_is_allowed(value: object) -> None:
    with pytest.raises(SpecError, match="http_get, python_eval, read_file, web_search"):
        resolve_tools([value])


def test_a_name_instead_of_a_list_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="give a list"):
        resolve_tools("read_file")


def test_two_tools_with_one_name_are_a_spec_error() -> None:
    with pytest.raises(SpecError, match="two tools are called 'read_file'"):
        resolve_tools([Tool.read_file, read_file(roots=["/"])])


def test_a_wrong_network_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="allow takes"):
        http_get(allow=["localhost"])


def test_generators_are_refused() -> None:
    def stream(n: int):  # type: ignore[no-untyped-def]
        yield n

    with pytest.raises(SpecError, match="return a list"):
        Tool.define(stream)
