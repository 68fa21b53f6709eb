"""A batch function that queries a database: one query for many keys, which are bound parameters.

It recognises drivers by their interface: PEP 249, PEP 249 with coroutines (psycopg, aiosqlite, aiomysql), and asyncpg's
``fetch``. Blocking drivers run in a thread of the pool, async drivers on the event loop.
"""

from __future__ import annotations

import inspect
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from batch_agent.blocking import THREADS
from batch_agent.errors import SpecError, ToolError
from batch_agent.foreign import describe
from batch_agent.tools.schema import Function, is_async

PLACE = "{ids}"
MARKS = {
    "qmark": "?",
    "format": "%s",
    "numeric": ":{n}",
    "named": ":key{n}",
    "pyformat": "%(key{n})s",
    "numeric_dollar": "${n}",  # of asyncpg, which is not a PEP 249 driver
}

Found = dict[object, object]
Parameters = Sequence[object] | dict[str, object]


def sql_lookup(query: str, connection: Any, column: str) -> Function:
    """Return a batch function for the query. ``connection`` is a connection of any driver, or a function that opens one
    for each query, which is closed after it. ``column`` is the column of the result that holds the key."""
    if PLACE not in query:
        raise SpecError(f"batch_query has no {PLACE}: write WHERE {column} IN ({PLACE}), without quotes around it")
    has_cursor = callable(getattr(connection, "cursor", None)) or _has_fetch(connection)
    if inspect.isroutine(connection) or not has_cursor:
        if not callable(connection):
            raise SpecError("connection must be a database connection, or a function that returns one")
        return _opening(query, connection, column)
    _check_threads(connection)

    async def look_up_on_loop(keys: Sequence[object]) -> Found:
        return await _ask(query, connection, column, keys)

    def look_up(keys: Sequence[object]) -> Found:
        return _at_once(_ask(query, connection, column, keys))

    return look_up_on_loop if _is_async_driver(connection) else look_up


def _opening(query: str, opens: Callable[[], Any], column: str) -> Function:
    async def use(opened: Any, keys: Sequence[object]) -> Found:
        connection = await _settled(opened)
        try:
            return await _ask(query, connection, column, keys)
        finally:
            with suppress(Exception):
                await _settled(connection.close())

    async def look_up_on_loop(keys: Sequence[object]) -> Found:
        return await use(opens(), keys)

    def look_up(keys: Sequence[object]) -> Found | Awaitable[Found]:
        connection = opens()
        waits = inspect.isawaitable(connection) or _is_async_driver(connection)
        return use(connection, keys) if waits else _at_once(use(connection, keys))

    return look_up_on_loop if is_async(opens) else look_up


async def _ask(query: str, connection: Any, column: str, keys: Sequence[object]) -> Found:
    """Ask a driver of any kind. If the driver blocks, this never waits."""
    if _has_fetch(connection):
        text, values = bind(query, "numeric_dollar", keys)
        rows = await connection.fetch(text, *values)
        return by_key(column, list(rows[0].keys()), rows) if rows else {}
    text, parameters = bind(query, paramstyle_of(connection), keys)
    cursor = await _settled(connection.cursor())
    try:
        await _settled(cursor.execute(text, parameters))
        return by_key(column, _names(cursor.description), await _settled(cursor.fetchall()))
    except Exception:
        # A database may refuse all queries until a failed transaction is rolled back. SQLite does not, and a rollback
        # there may lose changes that the user has not committed.
        if not isinstance(connection, sqlite3.Connection):
            with suppress(Exception):  # the error of the query is more useful
                await _settled(connection.rollback())
        raise
    finally:
        with suppress(Exception):
            await _settled(cursor.close())


def _at_once(asking: Coroutine[Any, Any, Found]) -> Found:
    """Return the result of a coroutine that never waits."""
    try:
        asking.send(None)
    except StopIteration as end:
        found: Found = end.value
        return found
    asking.close()
    raise ToolError("its connection is asynchronous in part: give batch=")


def bind(query: str, style: str, keys: Sequence[object]) -> tuple[str, Parameters]:
    """Return the query with a placeholder for each key, and the keys in the format of the driver."""
    mark = MARKS[style]
    text = query.replace(PLACE, ", ".join(mark.format(n=number) for number in range(1, len(keys) + 1)))
    if style in ("named", "pyformat"):
        return text, {f"key{number}": key for number, key in enumerate(keys, 1)}
    numbered = style.startswith("numeric")
    return text, list(keys) * (1 if numbered else query.count(PLACE))


def by_key(column: str, names: Sequence[str], rows: Iterable[Any]) -> Found:
    """Return the rows as objects, by the key in one of their columns; several rows of one key as a list."""
    key = next((name for name in names if name.casefold() == column.casefold()), None)
    if key is None:
        raise ToolError(
            f"its batch_query returns the columns {', '.join(names)}, without the key column {column}: select it, or "
            f"rename a column with AS {column}"
        )
    found: dict[object, list[Mapping[str, object]]] = {}
    for row in rows:
        record = row if isinstance(row, Mapping) else dict(zip(names, row, strict=True))
        found.setdefault(record[key], []).append(record)
    return {value: records[0] if len(records) == 1 else records for value, records in found.items()}


def paramstyle_of(connection: object) -> str:
    """Return the ``paramstyle`` of the driver's module, which is found by the modules of the connection's classes."""
    for kind in type(connection).__mro__:
        name = kind.__module__
        while name:
            style = getattr(sys.modules.get(name), "paramstyle", None)
            if style in MARKS:
                return str(style)
            name = name.rpartition(".")[0]
    raise ToolError(f"the driver of {type(connection).__name__} does not declare its paramstyle: give batch=")


def _names(description: Sequence[Sequence[str]] | None) -> list[str]:
    if description is None:
        raise ToolError("its batch_query returns no rows; it must be a SELECT")
    return [str(column[0]) for column in description]


def _is_async_driver(connection: object) -> bool:
    return _has_fetch(connection) or inspect.iscoroutinefunction(getattr(connection, "rollback", None))


def _has_fetch(connection: object) -> bool:
    return inspect.iscoroutinefunction(getattr(connection, "fetch", None))


async def _settled(value: object) -> Any:
    return await value if inspect.isawaitable(value) else value


def _check_threads(connection: object) -> None:
    """Raise SpecError if a SQLite connection cannot be used in other threads. SQLite checks this by default, and the
    error should appear before a run starts."""
    if not isinstance(connection, sqlite3.Connection):
        return
    refused = THREADS.submit(lambda: connection.cursor().close()).exception()
    if refused is not None:
        raise SpecError(
            f"connection cannot be used in a thread of the tool pool ({describe(refused)}): give a function that "
            "opens one, connection=lambda: sqlite3.connect(path), or make it with check_same_thread=False"
        )
