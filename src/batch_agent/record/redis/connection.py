"""Connections to Redis that survive an outage of the server.

A failed call is retried until the server is back: a restart or a network outage of half a minute must not stop a run.
``on_away`` is called when an outage begins and when it ends, so that no model request is sent meanwhile. All calls must
be safe to repeat (``record/store.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

from batch_agent.errors import SpecError, StoreError
from batch_agent.record.address import PASSWORD_VARIABLE, StoreAddress

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

PATIENCE = 600.0  # seconds of outage after which a run fails
PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts, doubled each time
TIMEOUT = 5.0  # seconds for an answer, in addition to the wait of a blocking command
# How an answer begins with which a server refuses for a while: it runs a long script, has too few replicas, could not
# save, loads, or is a replica during a failover. It refuses before the first write of a script, which can be repeated.
REFUSALS = (
    *("BUSY ", "NOREPLICAS", "MISCONF", "LOADING", "READONLY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN"),
    "UNBLOCKED",  # a blocking command at a server that became a replica
)
DELETED = "no longer exists"  # in the answer to a command that waited at a stream, when it is deleted
MISSING = "a run in Redis needs the package redis (the extra redis)"


class Client(Protocol):
    """The methods of redis-py's clients ``Redis`` and ``RedisCluster`` that are used here."""

    def execute_command(self, *args: Any, **options: Any) -> Any: ...

    def register_script(self, script: str) -> Script: ...

    def close(self) -> None: ...


class Script(Protocol):
    def __call__(self, keys: Sequence[str] = (), args: Sequence[object] = ()) -> Any: ...


def connect(address: StoreAddress, *, timeout: float = TIMEOUT) -> Client:
    """Return a blocking client whose answers are bytes. It connects at its first call. ``timeout`` must be longer than
    the wait of any blocking command."""
    redis = _redis()
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "username": address.user,
        "password": address.password,
        "socket_timeout": timeout,
        "socket_connect_timeout": TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # the same form of answers from every server
    }
    if address.cluster:
        return cast(Client, redis.RedisCluster(**options))
    return cast(Client, redis.Redis(**options, db=address.database, ssl=address.tls))


class RedisConnection:
    """A client whose calls are retried during an outage. It is thread-safe."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        patience: float = PATIENCE,
        on_away: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.address = address
        self.on_away = on_away
        self.patience = patience
        self.since = float("-inf")  # end of the latest outage, on the monotonic clock
        self._client: Client | None = None
        self._away = self._calls = 0  # number of calls that wait for the server, and that use it
        self._guard = threading.Lock()
        self._closing = threading.Event()

    def open(self) -> None:
        """Connect now. Raises SpecError if the server refuses, StoreError if it is unreachable."""
        self.call(lambda client: client.execute_command("PING", target_nodes="random") if self.address.cluster
                  else client.execute_command("PING"), patience=0.0)  # fmt: skip

    def call(self, function: Callable[[Client], T], *, patience: float | None = None) -> T:
        """Return the result of ``function``. It is retried while the server is unreachable or refuses
        for a while."""
        redis = _redis()
        away = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ClusterDownError,
                redis.exceptions.RedisClusterException, OSError)  # fmt: skip
        began: float | None = None
        pause = PAUSE
        try:
            while True:
                try:
                    with self._using() as client:
                        return function(client)
                except (
                    redis.AuthenticationError,
                    redis.exceptions.AuthorizationError,
                    redis.exceptions.NoPermissionError,
                ) as error:
                    raise SpecError(
                        f"{self.address} refused the login: {str(error).rstrip('.')}. Set the password in "
                        f"{PASSWORD_VARIABLE} or in the URL"
                    ) from None
                except (*away, redis.RedisError) as error:
                    if "CERTIFICATE_VERIFY_FAILED" in str(error):
                        raise SpecError(
                            f"{self.address} has a certificate that is not trusted here: {str(error).rstrip('.')}. Set "
                            "SSL_CERT_FILE to the certificate of its CA"
                        ) from None
                    trouble = _refusal(error) or (f"is unreachable: {error}" if isinstance(error, away) else "")
                    if not trouble:
                        raise StoreError(f"the run cannot be recorded in {self.address}: {error}") from None
                    now = time.monotonic()
                    limit = self.patience if patience is None else patience
                    if began is None and limit > 0:
                        began = now
                        self._count(1, trouble)
                    if began is None or now - began >= limit or self._closing.wait(pause):
                        raise StoreError(f"{self.address} {trouble}") from None
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            if began is not None:
                self._count(-1)

    def close(self) -> None:
        """Close the connections once no call uses them. Calls that wait for the server raise StoreError."""
        self._closing.set()
        self._let_go()

    @contextmanager
    def _using(self) -> Iterator[Client]:
        with self._guard:
            if self._closing.is_set():
                raise StoreError(f"the connection to {self.address} is closed")
            if self._client is None:
                self._client = connect(self.address)
            client = self._client
            self._calls += 1
        try:
            yield client
        finally:
            with self._guard:
                self._calls -= 1
            if self._closing.is_set():
                self._let_go()

    def _let_go(self) -> None:
        with self._guard:
            client = None if self._calls else self._client
            self._client = None if client is not None else self._client
        if client is not None:
            client.close()

    def _count(self, change: int, trouble: str = "") -> None:
        with self._guard:
            before = self._away
            self._away += change
            if not self._away:
                self.since = time.monotonic()
        if before == 0:
            logger.warning("%s %s. No request is sent meanwhile", self.address, trouble.rstrip("."))
            self.on_away(True)
        elif not before + change:
            self.on_away(False)


def _refusal(error: Exception) -> str:
    """Return the words for a refusal of the server that will pass; "" for any other error."""
    exceptions = _redis().exceptions
    if isinstance(error, exceptions.OutOfMemoryError):
        return "is full: its memory has reached maxmemory"
    if isinstance(error, exceptions.BusyLoadingError):
        return f"is loading its data: {error}"
    gone = DELETED in str(error)
    if not gone and (isinstance(error, exceptions.ReadOnlyError) or str(error).startswith(REFUSALS)):
        return f"refuses for now: {error}"
    return ""


def _redis() -> Any:
    try:
        import redis
    except ImportError:
        raise SpecError(MISSING) from None
    return redis


def entries(read: Any) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """Yield the entries of one stream in an answer of XREAD, for both protocol versions of Redis."""
    if not read:
        return
    pages = read.values() if isinstance(read, dict) else [page for _, page in read]
    for page in pages:
        for place, fields in page[0] if isinstance(read, dict) and page and isinstance(page[0], list) else page:
            pairs = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            yield place.decode(), pairs
