"""A tool: a function, its description for the model, and the rules for its calls.

Tools are values. The pool runs their calls; this module does not.

    cacheable=True             results are cached for the run, at most ``ttl`` seconds; identical calls share one run
    cacheable=False            identical calls share a run only while it is in flight; the same as effect="read"
    effect="write"             every call runs
    none of these              treated as a write: merging two e-mails into one is worse than a slow tool
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    Unpack,
    cast,
    overload,
)

from typing_extensions import ParamSpec, TypeVar

from batch_agent.errors import SpecError, ToolError, ToolFailed, meant
from batch_agent.foreign import describe, message_of
from batch_agent.messages import ToolSpec
from batch_agent.option import check_kind, check_positive
from batch_agent.spec import MCP
from batch_agent.tools.execution import calls_per_second
from batch_agent.tools.mcp.address import CONNECT_SECONDS, McpServer, server_of
from batch_agent.tools.schema import MAX_TOKENS, Function, Signature, documentation_of, is_async, render, signature_of

if TYPE_CHECKING:
    from batch_agent.runtimes.base import CommandLineRuntime


GATHERING = 0.005  # seconds that a batch waits for more keys; negligible beside a model call
MAX_BATCH = 500  # all databases accept this number of parameters
NOTHING = "Nothing was found for {name} {key}."

Keys = Mapping[str, object]  # by the identity of their calls
Answers = dict[str, str | ToolError]

P = ParamSpec("P", default=...)
R_co = TypeVar("R_co", covariant=True, default=object)
Q = ParamSpec("Q")
S = TypeVar("S")
V = TypeVar("V")

Effect = Literal["read", "write"]
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
CacheKey = Callable[..., object]

BUILTIN_NAMES = ("claude_code", "http_get", "python_eval", "read_file", "web_search")
# Names that the common wire formats accept.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Batching:
    """How a tool looks up keys. ``function`` takes a list of keys and returns a mapping from key to result. A missing
    key, or None, was not found. An exception as a result is the error of that key only."""

    key_arg: str
    function: Function
    max_batch: int


async def ask_all(keys: Keys, ask: Callable[[Keys], Awaitable[Answers]]) -> Answers:
    """Return the answers to all keys. A batch that fails is sent again in halves, until the failing key is alone, so
    that other keys do not get its error. If nothing was answered, and the first two single keys fail with the same
    message, the keys are not the cause: all remaining keys get this error."""
    answers: Answers = {}
    parts = [list(keys)]
    reasons: list[str] = []
    answered = False
    while parts:
        part = parts.pop()
        try:
            answers |= await ask({call: keys[call] for call in part})
            answered = True
        except ToolError as error:
            reasons.append(message_of(error))
            if len(part) == 1:
                answers[part[0]] = error
                if not answered and len(answers) == 2 and reasons[-1] == reasons[-2]:
                    return answers | {call: error for left in parts for call in left}
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
    return answers


def read_answers(batching: Batching, keys: Keys, found: object, max_tokens: int | None) -> Answers:
    """Return the results of a batch function as texts for the model."""
    if not isinstance(found, Mapping):
        raise ToolError(f"its batch function returned {type(found).__name__}, not a mapping from key to result")
    results = _by_call(keys, found)
    answers: Answers = {}
    for call, key in keys.items():
        result = results.get(call)
        if result is None:
            answers[call] = NOTHING.format(name=batching.key_arg, key=key)
        elif isinstance(result, BaseException):
            answers[call] = result if isinstance(result, ToolError) else ToolFailed(describe(result))
        else:
            answers[call] = render(result, max_tokens)
    return answers


def _by_call(keys: Keys, found: Mapping[object, object]) -> dict[str, object]:
    """Return the result of each call. Keys are compared by value, then by their text: a database may return a number
    as text, or a key in another case."""
    asked = set(keys.values())
    others = {_text(key): result for key, result in found.items() if key not in asked}
    return {call: found[key] if key in found else others.get(_text(key)) for call, key in keys.items()}


def _text(key: object) -> str:
    return str(key).strip().casefold()


class ToolOptions(TypedDict, total=False):
    """The options of ``Tool.define``, for type checkers."""

    name: str | None
    description: str | None
    max_tokens: int | None
    cacheable: bool | None
    effect: Effect | None
    rate_limit: float | str | None
    max_concurrent: int | None
    timeout: float | None
    ttl: float | None
    cache_key: CacheKey | None
    version: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Tool(Generic[P, R_co]):
    """A tool, made with ``Tool.define``. Calling it calls its function."""

    read_file: ClassVar[Tool[..., str]]
    http_get: ClassVar[Tool[..., Coroutine[Any, Any, str]]]
    web_search: ClassVar[Tool[..., Coroutine[Any, Any, str]]]
    python_eval: ClassVar[Tool[..., Coroutine[Any, Any, str]]]
    claude_code: ClassVar[Tool[..., Coroutine[Any, Any, str]]]

    spec: ToolSpec = field(repr=False)
    function: Callable[P, R_co] = field(repr=False)
    signature: Signature = field(repr=False)
    name: str
    is_async: bool
    cacheable: bool
    effect: Effect
    declared: bool
    rate_limit: float | None = None  # calls per second
    max_concurrent: int | None = None  # concurrent calls
    timeout: float | None = None  # seconds; None: the run's timeout_per_tool
    ttl: float | None = None  # seconds
    max_tokens: int | None = MAX_TOKENS  # None: a result may have any length
    cache_key: CacheKey | None = field(default=None, repr=False)
    batching: Batching | None = field(default=None, repr=False)  # one lookup answers many calls
    version: str | None = None  # a change means that results differ, so recorded answers are not used any more
    # The calls of a run share one session with this server. The pool opens it for the first call and closes it at the
    # end. The function gets the session as its first argument, and a function that reports progress as its second:
    # calling that restarts the timeout.
    resource: McpServer | None = field(default=None, repr=False)

    @property
    def description(self) -> str:
        return self.spec.description

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Tool[P, R_co]: ...

    @overload
    def __get__(self: Tool[Concatenate[S, Q], V], instance: S, owner: type) -> Tool[Q, V]: ...

    def __get__(self, instance: object, owner: type) -> object:
        """Return, for a tool defined on a method, the tool of the bound method of the instance."""
        if instance is None or not self.signature.unbound:
            return self
        bound = types.MethodType(self.function, instance)
        return replace(self, function=bound, signature=replace(self.signature, unbound=False))

    @overload
    @staticmethod
    def define(fn: Callable[Q, V], /, **options: Unpack[ToolOptions]) -> Tool[Q, V]: ...
    @overload
    @staticmethod
    def define(fn: None = None, /, **options: Unpack[ToolOptions]) -> _Decorator: ...
    @staticmethod
    def define(
        fn: Function | None = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        max_tokens: int | None = MAX_TOKENS,
        cacheable: bool | None = None,
        effect: Effect | None = None,
        rate_limit: float | str | None = None,
        max_concurrent: int | None = None,
        timeout: float | None = None,
        ttl: float | None = None,
        cache_key: CacheKey | None = None,
        version: str | None = None,
    ) -> object:
        """Make a tool from a function. Use it as a decorator, with or without parentheses.

        Args:
            name: name of the tool for the model; default: the function's name.
            description: description for the model; default: the text of the docstring.
            max_tokens: longer results are cut, with a note; None for no limit.
            cacheable: True: results are cached for the run. False: calls share a result only while it is in flight.
            effect: "read" or "write"; every call of a write runs.
            rate_limit: calls per second, or "10/s", "100/min", "5/hour"; the timeout does not include this wait.
            max_concurrent: maximum number of concurrent calls of all agents; the timeout does not include this wait.
            timeout: maximum seconds of a call; default: the run's timeout_per_tool.
            ttl: seconds for which a cached result is valid.
            cache_key: function of the arguments; calls with equal keys are the same call.
            version: change it when the tool's results change; rows recorded with the old version are sent again.
        """
        check_positive(int, max_tokens=max_tokens, max_concurrent=max_concurrent)
        check_positive(int | float, timeout=timeout, ttl=ttl)
        check_kind(str, "text", name=name, description=description, version=version)
        check_kind(bool, "True or False", cacheable=cacheable)
        check_kind(Callable, "a function of the tool's arguments", cache_key=cache_key)

        def make(function: Function) -> Tool:
            known = _name_of(function, name)
            documented, parameters = documentation_of(function)
            signature = signature_of(function, known, parameters)
            return Tool(
                spec=ToolSpec(known, documented if description is None else description, signature.json_schema),
                function=function,
                signature=signature,
                name=known,
                is_async=is_async(function),
                cacheable=bool(cacheable),
                effect=_effect_of(known, cacheable, effect, ttl, cache_key),
                declared=cacheable is not None or effect is not None,
                rate_limit=None if rate_limit is None else calls_per_second(rate_limit),
                max_concurrent=max_concurrent,
                timeout=timeout,
                ttl=ttl,
                max_tokens=max_tokens,
                cache_key=cache_key,
                version=version,
            )

        return make if fn is None else make(fn)

    @staticmethod
    def batchable(
        *,
        key_arg: str,
        batch_query: str | None = None,
        connection: object = None,
        batch: Function | None = None,
        max_batch: int = MAX_BATCH,
        name: str | None = None,
        description: str | None = None,
        max_tokens: int | None = MAX_TOKENS,
        cacheable: bool = False,
        rate_limit: float | str | None = None,
        max_concurrent: int | None = 1,
        timeout: float | None = None,
        ttl: float | None = None,
        version: str | None = None,
    ) -> _Decorator:
        """Make a tool that looks up a value by key; one lookup answers the calls of many agents. The decorated function
        provides the name, the parameter and the description. A run does not call it.

        Args:
            key_arg: the function's parameter, and the column of the result that holds the key.
            batch_query: a SELECT with {ids} in place of the keys: "SELECT id, name FROM users WHERE id IN ({ids})".
            connection: a database connection of any driver, or a function that opens one for each query.
            batch: instead of these two, a function from a list of keys to a mapping from key to result; may be async.
            max_batch: maximum number of keys in one lookup.
            rate_limit: lookups per second, not calls.
            max_concurrent: maximum number of concurrent lookups; meanwhile, keys are collected for the next one.
            timeout: maximum seconds of a lookup; default: the run's timeout_per_tool.

        The other options are those of ``define``, for each call.
        """
        check_positive(int, max_batch=max_batch)
        function = _batch_function(key_arg, batch_query, connection, batch)

        def make(described: Function) -> Tool:
            tool: Tool = Tool.define(
                described,
                name=name,
                description=description,
                max_tokens=max_tokens,
                cacheable=cacheable,
                rate_limit=rate_limit,
                max_concurrent=max_concurrent,
                timeout=timeout,
                ttl=ttl,
                version=version,
            )
            _check_key(tool, key_arg)
            return replace(tool, is_async=is_async(function), batching=Batching(key_arg, function, max_batch))

        return cast(_Decorator, make)

    @staticmethod
    def mcp(
        server: str | Sequence[str],
        *,
        only: Collection[str] | None = None,
        prefix: str = "",
        reads: Collection[str] = (),
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> list[Tool]:
        """Return the tools of an MCP server, which is started or connected to for the list. A run has one session.

        Args:
            server: "stdio:COMMAND ARGUMENTS", the same as a list, or the URL of a server with streamable HTTP.
            only: names of the tools to use; default: all.
            prefix: text before each tool's name.
            reads: names of read-only tools, in addition to those the server marks as such; all others are writes.
            timeout: maximum seconds of a call without an answer or progress; default: the run's timeout_per_tool.
            headers: for a URL, such as {"Authorization": "Bearer ..."}.
            env: environment variables for a command; otherwise it inherits only PATH, HOME and similar ones.
            cwd: working directory of the command.
            connect_timeout: maximum seconds to start the server or connect to it.
        """
        from batch_agent.tools.mcp.listing import mcp_tools

        check_positive(int | float, timeout=timeout)
        address = server_of(server, headers=headers, env=env, cwd=cwd, connect_timeout=connect_timeout)
        return mcp_tools(address, only, prefix, reads, timeout)

    @staticmethod
    def mcp_file(
        path: str | os.PathLike[str],
        *,
        servers: Collection[str] | None = None,
        prefix: str = "",
        reads: Collection[str] = (),
        timeout: float | None = None,
    ) -> list[Tool]:
        """Return the tools of the servers in a file with "mcpServers", the format of desktop clients and editors.

        Args:
            path: the file; ${VARIABLE} in it is replaced from the environment.
            servers: names of the servers to use; default: all.
            prefix: text before each tool's name; {server} in it becomes the server's name.
            reads, timeout: as for ``mcp``.
        """
        from batch_agent.tools.mcp.listing import mcp_file_tools

        check_positive(int | float, timeout=timeout)
        return mcp_file_tools(Path(path), servers, prefix, reads, timeout)

    @staticmethod
    def agent(
        runtime: CommandLineRuntime,
        *,
        name: str | None = None,
        description: str | None = None,
        max_concurrent: int | None = None,
    ) -> Tool[..., Coroutine[Any, Any, str]]:
        """Make a tool from a command-line agent (``batch_agent.runtimes``), to which a model gives a task. A
        runtime without a backend uses the run's, through the gateway. By default as many agents run at once as fit into
        memory."""
        from batch_agent.tools.builtin.agent import agent_tool  # here, because it uses Tool.define

        return agent_tool(runtime, name, description, max_concurrent)


class _Decorator(Protocol):
    """The decorator that ``Tool.define(...)`` returns."""

    def __call__(self, function: Callable[Q, V], /) -> Tool[Q, V]: ...


def resolve_tools(values: Sequence[object]) -> tuple[Tool, ...]:
    """Return the tools of a batch, from Tool values, functions (undeclared tools) and names of built-in tools."""
    if isinstance(values, str):
        raise SpecError(f"tools is the text {values!r}: give a list, [{values!r}]")
    tools: dict[str, Tool] = {}
    for tool in _each(values):
        if tool.signature.unbound:
            raise SpecError(f"tool {tool.name} is a method without its object: give it as instance.{tool.name}")
        if tool.name in tools:
            raise SpecError(f"two tools are called {tool.name!r}: give one another name, Tool.define(name=...)")
        tools[tool.name] = tool
    return tuple(tools.values())


def _each(values: Sequence[object]) -> Iterator[Tool]:
    """Yield each tool. ``values`` may contain lists of tools, such as those that ``Tool.mcp`` returns."""
    for value in values:
        if isinstance(value, str) and value.startswith(MCP):
            yield from tools_at(value.removeprefix(MCP))
        elif isinstance(value, list | tuple):
            yield from _each(value)
        else:
            yield _resolve(value)


def tools_at(server: str, **options: Any) -> list[Tool]:
    """Return the tools of an MCP server or a file of servers. ``options``: of ``mcp`` or ``mcp_file``."""
    return Tool.mcp_file(server, **options) if server.endswith(".json") else Tool.mcp(server, **options)


def _resolve(value: object) -> Tool:
    if isinstance(value, Tool):
        return value
    if isinstance(value, str):
        if value not in BUILTIN_NAMES:
            hint = meant(value, BUILTIN_NAMES) or ";"
            raise SpecError(f"there is no built-in tool {value!r}{hint} there are {', '.join(BUILTIN_NAMES)}")
        builtin: Tool = getattr(Tool, value)
        return builtin
    if callable(value) and not isinstance(value, type):
        return Tool.define(value)
    raise SpecError(f"{value!r} is not a tool: give a function, a Tool, or a name of {', '.join(BUILTIN_NAMES)}")


def _name_of(function: Function, name: str | None) -> str:
    if not callable(function):
        raise SpecError(f"Tool.define takes a function, not {function!r}; above a classmethod, put @classmethod first")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise SpecError(f"the function {function.__name__} is a generator: a tool must return, so return a list")
    if name is None:
        plain: object = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        name = str(getattr(plain, "__name__", type(plain).__name__))
    if not _NAME.fullmatch(name):
        raise SpecError(f"{name!r} is not a valid tool name: use letters, digits, _ and -: Tool.define(name=...)")
    return name


def _batch_function(key_arg: str, query: str | None, connection: object, batch: Function | None) -> Function:
    if batch is not None:
        if query is not None or connection is not None:
            raise SpecError("batchable takes batch, or batch_query and connection, not both")
        if not callable(batch):
            raise SpecError("batch must be a function from a list of keys to a mapping from key to result")
        return batch
    if query is None or connection is None:
        raise SpecError("batchable needs batch_query and connection, or batch")
    from batch_agent.tools.sql import sql_lookup  # here, because few tools use a database

    return sql_lookup(query, connection, key_arg)


def _check_key(tool: Tool, key_arg: str) -> None:
    """Raise SpecError unless the key is the only parameter: a lookup for many agents gets nothing but their keys."""
    signature = tool.signature
    parameter = signature.parameters.get(key_arg)
    if parameter is None:
        names = ", ".join(signature.parameters) or "none"
        raise SpecError(f"tool {tool.name}: key_arg is {key_arg!r}, but its parameters are: {names}")
    others = len(signature.parameters) > 1 or signature.extra or signature.unbound or signature.context is not None
    if others or not parameter.required:
        raise SpecError(f"tool {tool.name} looks up by {key_arg}: this must be its only parameter, without a default")


def _effect_of(
    name: str, cacheable: bool | None, effect: Effect | None, ttl: float | None, cache_key: CacheKey | None
) -> Effect:
    """Return the effect that the options declare. Raises SpecError if they contradict each other."""
    if effect not in (None, "read", "write"):
        raise SpecError(f"tool {name}: effect is {effect!r}; it must be 'read' or 'write'")
    if cacheable and effect == "write":
        raise SpecError(f"tool {name} is cacheable and a write, but every call of a write must run: choose one")
    if ttl is not None and not cacheable:
        raise SpecError(f"tool {name}: ttl needs cacheable=True; otherwise no result is cached")
    found: Effect = effect or ("write" if cacheable is None else "read")
    if cache_key is not None and found == "write":
        raise SpecError(f"tool {name}: cache_key needs cacheable=True or effect='read'; every call of a write runs")
    return found
