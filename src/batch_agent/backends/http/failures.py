"""What goes wrong between a request and its response, below the meaning of either.

The connection and parser code raises these; ``faults`` turns them into BackendErrors. ``str(error)`` is what the
operating system, the TLS library or the parser said; it may be empty.
"""

from __future__ import annotations


class TransportError(Exception):
    """No complete response came. ``unreached``: the server has read nothing of the request."""

    unreached = False


class ConnectFailed(TransportError):
    """No connection was made: refused, host name not found, TLS handshake failed. ``cause`` is what was raised."""

    unreached = True

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ConnectTimedOut(TransportError):
    """No connection was made in time."""

    unreached = True


class ProxyUnreachable(ConnectFailed):
    """No connection to the proxy was made."""


class ProxyRefused(TransportError):
    """The proxy answered CONNECT with a status that is not 2xx."""

    unreached = True

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class BadAddress(TransportError):
    """The host name cannot be looked up at all."""

    unreached = True


class ClosedEarly(TransportError):
    """The server closed or reset the connection before the first byte of a response."""


class BrokenOff(TransportError):
    """The response ended in the middle, or its compressed body cannot be decompressed."""


class NotHttp(TransportError):
    """The bytes that came are no HTTP response."""


class TooLarge(TransportError):
    """The response is larger than ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"more than {limit_bytes:,} bytes")
        self.limit_bytes = limit_bytes
