"""Batched look-ups in databases: a real SQLite, a real PostgreSQL, and drivers that fail."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tools.tool_calls import call

from batch_agent import BatchAgent, SpecError, Tool, ToolError
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse
from batch_agent.tools import ToolOutcome, ToolPool
from batch_agent.tools.sql import bind, by_key, paramstyle_of

OpenPool = Callable[..., ToolPool]
QUERY = "SELECT id, name FROM things WHERE id IN ({ids})"
SAFE = "x' OR '1'='1"


def things(connection: Any, mark: str = "?") -> None:
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE things (id INTEGER, name TEXT)")
    cursor.executemany(f"INSERT INTO things VALUES ({mark}, {mark})", [(n, f"thing {n}") for n in range(200)])
    connection.commit()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "library.db"
    connection = sqlite3.connect(path)
    things(connection)
    connection.close()
    return path


def lookup(connection: Any, query: str = QUERY, kind: Any = int, **options: Any) -> Tool:
    def get(id: Any) -> str:
        """Get a thing."""
        return ""

    get.__annotations__["id"] = kind
    return Tool.batchable(key_arg="id", batch_query=query, connection=connection, **options)(get)


async def outcomes(pool: ToolPool, *keys: object) -> list[ToolOutcome]:
    pending = [pool.start(call("get", id=key)) for key in keys]
    return [await one.wait() for one in pending]


async def two_hundred_agents(tool: Tool) -> int:
    """How many queries it takes for as many agents that ask for one thing each."""

    def script(request: Request) -> Say:
        return CallTools(ToolUse("get", {"id": int(request.text)})) if request.turn == 0 else Say(request.text)

    inputs = [str(n) for n in range(200)]
    async with BatchAgent.open(
        task="{input}", inputs=inputs, tools=[tool], backend=ScriptedBackend(script), max_inflight=None
    ) as run:
        async for result in run.results():
            [told] = [message.content for message in result.messages if message.role == "tool"]
            assert told == f'{{"id":{result.input},"name":"thing {result.input}"}}'
        return run.tool_statistics()["get"].runs


# SQLite


async def test_two_hundred_agents_ask_sqlite_in_a_handful_of_queries(library: Path) -> None:
    queries: list[str] = []

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(library)
        connection.set_trace_callback(queries.append)
        return connection

    assert await two_hundred_agents(lookup(connect)) == len(queries) <= 10


async def test_a_connection_may_be_given_and_is_left_open_with_what_is_not_committed(open_pool: OpenPool) -> None:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE TABLE things (id INTEGER, name TEXT)")
    connection.execute("INSERT INTO things VALUES (1, 'one')")
    async with open_pool(lookup(connection, kind=object)) as pool:
        good, bad = await outcomes(pool, 1, 10**30)
        assert good.text == '{"id":1,"name":"one"}'
        assert not bad.ok and "OverflowError" in bad.text
    assert connection.execute("SELECT count(*) FROM things").fetchone() == (1,)
    connection.close()


def test_a_connection_that_is_bound_to_its_thread_is_refused_before_the_run() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(SpecError, match=r"connection=lambda: sqlite3\.connect\(path\)"):
        lookup(connection)
    connection.close()


async def test_keys_are_bound_and_never_a_part_of_the_query(library: Path, open_pool: OpenPool) -> None:
    tool = lookup(lambda: sqlite3.connect(library), "SELECT name AS id, id AS n FROM things WHERE name IN ({ids})", str)
    async with open_pool(tool) as pool:
        found, missing = await outcomes(pool, "thing 7", SAFE)
        assert found.text == '{"id":"thing 7","n":7}'
        assert missing.text == f"Nothing was found for id {SAFE}."


async def test_several_rows_of_one_key_are_a_list(library: Path, open_pool: OpenPool) -> None:
    tool = lookup(lambda: sqlite3.connect(library), "SELECT id % 100 AS id, name FROM things WHERE id % 100 IN ({ids})")
    async with open_pool(tool) as pool:
        [both] = await outcomes(pool, 5)
        assert both.text == '[{"id":5,"name":"thing 5"},{"id":5,"name":"thing 105"}]'


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT name FROM things WHERE id IN ({ids})", "returns the columns name, without the key column id"),
        ("UPDATE things SET name = name WHERE id IN ({ids})", "it must be a SELECT"),
        ("SELECT id FROM nowhere WHERE id IN ({ids})", "get failed: OperationalError: no such table: nowhere"),
    ],
)
async def test_a_query_that_cannot_be_used_says_why(library: Path, open_pool: OpenPool, query: str, says: str) -> None:
    async with open_pool(lookup(lambda: sqlite3.connect(library), query)) as pool:
        found = await outcomes(pool, *range(20))
        assert [one.text for one in found if one.ok or says not in one.text] == []


async def test_an_open_function_that_raises_fails_the_calls_and_the_next_batch_opens_again(
    library: Path, open_pool: OpenPool
) -> None:
    faults = [OSError("unreachable"), OSError("unreachable")]

    def connect() -> sqlite3.Connection:
        if faults:
            raise faults.pop()
        return sqlite3.connect(library)

    async with open_pool(lookup(connect)) as pool:
        [first] = await outcomes(pool, 1)
        assert first.text == "Error: get failed: OSError: unreachable"
        assert [one.ok for one in await outcomes(pool, 1)] == [False]
        assert [one.ok for one in await outcomes(pool, 1)] == [True]


async def test_a_connection_that_died_is_replaced_where_a_function_gives_them(
    library: Path, open_pool: OpenPool
) -> None:
    opened: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        opened.append(sqlite3.connect(library, check_same_thread=False))
        if len(opened) == 1:
            opened[0].close()
        return opened[-1]

    async with open_pool(lookup(connect)) as pool:
        [dead] = await outcomes(pool, 1)
        assert not dead.ok and "closed" in dead.text
        assert [one.ok for one in await outcomes(pool, 1)] == [True]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[-1].cursor()


# How drivers take parameters


@pytest.mark.parametrize(
    ("style", "text", "parameters"),
    [
        ("qmark", "(?, ?) or (?, ?)", [7, 8, 7, 8]),
        ("format", "(%s, %s) or (%s, %s)", [7, 8, 7, 8]),
        ("numeric", "(:1, :2) or (:1, :2)", [7, 8]),
        ("numeric_dollar", "($1, $2) or ($1, $2)", [7, 8]),
        ("named", "(:key1, :key2) or (:key1, :key2)", {"key1": 7, "key2": 8}),
        ("pyformat", "(%(key1)s, %(key2)s) or (%(key1)s, %(key2)s)", {"key1": 7, "key2": 8}),
    ],
)
def test_keys_are_bound_in_the_style_of_the_driver(style: str, text: str, parameters: object) -> None:
    assert bind("({ids}) or ({ids})", style, [7, 8]) == (text, parameters)


@pytest.mark.parametrize("style", ["qmark", "named"])
def test_sqlite_understands_what_is_bound(library: Path, style: str) -> None:
    connection = sqlite3.connect(library)
    text, parameters = bind(QUERY + " UNION SELECT id, name FROM things WHERE id - 1 IN ({ids})", style, [1, 5])
    assert [row[0] for row in connection.execute(text, parameters)] == [1, 2, 5, 6]
    connection.close()


def test_a_driver_says_its_style_also_for_a_class_made_from_its_own() -> None:
    class Mine(sqlite3.Connection):
        pass

    connection = Mine(":memory:")
    assert paramstyle_of(connection) == "qmark"
    connection.close()
    with pytest.raises(ToolError, match="does not declare its paramstyle: give batch="):
        paramstyle_of(object())


def test_a_column_is_found_whatever_the_case_and_rows_may_be_mappings() -> None:
    assert by_key("id", ["ID", "n"], [(1, 2)]) == {1: {"ID": 1, "n": 2}}
    assert by_key("id", ["id"], [{"id": 1}]) == {1: {"id": 1}}


class Fetching:
    """As asyncpg's connections and pools are."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def fetch(self, query: str, *keys: object) -> list[dict[str, object]]:
        self.asked.append((query, *keys))
        return [{"id": key, "name": "found"} for key in keys]


