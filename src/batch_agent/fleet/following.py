"""Follows a hostfile as it changes.

A new version is read and checked as a whole before any of it is applied. A version with an error changes nothing and is
logged once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from batch_agent.errors import SpecError
from batch_agent.fleet.hostfile import AgentEndpoint, parse_hosts, read_text

logger = logging.getLogger("batch_agent")

WATCH_SECONDS = 2.0  # between two checks of a hostfile
SETTLE_SECONDS = 0.1  # the file must stay unchanged for this long: it may be half written

Select = Mapping[str, Sequence[str]]


class Hostfile:
    """A hostfile, and the tags that its endpoints must have: one of the given values for each key of ``select``."""

    def __init__(self, path: str | Path, select: Select | None = None) -> None:
        self.path, self.select = Path(path), select or {}
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
        """Return the text; None while it is being written."""
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
    """Return the kept items with their current lines, the removed items, and the new lines. Lines are matched by
    address, several of one address in order."""
    left: dict[str, list[AgentEndpoint]] = {}
    for host in hosts:
        left.setdefault(host.address, []).append(host)
    known = list(known)
    lines = [left[one.address].pop(0) if left.get(one.address) else None for one in known]
    kept = [(one, line) for one, line in zip(known, lines, strict=True) if line is not None]
    gone = [one for one, line in zip(known, lines, strict=True) if line is None]
    return kept, gone, [host for hosts in left.values() for host in hosts]


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, so that a key has the same home in every process; with a number if it is taken."""
    numbered = chain([name], (f"{name}#{number}" for number in count(2)))
    return next(each for each in numbered if each not in taken)
