"""A tool: a function together with what a model is told about it and what the pool may do with its calls.

Tools are values. Nothing here runs one on a model's behalf: that is the pool's work.

    cacheable=True             results are kept for the run (``ttl`` seconds at most) and identical calls share one run
    cacheable=False            identical calls share a run only while it is in flight; effect="read" says the same
    effect="write"             every call runs
    none of these              counts as a write: merging two e-mails into one is worse than a slow tool
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, Literal, Protocol, cast, overload

from typing_extensions import ParamSpec, TypeVar

from batch_agent.errors import SpecError, ToolError, ToolFailed
from batch_agent.foreign import describe
from batch_agent.messages import ToolSpec
from batch_agent.spec import MCP
from batch_agent.tools.batching import MAX_BATCH, Batching
from batch_agent.tools.mcp.address import CONNECT_SECONDS, server_of
from batch_agent.tools.rate import calls_per_second
from batch_agent.tools.render import MAX_TOKENS
from batch_agent.tools.schema import Arguments, Documentation, Function, Signature, is_async, signature_of

if TYPE_CHECKING:
    from batch_agent.runtimes.base import CommandLineRuntime

P = ParamSpec("P", default=...)
R_co = TypeVar("R_co", covariant=True, default=object)
Q = ParamSpec("Q")
S = TypeVar("S")
V = TypeVar("V")

Effect = Literal["read", "write"]
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
CacheKey = Callable[..., object]

BUILTIN_NAMES = ("claude_code", "http_get", "python_eval", "read_file", "web_search")
# What the common wire formats accept.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class OpenResource(Protocol):
    """A resource in use by one run."""

    async def ready(self) -> None:
        """Waits until it can be used, within a time limit of its own. Raises ToolError."""

    async def close(self) -> None: ...


class Resource(Protocol):
    """What the calls of a tool share within one run, such as a session with a server; equal ones are one.

    The pool opens it for the first call and closes it at the end. The function takes what was opened as its first
    argument, and as its second one a function to call when the tool shows that it is alive: its time starts again.
    """

    def __hash__(self) -> int: ...

    def open(self, spawn: Spawn, /) -> OpenResource: ...


@dataclass(frozen=True, slots=True, eq=False)
class Tool(Generic[P, R_co]):
    """Made with ``Tool.define``; calling it calls the function."""

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
    rate_limit: float | None  # calls a second
    max_concurrent: int | None  # calls at once
    timeout: float | None  # seconds; None: the run's timeout_per_tool
    ttl: float | None  # seconds
    max_tokens: int | None  # None: a result may have any length
    cache_key: CacheKey | None = field(repr=False)
    batching: Batching | None = field(default=None, repr=False)  # calls are answered together, by key
    version: str | None = None  # a change says that results differ from now on, and recorded answers no longer count
    resource: Resource | None = field(default=None, repr=False)  # what its calls in one run share

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
        """A tool defined on a method becomes, on an instance, the tool of the bound method."""
        if instance is None or not self.signature.unbound:
            return self
        bound = types.MethodType(self.function, instance)
        return replace(self, function=bound, signature=replace(self.signature, unbound=False))

    def identity(self, arguments: Arguments) -> str:
        """What tells this tool's calls apart: its ``cache_key``, or all arguments. Raises nothing but ToolErrors."""
        if self.cache_key is None:
            return self.signature.identity(arguments)
        try:
            return repr(self.cache_key(**arguments.values))
        except (ToolError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise ToolFailed(f"{self.name} failed: its cache_key raised {describe(error)}") from error

    @overload
    @staticmethod
    def define(
        fn: Callable[Q, V],
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
    ) -> Tool[Q, V]: ...

    @overload
    @staticmethod
    def define(
        fn: None = None,
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
    ) -> _Decorator: ...

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
        """Makes a tool of a function; a decorator, with and without parentheses.

        Args:
            name: what the model calls it; the function's name.
            description: what the model is told; the docstring's text.
            max_tokens: longer results are cut, and say so; None for no limit.
            cacheable: results may be kept for the run (True) or only shared while in flight (False).
            effect: "read" or "write"; a write runs on every call.
            rate_limit: calls per second, or "10/s", "100/min", "5/hour"; waiting for it is not part of the timeout.
            max_concurrent: calls running at once, of all agents; waiting for it is not part of the timeout either.
            timeout: seconds a call may run; the run's timeout_per_tool.
            ttl: seconds a cached result stays good.
            cache_key: called with the arguments; calls with equal keys are the same call.
            version: change it when the tool's results change: answers recorded with the old one are asked for again.
        """
        _check_positive(int, max_tokens=max_tokens, max_concurrent=max_concurrent)
        _check_positive(int | float, timeout=timeout, ttl=ttl)
        _check_kind(str, "text", name=name, description=description, version=version)
        _check_kind(bool, "True or False", cacheable=cacheable)
        _check_kind(Callable, "a function of the tool's arguments", cache_key=cache_key)

        def make(function: Function) -> Tool:
            known = _name_of(function, name)
            documentation = Documentation.of(function)
            signature = signature_of(function, known, documentation.parameters)
            text = documentation.description if description is None else description
            return Tool(
                spec=ToolSpec(known, text, signature.json_schema),
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
        """Makes a tool that looks something up by key; calls of different agents become one look-up. The function it
        decorates gives the name, the one parameter and the description; a run does not call it.

        Args:
            key_arg: the function's parameter, and the column of the result that holds the key.
            batch_query: a SELECT with {ids} where the keys go: "SELECT id, name FROM users WHERE id IN ({ids})".
            connection: where to ask it: a connection of any driver, or a function that gives one for each query.
            batch: instead of these two, a function from a list of keys to what was found, by key; it may be async.
            max_batch: keys in one look-up, at most.
            rate_limit: look-ups per second, not calls.
            max_concurrent: look-ups running at once; while there are as many, keys gather for the next.
            timeout: seconds a look-up may take; the run's timeout_per_tool.

        The others mean what they do for ``define``, each call of its own.
        """
        _check_positive(int, max_batch=max_batch)
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
        """Tools of an MCP server, which is started or connected to for the list. A run has one session with it.

        Args:
            server: "stdio:COMMAND ARGUMENTS", the same as a list, or the URL of a server with streamable HTTP.
            only: names of the tools to take; all.
            prefix: comes before each tool's name.
            reads: names of tools that only read, beside those of which the server says so; all others count as writes.
            timeout: seconds a call may go without an answer or a sign of progress; the run's timeout_per_tool.
            headers: for a URL, such as {"Authorization": "Bearer ..."}.
            env: variables for a command, beside PATH, HOME and the like; it inherits no others.
            cwd: where the command runs.
            connect_timeout: seconds until the server must have started.
        """
        from batch_agent.tools.mcp.listing import mcp_tools

        _check_positive(int | float, timeout=timeout)
        address = server_of(server, headers=headers, env=env, cwd=cwd, connect_timeout=connect_timeout)
        return mcp_tools(address, only=only, prefix=prefix, reads=reads, timeout=timeout)

    @staticmethod
    def mcp_file(
        path: str | os.PathLike[str],
        *,
        servers: Collection[str] | None = None,
        prefix: str = "",
        reads: Collection[str] = (),
        timeout: float | None = None,
    ) -> list[Tool]:
        """Tools of the servers of a file with "mcpServers", as desktop clients and editors have it.

        Args:
            path: the file; ${VARIABLE} in it is filled in from the environment.
            servers: names of the servers to take; all.
            prefix: comes before each tool's name; {server} in it is the server's name.
            reads, timeout: as for ``mcp``.
        """
        from batch_agent.tools.mcp.listing import mcp_file_tools

        _check_positive(int | float, timeout=timeout)
        return mcp_file_tools(Path(path), servers=servers, prefix=prefix, reads=reads, timeout=timeout)

    @staticmethod
    def agent(
        runtime: CommandLineRuntime,
        *,
        name: str | None = None,
        description: str | None = None,
        max_concurrent: int | None = None,
    ) -> Tool[..., Coroutine[Any, Any, str]]:
        """Makes a tool of a command-line agent (``batch_agent.runtimes``), which a model gives a task. The runtime has
        a backend of its own. As many run at once as fit into memory, unless ``max_concurrent`` says otherwise."""
        from batch_agent.tools.builtin.agent import agent_tool  # here, because it is made with Tool.define

        return agent_tool(runtime, name=name, description=description, max_concurrent=max_concurrent)


class _Decorator(Protocol):
    """What ``Tool.define(...)`` returns."""

    def __call__(self, function: Callable[Q, V], /) -> Tool[Q, V]: ...


def resolve_tools(values: Sequence[object]) -> tuple[Tool, ...]:
    """The tools a batch offers: Tool values, functions (undeclared), and built-in tools by name."""
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
    """Every tool; lists of them, as ``Tool.mcp`` makes, may stand among others."""
    for value in values:
        if isinstance(value, str) and value.startswith(MCP):
            yield from tools_at(value.removeprefix(MCP))
        elif isinstance(value, list | tuple):
            yield from _each(value)
        else:
            yield _resolve(value)


def tools_at(server: str, **options: Any) -> list[Tool]:
    """The tools of an MCP server, or of the servers of a file, ``options`` as for ``Tool.mcp`` or ``Tool.mcp_file``."""
    return Tool.mcp_file(server, **options) if server.endswith(".json") else Tool.mcp(server, **options)


def _resolve(value: object) -> Tool:
    if isinstance(value, Tool):
        return value
    if isinstance(value, str):
        if value not in BUILTIN_NAMES:
            raise SpecError(f"there is no built-in tool {value!r}; there are {', '.join(BUILTIN_NAMES)}")
        builtin: Tool = getattr(Tool, value)
        return builtin
    if callable(value) and not isinstance(value, type):
        return Tool.define(value)
    raise SpecError(f"{value!r} is not a tool: give a function, a Tool, or a name of {', '.join(BUILTIN_NAMES)}")


def _name_of(function: Function, name: str | None) -> str:
    if not callable(function):
        raise SpecError(f"Tool.define takes a function, not {function!r}; above a classmethod, put @classmethod first")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise SpecError(f"the function {function.__name__} yields, and a tool returns: return a list instead")
    if name is None:
        plain: object = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        name = str(getattr(plain, "__name__", type(plain).__name__))
    if not _NAME.fullmatch(name):
        raise SpecError(f"{name!r} is no name for a tool: give one of letters, digits, _ and -, Tool.define(name=...)")
    return name


def _batch_function(key_arg: str, query: str | None, connection: object, batch: Function | None) -> Function:
    if batch is not None:
        if query is not None or connection is not None:
            raise SpecError("batchable takes batch, or batch_query and connection, not both")
        if not callable(batch):
            raise SpecError("batch is a function from a list of keys to what was found, by key")
        return batch
    if query is None or connection is None:
        raise SpecError("batchable needs batch_query and connection, or batch")
    from batch_agent.tools.sql import sql_lookup  # here, because few tools ask a database

    return sql_lookup(query, connection, key_arg)


def _check_key(tool: Tool, key_arg: str) -> None:
    """A batch answers for many agents, so a key is all that one of them can say."""
    signature = tool.signature
    parameter = signature.parameters.get(key_arg)
    if parameter is None:
        names = ", ".join(signature.parameters) or "none"
        raise SpecError(f"tool {tool.name}: key_arg is {key_arg!r}, and its parameters are: {names}")
    others = len(signature.parameters) > 1 or signature.extra or signature.unbound or signature.context is not None
    if others or not parameter.required:
        raise SpecError(f"tool {tool.name} looks up by {key_arg}: that is its only parameter, and has no default")


def _effect_of(
    name: str, cacheable: bool | None, effect: Effect | None, ttl: float | None, cache_key: CacheKey | None
) -> Effect:
    """What the options together declare; contradictions are SpecErrors."""
    if effect not in (None, "read", "write"):
        raise SpecError(f"tool {name}: effect is {effect!r}; it is 'read' or 'write'")
    if cacheable and effect == "write":
        raise SpecError(f"tool {name} is cacheable and a write: each call of a write must run, so choose one")
    if ttl is not None and not cacheable:
        raise SpecError(f"tool {name}: ttl needs cacheable=True; nothing is kept without it")
    found: Effect = effect or ("write" if cacheable is None else "read")
    if cache_key is not None and found == "write":
        raise SpecError(f"tool {name}: cache_key needs cacheable=True or effect='read'; every call of a write runs")
    return found


def _check_positive(kind: type | types.UnionType, **options: int | float | None) -> None:
    for option, value in options.items():
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if value is None or (is_number and math.isfinite(value) and value > 0):
            continue
        what = "a whole number" if kind is int else "a number"
        raise SpecError(f"{option} is {value!r}; it is {what} above 0, or None")


def _check_kind(kind: object, what: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None and not isinstance(value, cast(type, kind)):
            raise SpecError(f"{option} is {value!r}; it is {what}, or None")
