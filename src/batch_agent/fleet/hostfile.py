"""Reads hostfiles: one endpoint per line, as people and batch systems write them.

    gpu-1                        # port 8000
    gpu-2   8001   role=worker   node=r1
    gpu-3:8001
    [fd00::1]:8000
    https://models.example.org/team
    sglang://gpu-4

Fields are separated by tabs or spaces. PBS and Slurm list a host once per core or task, so a repeated bare host is one
endpoint; a line with a port or a tag is always a separate endpoint. An invalid line is an error with its number.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv6Address
from itertools import chain, count
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar
from urllib.parse import urlsplit

from batch_agent.errors import SpecError
from batch_agent.scheduler.server_state import ServerState

DEFAULT_PORT = 8000
PORTS = {"http": 80, "https": 443, "vllm": DEFAULT_PORT, "sglang": 30000, "dynamo": DEFAULT_PORT}
FORMS = "host, host 8001, host:8001, [v6]:8001, https://host/path, vllm://host:8001 or sglang://host:30000"

# Where a worker on another machine finds the hostfiles of its run, by their paths there. It may block.
KEPT_HOSTFILES: ContextVar[Callable[[str], str | None] | None] = ContextVar("KEPT_HOSTFILES", default=None)

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_COMMENT = re.compile(r"(^|\s)#.*")

logger = logging.getLogger("batch_agent")

WATCH_SECONDS = 2.0  # between two checks of a hostfile
SETTLE_SECONDS = 0.1  # the file must stay unchanged for this long: it may be half written

Select = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Traits:
    """What the user states about a server: its model, its context in tokens, its share of the requests."""

    model: str | None = None
    context: int | None = None
    weight: float = 1.0

    @classmethod
    def read(cls, tags: Mapping[str, object]) -> Traits:
        """Read ``model``, ``context`` and ``weight`` of the tags. Raises ValueError for an invalid value."""
        model = tags.get("model") or None
        context = tags.get("context")
        weight = tags.get("weight")
        if context is not None and (not str(context).isdecimal() or int(str(context)) < 1):
            raise ValueError(f"context must be a whole number of tokens above 0, not {context!r}")
        try:
            share = 1.0 if weight is None else float(str(weight))
        except ValueError:
            share = 0.0
        if not 0 < share < 1e6:
            raise ValueError(f"weight must be a number above 0, not {weight!r}")
        return cls(None if model is None else str(model), None if context is None else int(str(context)), share)

    def apply(self, server: ServerState, inflight: int | None, found: frozenset[str] | None) -> ServerState:
        """Set what is stated about the server. ``inflight`` is for a weight of 1; ``found`` are the models it lists."""
        server.weight, server.context = self.weight, self.context
        server.default_inflight = None if inflight is None else max(1, round(inflight * self.weight))
        server.models = found if self.model is None else frozenset({self.model})
        server.stated = self.model is not None
        return server


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """The address of one server. ``scheme`` is that of its line in the hostfile; "" for a plain host."""

    host: str
    port: int
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    scheme: str = ""
    path: str = ""

    @property
    def place(self) -> str:
        """Return host and port, as in a URL."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return its HTTP address."""
        if self.scheme in ("http", "https") and self.port == PORTS[self.scheme]:
            return f"{self.scheme}://{self.place.rpartition(':')[0]}{self.path}"
        return f"{'https' if self.scheme == 'https' else 'http'}://{self.place}{self.path}"

    @property
    def address(self) -> str:
        """Return its address for ``backend=``. A plain host is a vLLM server."""
        return self.url if self.scheme in ("http", "https") else f"{self.scheme or 'vllm'}://{self.place}{self.path}"

    @property
    def api(self) -> str:
        """Return the base URL of its API, as the backends use it: with ``/v1`` unless the line has a path."""
        is_engine = self.scheme not in ("http", "https")
        return self.url + ("/v1" if not self.path or (is_engine and not self.path.endswith("/v1")) else "")

    @property
    def line(self) -> str:
        """Return its line in a hostfile. ``parse_hosts`` reads the same endpoint from it."""
        place = self.place if ":" in self.host else f"{self.host}\t{self.port}"
        return "\t".join(
            [self.address if self.scheme else place, *(f"{key}={value}" for key, value in self.tags.items())]
        )