async def test_a_driver_with_fetch_is_awaited_on_the_loop(open_pool: OpenPool) -> None:
    driver = Fetching()
    async with open_pool(lookup(driver)) as pool:
        assert [one.text for one in await outcomes(pool, 1, 2)] == [
            '{"id":1,"name":"found"}',
            '{"id":2,"name":"found"}',
        ]
    assert driver.asked == [("SELECT id, name FROM things WHERE id IN ($1, $2)", 1, 2)]


# PostgreSQL


def find_server() -> Path | None:
    """Where its programs are."""
    found = shutil.which("pg_ctl")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)


def as_server_user(command: list[str], cwd: Path) -> None:
    """PostgreSQL refuses to be root's."""
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **user)


@pytest.fixture(scope="module")
def psycopg() -> Any:
    return pytest.importorskip("psycopg", reason="psycopg, a driver for PostgreSQL, is not installed")


@pytest.fixture(scope="module")
def postgres(psycopg: Any) -> Iterator[str]:
    """The address of a database with the things in it."""
    programs = find_server()
    if programs is None:
        pytest.skip("there is no PostgreSQL server on this machine")
    home = Path("/tmp") / f"batch-agent-postgres-{os.getpid()}"  # a socket's path must be short
    home.mkdir()
    try:
        if os.geteuid() == 0:
            shutil.chown(home, "postgres", "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        as_server_user([str(programs / "initdb"), "-D", "data", "-A", "trust", "-U", "tester", "--no-sync"], home)
        listens = f"-p {port} -h 127.0.0.1 -k {home} -F"
        as_server_user([str(programs / "pg_ctl"), "-D", "data", "-o", listens, "-l", "log", "-w", "start"], home)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        shutil.rmtree(home, ignore_errors=True)
        pytest.skip(f"PostgreSQL cannot be started here: {error}")
    try:
        address = f"host=127.0.0.1 port={port} user=tester dbname=postgres"
        with psycopg.connect(address) as connection:
            things(connection, "%s")
        yield address
    finally:
        as_server_user([str(programs / "pg_ctl"), "-D", "data", "-m", "immediate", "-w", "stop"], home)
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.real
@pytest.mark.parametrize("driver", ["function", "async function", "connection", "async connection"])
async def test_two_hundred_agents_ask_postgresql_in_a_handful_of_queries(
    psycopg: Any, postgres: str, driver: str
) -> None:
    if driver == "function":
        assert await two_hundred_agents(lookup(lambda: psycopg.connect(postgres))) <= 10
    elif driver == "async function":
        assert await two_hundred_agents(lookup(lambda: psycopg.AsyncConnection.connect(postgres))) <= 10
    elif driver == "connection":
        with psycopg.connect(postgres, autocommit=True) as connection:
            assert await two_hundred_agents(lookup(connection)) <= 10
    else:
        async with await psycopg.AsyncConnection.connect(postgres) as connection:
            assert await two_hundred_agents(lookup(connection)) <= 10


@pytest.mark.real
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_one_key_that_postgresql_cannot_read_fails_alone(
    psycopg: Any, postgres: str, open_pool: OpenPool, kind: str
) -> None:
    """And it leaves the one connection, whose transaction failed with it, fit for use."""
    if kind == "plain":
        connection: Any = psycopg.connect(postgres)
    else:
        connection = await psycopg.AsyncConnection.connect(postgres)
    async with open_pool(lookup(connection, kind=str)) as pool:
        found = await outcomes(pool, *map(str, range(8)), "eight", SAFE, *map(str, range(10, 20)))
        bad = [place for place, one in enumerate(found) if not one.ok]
        assert bad == [8, 9]
        assert 'invalid input syntax for type integer: "eight"' in found[8].text
        assert found[3].text == '{"id":3,"name":"thing 3"}'
    closed = connection.close()
    if closed is not None:
        await closed


@pytest.mark.real
@pytest.mark.parametrize("gives", [True, False])
async def test_a_connection_that_the_server_ended(
    psycopg: Any, postgres: str, open_pool: OpenPool, gives: bool
) -> None:
    connection = psycopg.connect(postgres)

    def end() -> None:
        with psycopg.connect(postgres, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])

    later = [connection]

    def connect() -> Any:
        return later.pop() if later else psycopg.connect(postgres)

    end()
    async with open_pool(lookup(connect if gives else connection)) as pool:
        first = await outcomes(pool, *range(4))
        again = await outcomes(pool, *range(4))
        # A fresh one answers at once; one connection that is gone stays gone, and each of its agents is told.
        assert [one.ok for one in first] == [gives] * 4
        assert [one.ok for one in again] == [gives] * 4
    connection.close()
