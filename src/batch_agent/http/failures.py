"""Errors of the transport, below the meaning of request and response.

The connection and parser code raises these; ``backends.http.wire`` turns them into BackendErrors. ``str(error)`` is the
message of the operating system, the TLS library or the parser; it may be empty.
"""

from __future__ import annotations


class TransportError(Exception):
    """No complete response arrived. ``unreached``: the server has read nothing of the request."""

    unreached = False


class ConnectFailed(TransportError):
    """The connection failed: refused, host name not found, or TLS handshake failed. ``cause`` is the original error."""

    unreached = True

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ConnectTimedOut(TransportError):
    """The connection was not established in time."""

    unreached = True


class ProxyUnreachable(ConnectFailed):
    """The connection to the proxy failed."""


class ProxyRefused(TransportError):
    """The proxy answered CONNECT with a status that is not 2xx."""

    unreached = True

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class BadAddress(TransportError):
    """The host name cannot be resolved at all."""

    unreached = True


class ClosedEarly(TransportError):
    """The server closed or reset the connection before the first byte of a response. ``stale``: the connection had been
    kept since an earlier request, and closed at once: the server may have closed it before it read this one."""

    stale = False


class BrokenOff(TransportError):
    """The response ended in the middle, or its compressed body cannot be decompressed."""


class NotHttp(TransportError):
    """The received bytes are not an HTTP response."""


class TooLarge(TransportError):
    """The response is larger than ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"more than {limit_bytes:,} bytes")
        self.limit_bytes = limit_bytes