def parse_hostfile(path: str | Path) -> list[AgentEndpoint]:
    """Return the endpoints of a file, in order. Raises SpecError for an unreadable file."""
    return parse_hosts(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """Return the text of a hostfile. Raises SpecError for an unreadable file."""
    source = KEPT_HOSTFILES.get()
    if source is not None and (kept := source(str(path))) is not None:
        return kept
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SpecError(f"the hostfile {str(path)!r} cannot be read: {reason}") from None


def parse_hosts(text: str, source: str, *, check_traits: bool = False) -> list[AgentEndpoint]:
    """Return the endpoints in a hostfile's text; errors name ``source`` and the line. With ``check_traits`` the tags
    ``context`` and ``weight`` must have values that a fleet can use."""
    found: list[AgentEndpoint] = []
    bare: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        fields = _COMMENT.sub("", line).split()
        if not fields:
            continue
        try:
            endpoint = _read(fields)
            if check_traits:
                Traits.read(endpoint.tags)
        except ValueError as error:
            raise SpecError(f"line {number} of the hostfile {source!r} cannot be read: {error}") from None
        if len(fields) == 1 and fields[0] in bare:
            continue
        if fields[0] == endpoint.host:
            bare.add(endpoint.host)
        found.append(endpoint)
    return found


def _read(fields: list[str]) -> AgentEndpoint:
    """Read one line. Raises ValueError with the reason."""
    first, rest = fields[0], fields[1:]
    own_port = None
    if rest and "=" not in rest[0]:
        own_port = _port(rest.pop(0))
    scheme, host, port, path = _read_url(first) if "://" in first else ("", *_read_place(first, own_port), "")
    if port is not None and own_port is not None:
        raise ValueError(f"it has two ports, {port} and {own_port}")
    port = port if port is not None else own_port
    return AgentEndpoint(host, port if port is not None else PORTS.get(scheme, DEFAULT_PORT), _tags(rest), scheme, path)


def _read_url(text: str) -> tuple[str, str, int | None, str]:
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in PORTS:
        raise ValueError(f"there is no scheme {scheme!r}; write {FORMS}")
    url = urlsplit(f"{scheme}://{rest}")
    if url.query or url.fragment:
        raise ValueError("nothing may follow the path of an address")
    host, port = _read_place(url.netloc, None)
    return scheme, host, port, url.path.rstrip("/")


def _read_place(text: str, own_port: int | None) -> tuple[str, int | None]:
    """Return the host, and the port if there is one. An error never repeats a login."""
    if "@" in text:
        raise ValueError("a hostfile must not contain logins; give the key as api_key=")
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an address; write [v6]:8001")
        return _v6(host), _port(rest[1:]) if rest else None
    if text.count(":") > 1:
        if own_port is None:
            raise ValueError(f"the port of {text!r} is ambiguous; write [v6]:8001")
        return _v6(text), None
    host, colon, port = text.partition(":")
    if not _NAME.fullmatch(host):
        hint = "; list one node per line (scontrol show hostnames)" if "[" in host else f"; write {FORMS}"
        raise ValueError(f"{host!r} is not a host name{hint}")
    return host, _port(port) if colon else None


def _v6(text: str) -> str:
    try:
        IPv6Address(text)
    except AddressValueError:
        raise ValueError(f"{text!r} is not an IPv6 address") from None
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{text!r} is neither a port nor a tag (key=value)")
    return int(text)


def _tags(fields: list[str]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in fields:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ValueError(f"{pair!r} is not a tag; write key=value")
        if key in tags:
            raise ValueError(f"the tag {key!r} is given twice")
        tags[key] = value
    return tags


class Hostfile:
    """A hostfile, and the tags that its endpoints must have: one of the given values for each key of ``select``."""

    def __init__(self, path: str | Path, select: Select | None = None) -> None:
        self.path = Path(path)
        self.select = select or {}
        self._text: str | None = None  # the latest text that was read

    @property
    def text(self) -> str:
        """The latest content that was read."""
        return self._text or ""

    def read(self) -> list[AgentEndpoint]:
        """Return the selected endpoints, at least one. Raises SpecError for a file that a fleet cannot use."""
        self._text = read_text(self.path)
        return self._parse(self._text)

    def _parse(self, text: str) -> list[AgentEndpoint]:
        hosts = parse_hosts(text, str(self.path), check_traits=True)
        if not hosts:
            raise SpecError(f"the hostfile {str(self.path)!r} names no endpoint")
        chosen = [host for host in hosts if all(host.tags.get(key) in values for key, values in self.select.items())]
        if not chosen:
            wanted = ", ".join(f"{key}={'|'.join(values)}" for key, values in self.select.items())
            raise SpecError(f"no endpoint of the hostfile {str(self.path)!r} has {wanted}")
        return chosen

    async def follow(self, apply: Callable[[Sequence[AgentEndpoint]], None]) -> NoReturn:
        """Call ``apply`` with the endpoints of each new version. ``apply`` changes all or raises SpecError."""
        said = ""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                text, said = await self._settled(), ""
                if text is not None and text != self._text:
                    self._text = text
                    apply(self._parse(text))
            except SpecError as error:
                if str(error) != said:  # a file that stays unreadable is checked again each time
                    logger.warning("%s; the endpoints stay as they were", error)
                said = str(error)

    async def _settled(self) -> str | None:
        """Return the text of the file; None while it is being written."""
        text = await asyncio.to_thread(read_text, self.path)
        if text == self._text:
            return text
        await asyncio.sleep(SETTLE_SECONDS)
        return text if await asyncio.to_thread(read_text, self.path) == text else None


class Known(Protocol):
    @property
    def address(self) -> str: ...


T = TypeVar("T", bound=Known)


def changes(
    known: Iterable[T], hosts: Iterable[AgentEndpoint]
) -> tuple[list[tuple[T, AgentEndpoint]], list[T], list[AgentEndpoint]]:
    """Return three lists: the known items that stay, each with its new line; the removed items; and the new lines.
    Lines are matched by address; several with one address are matched in order."""
    left: dict[str, list[AgentEndpoint]] = {}
    for host in hosts:
        left.setdefault(host.address, []).append(host)
    known = list(known)
    lines = [left[one.address].pop(0) if left.get(one.address) else None for one in known]
    kept = [(one, line) for one, line in zip(known, lines, strict=True) if line is not None]
    gone = [one for one, line in zip(known, lines, strict=True) if line is None]
    return kept, gone, [host for hosts in left.values() for host in hosts]


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number added if it is taken. It stays unchanged where possible, so that keys have the
    same home in every process."""
    numbered = chain([name], (f"{name}#{number}" for number in count(2)))
    return next(each for each in numbered if each not in taken)
