"""Makes the record of this process available to worker processes: a Unix socket for this user only, or any channel.

``ServedStore`` is the worker's side: a ``WorkStore`` that passes each call on as one message. ``StoreServer`` is the
other side: it makes the calls on the store. Rows are objects in the process of the store and JSON outside; results of
workers stay JSON until the feeder delivers them. A worker that loses the connection connects again and repeats the
call, which changes nothing if the first one arrived. It never connects to another process: a resumed run listens at the
same path, and there the numbers of its workers belong to others.

Messages are pickled, but only the values of ``record.store`` and plain data are unpickled, so a message cannot run
code.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BatchAgentError, InputError, SpecError, StoreError
from batch_agent.job import BaseResult, Job
from batch_agent.messages import JsonObject
from batch_agent.record.private import socket_folder
from batch_agent.record.row_json import ResultEncoder, encode_row
from batch_agent.record.store import (
    GATHERING_FAR,
    GROUP,
    NUMBERS,
    WAIT,
    WINDOW,
    Commit,
    Identity,
    KeptStep,
    Lease,
    Row,
    RowChange,
    RunStore,
    WorkStore,
)
from batch_agent.share.table import Claim, Learnt

logger = logging.getLogger("batch_agent")

SOCKET = "workers.sock"  # in the run directory
PATIENCE = 600.0  # seconds for which a lost connection is tried again
PAUSE = 0.1  # seconds between two attempts to connect
LARGEST = 1 << 30  # bytes of a message
HEAD = struct.Struct("!I")
# What workers may call. A feeder is in the process of the store.
CALLS = {
    *("facts", "standing", "join", "take", "claim", "renew", "commit", "hand_back", "leave"),
    *("beat", "resign", "table", "steer", "begin_call", "end_call", "wait_calls", "put_file", "get_file"),
    *("outlasts", "job_lines", "add_job_lines", "followed_rows", "report_rows"),
}
MODULES = ("batch_agent.record.store", "batch_agent.share.table")
BUILTINS = {"set", "frozenset"}

# Calls whose first argument is the number of a worker, or its name as a member.
OF_A_WORKER = {"take", "renew", "commit", "hand_back", "leave", "beat", "resign"}

Holder = tuple[str, object]  # stage, and the number of a worker or its name
Call = tuple[str, str, tuple[object, ...]]  # stage, method, arguments
Answer = tuple[str, object]  # "" and the value that the method returned, or the name of an error and its message


class FeederGone(StoreError):
    """The process that feeds the run has ended, or is unreachable."""


class _Plain(pickle.Unpickler):
    """Unpickles only plain data and the values that a record exchanges."""

    def find_class(self, module: str, name: str) -> object:
        if module in MODULES or (module == "builtins" and name in BUILTINS):
            return super().find_class(module, name)
        raise StoreError(f"a message of another process contains {module}.{name}")


def _by_fields(kind: type[Row] | type[Lease] | type[KeptStep]) -> Callable[[Any], Any]:
    values = attrgetter(*(field.name for field in fields(kind)))
    return lambda value: (kind, values(value))


# A value of the record is written as a call of its type with its fields, which takes a third of the time of its state.
WRITTEN: dict[type, Callable[[Any], Any]] = {
    **{kind: _by_fields(kind) for kind in (Row, Lease, KeptStep)},
    RowChange: lambda change: (
        RowChange,
        (change.lease.bare(), change.steps, change.result, change.error, change.resumed),
    ),
}


def dump(value: object) -> bytes:
    data = io.BytesIO()
    pickler = pickle.Pickler(data, protocol=5)
    pickler.dispatch_table = WRITTEN
    pickler.dump(value)
    return data.getvalue()


def load(data: bytes) -> object:
    """Return the value in a message. Raises StoreError if it contains anything but the values of a record."""
    try:
        return _Plain(io.BytesIO(data)).load()
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001
        raise StoreError(f"a message of another process is damaged: {error!r}") from None


class StoreDesk:
    """Makes the calls of workers on a store of this process. ``facts`` returns what workers need to prepare the run,
    in addition to its facts; it raises SpecError for a run that other processes cannot work on. ``on_join`` is called
    before a worker joins."""

    def __init__(
        self,
        store: RunStore,
        *,
        facts: Callable[[], JsonObject] = dict,
        on_join: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._facts = facts
        self._on_join = on_join

    def answer(self, call: Call) -> Answer:
        """Return the answer to a call, or its error."""
        try:
            return "", self._call(*call)
        except BatchAgentError as error:
            return type(error).__name__, str(error)
        except Exception as error:  # a bug of this package; the worker must get an answer
            logger.exception("a call of a worker failed")
            return "StoreError", f"{call[1]} failed in the process that feeds the run: {error!r}"

    def _call(self, stage: str, method: str, arguments: tuple[object, ...]) -> object:
        if method not in CALLS:
            raise StoreError(f"workers cannot call {method!r}")
        store = self._store.stage(stage) if stage else self._store
        if method == "facts":
            facts = store.facts() if _has_begun(store) else None  # not those of a session before this one
            return facts if facts is None or stage else {**facts, **self._facts()}
        if method == "join":
            self._on_join()
        if method == "take":
            worker, most, wait = cast("tuple[int, int, float]", arguments)
            fair = max(GROUP, store.unstarted // 8)  # more per call while many are left
            return [_sent(lease) for lease in store.take(worker, min(most, fair), wait)]
        return getattr(store, method)(*arguments)


def _has_begun(store: RunStore) -> bool:
    """Return whether a feeder has opened the run since the store was opened."""
    try:
        store.standing()
    except StoreError:
        return False
    return True


def _sent(lease: Lease) -> Lease:
    """Return a row in the form in which it is sent: its input as JSON, and its job if that can be sent; otherwise the
    worker compiles the row again. A row that cannot be sent fails alone, at the worker."""
    row = lease.row
    job, compiled, identity = row.job, None, (b"", b"")
    try:
        value = encode_row(row.value, job.job_id if isinstance(job, Job | BaseResult) else None)
    except InputError as error:
        value = str(error).encode()
    else:
        if isinstance(job, Job) and job.input is row.value and not job.parts and not job.images:
            compiled, identity = (job.prompt, job.own_id, job.shortened, job.affinity), (row.key, row.content)
    return replace(lease, row=Row(row.index, *identity, value, compiled))


class StoreServer:
    """Listens on a Unix socket, and answers each connection in a thread of its own. The socket is in ``folder``, or in
    a temporary directory if the path is too long for a socket or the file system has none."""

    def __init__(self, desk: StoreDesk, folder: Path | None = None) -> None:
        self._desk = desk
        self._made: Path | None = None  # the temporary directory
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self.path = self._bind(folder)
        except OSError:
            self.path = self._bind(None)
        self.path.chmod(0o600)  # no connection is accepted before
        self._socket.listen(256)
        self._open: dict[socket.socket, set[Holder]] = {}  # and the workers that used the connection
        self._lock = threading.Lock()
        self._closed = False
        self.on_change: Callable[[], None] = lambda: None  # called from any thread when workers come or leave
        threading.Thread(target=self._accept, name="batch-agent-served", daemon=True).start()

    def _bind(self, folder: Path | None) -> Path:
        if folder is None:
            folder = self._made = socket_folder()
        path = folder.absolute() / SOCKET
        path.unlink(missing_ok=True)  # of a killed run
        self._socket.bind(str(path))
        return path

    def close(self) -> None:
        """Close all connections. Blocks for a moment."""
        with self._lock:
            self._closed = True
            connections = tuple(self._open)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.path.unlink(missing_ok=True)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open[connection] = set()
            threading.Thread(target=self._serve, args=(connection,), name="batch-agent-served", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while (data := _receive(connection)) is not None and not self._closed:
                    call = cast(Call, load(data))
                    answer = self._desk.answer(call)
                    self._note(connection, call, answer)
                    _send(connection, dump(answer))
        except (OSError, StoreError) as error:
            if not self._closed:
                logger.debug("the connection of a worker ended: %s", error)
        finally:
            self._dismiss(connection)

    def _note(self, connection: socket.socket, call: Call, answer: Answer) -> None:
        """Remember which worker uses a connection."""
        stage, method, arguments = call
        worker = answer[1] if method == "join" else arguments[0] if method in OF_A_WORKER else None
        if worker is None:
            return
        with self._lock:
            self._open[connection].add((stage, worker))
        self.on_change()

    @property
    def is_used(self) -> bool:
        """Whether a process that joined is still connected. A process closes its connections when it has left."""
        with self._lock:
            return any(self._open.values())

    def _dismiss(self, connection: socket.socket) -> None:
        """Hand back the rows of workers without a connection, because their process has ended."""
        with self._lock:
            workers = self._open.pop(connection, set())
            gone = workers - {each for others in self._open.values() for each in others}
        for stage, worker in () if self._closed else gone:
            if isinstance(worker, int):  # what it held of the budget counts as spent
                self._desk.answer((stage, "leave", (worker,)))
        self.on_change()


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(HEAD.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes | None:
    """Return the next message; None if the other side closed the connection."""
    head = _read_exactly(connection, HEAD.size)
    if head is None:
        return None
    (size,) = HEAD.unpack(head)
    if size > LARGEST:
        raise StoreError(f"a message of {size} bytes is too large")
    return _read_exactly(connection, size)


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(1 << 20, size - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)


class ServedStore:
    """The record of another process, for a worker: a ``WorkStore``, each of whose ``CALLS`` is one message.
    ``exchange`` sends a call and returns its answer. ``watch`` calls back when that process has ended, from another
    thread."""

    wait = WAIT
    group = 4 * GROUP
    window = WINDOW
    gathering = GATHERING_FAR
    writes = True
    lasts = False
    unstarted = 0
    folder = None

    def __init__(
        self,
        exchange: Callable[[Call], Answer],
        stage: str = "",
        close: Callable[[], None] = lambda: None,
        watch: Callable[[Callable[[], None]], None] = lambda ended: None,
    ) -> None:
        self._exchange = exchange
        self._stage = stage
        self._close = close
        self._watch = watch
        self._encoded = ResultEncoder()

    def describe(
        self, schema: OutputSchema[object] | None, row_schema: OutputSchema[object] | None, *, messages: bool
    ) -> None:
        self._encoded = ResultEncoder(schema, messages=messages)

    def _call(self, method: str, *arguments: object) -> Any:
        kind, value = self._exchange((self._stage, method, arguments))
        if kind:
            raise (SpecError if kind == "SpecError" else StoreError)(str(value))
        return value

    def blocks(self, call: str) -> bool:
        return True

    def stage(self, name: str) -> WorkStore:
        return ServedStore(self._exchange, stage=name, watch=self._watch)

    def close(self) -> None:
        self._close()

    def listen(self, changed: Callable[[], None], *, results: bool = False) -> None:
        """Call ``changed`` when the process of the record has ended. Other changes are waited for by calls that
        block."""
        self._watch(changed)

    def agent_numbers(self, worker: int) -> Iterator[int]:
        return count(worker << NUMBERS | 1)

    # One message each

    def facts(self) -> Any:
        return self._call("facts")

    def standing(self) -> Any:
        return self._call("standing")

    def join(self, description: JsonObject) -> Any:
        return self._call("join", description)

    def take(self, worker: int, most: int, wait: float) -> Any:
        return self._call("take", worker, most, wait)

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> Any:
        return self._call("claim", lease.bare(), wanted)

    def renew(self, worker: int, leases: Sequence[Lease]) -> Any:
        return self._call("renew", worker, [lease.bare() for lease in leases])

    def commit(self, worker: int, number: int, commit: Commit) -> Any:
        changes = self._encoded.changes(commit.changes, worker)
        return self._call("commit", worker, number, replace(commit, changes=changes))

    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        self._call("hand_back", worker, [lease.bare() for lease in leases])

    def leave(self, worker: int) -> None:
        self._call("leave", worker)

    def beat(
        self,
        member: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Any:
        return self._call("beat", member, seconds, claims, learnt, status)

    def resign(self, member: str) -> None:
        self._call("resign", member)

    def table(self) -> Any:
        return self._call("table")

    def steer(self, request: JsonObject) -> Any:
        return self._call("steer", request)

    def begin_call(self, member: str, key: str, token: str, seen: str) -> Any:
        return self._call("begin_call", member, key, token, seen)

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        self._call("end_call", key, token, text, ok, keep)

    def wait_calls(self, position: str, seconds: float) -> Any:
        return self._call("wait_calls", position, seconds)

    def put_file(self, name: str, text: str) -> None:
        self._call("put_file", name, text)

    def get_file(self, name: str) -> Any:
        return self._call("get_file", name)

    def outlasts(self) -> Any:
        return self._call("outlasts")

    def job_lines(self) -> Any:
        return self._call("job_lines")

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        self._call("add_job_lines", lines)

    def followed_rows(self) -> Any:
        return self._call("followed_rows")

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        self._call("report_rows", rows)


class Connections:
    """The connections of one worker process to a StoreServer. Each thread that calls uses one of its own.

    The first connection is never used: it ends with the process of the server, and then no call is tried again.
    """

    def __init__(self, path: Path, patience: float = PATIENCE) -> None:
        self._path, self._patience = path, patience
        self._first: socket.socket | None = None
        self._free: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._told: list[Callable[[], None]] = []  # called when the server has ended

    def exchange(self, call: Call) -> Answer:
        """Send a call, and return its answer. Raises StoreError if the process that feeds the run is gone."""
        data, until = dump(call), time.monotonic() + self._patience
        while True:
            connection = None
            try:
                connection = self._take()
                _send(connection, data)
                if (answer := _receive(connection)) is not None:
                    self._give(connection)
                    connection = None
                    return cast(Answer, load(answer))
            except (ConnectionRefusedError, FileNotFoundError):
                self._closed = True
            except OSError:
                pass  # tried again below
            finally:
                if connection is not None:
                    connection.close()
            if self._closed or time.monotonic() >= until:
                raise FeederGone("the process that feeds this run has ended, or is unreachable")
            time.sleep(PAUSE)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the process of the server has ended, from another thread."""
        with self._lock:
            self._told.append(ended)

    def _take(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise ConnectionRefusedError
            if self._first is None:
                self._first = self._connect()
                threading.Thread(target=self._wait, args=(self._first,), name="batch-agent-served", daemon=True).start()
            if self._free:
                return self._free.pop()
        return self._connect()

    def _give(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:  # while this connection was in use
                connection.close()
            else:
                self._free.append(connection)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        return connection

    def _wait(self, first: socket.socket) -> None:
        with first, suppress(OSError):
            first.recv(1)
        with self._lock:
            told = [] if self._closed else [*self._told]
            self._closed = True
        for ended in told:
            ended()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._free:
                connection.close()
            self._free.clear()
            if self._first is not None:
                with suppress(OSError):
                    self._first.shutdown(socket.SHUT_RDWR)  # its thread ends


def open_served(path: Path) -> WorkStore:
    """Return the record that another process of this machine serves at a socket."""
    if not path.exists():
        raise StoreError(f"no run is served at {path}: it has ended")
    if os.name == "nt":
        raise SpecError("this platform has no Unix sockets, so a run cannot have several processes without Redis")
    connections = Connections(path)
    return ServedStore(connections.exchange, close=connections.close, watch=connections.watch)
