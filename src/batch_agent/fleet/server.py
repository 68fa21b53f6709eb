"""One server of a fleet: its backend, what it was given, and what is under way there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from batch_agent.backends.base import Backend
from batch_agent.errors import SpecError
from batch_agent.scheduler.server import Server as KnownServer

FACTS = ("model", "context", "weight")


@dataclass(slots=True, eq=False)
class Server:
    """``address`` is what it was added with, ``name`` what it is called; entered when it is first needed."""

    address: str
    name: str
    backend: Backend
    model: str | None = None  # as the user gave it
    context: int | None = None
    weight: float = 1.0
    found: frozenset[str] | None = None  # the models it says it serves
    inflight: int = 0
    leaving: bool = False
    entered: bool = False
    _entering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def models(self) -> frozenset[str] | None:
        return self.found if self.model is None else frozenset({self.model})

    @property
    def known(self) -> KnownServer:
        """What is known of the server, with what the fleet was given for it."""
        known = self.backend.servers[""]
        usual = self.backend.capabilities.default_inflight
        known.default_inflight = None if usual is None else max(1, round(usual * self.weight))
        known.weight, known.models, known.context = self.weight, self.models, self.context
        return known

    def serves(self, model: str) -> bool:
        return not model or self.models is None or model in self.models

    async def enter(self) -> None:
        if not self.entered:
            async with self._entering:
                if not self.entered:
                    await self.backend.__aenter__()
                    self.entered = True

    async def close(self) -> None:
        async with self._entering:
            if self.entered:
                self.entered = False
                await self.backend.__aexit__(None, None, None)


def facts_of(tags: Mapping[str, object], what: str) -> dict[str, object]:
    """``model``, ``context`` and ``weight`` of a server, as tags or options give them. SpecError for a wrong one."""
    facts: dict[str, object] = {}
    if model := tags.get("model"):
        facts["model"] = str(model)
    context = tags.get("context")
    if context is not None:
        if not str(context).isdecimal() or int(str(context)) < 1:
            raise SpecError(f"the context of {what} must be a whole number of tokens above 0, not {context!r}")
        facts["context"] = int(str(context))
    weight = tags.get("weight")
    if weight is not None:
        try:
            facts["weight"] = float(str(weight))
        except ValueError:
            facts["weight"] = 0.0
        if not 0 < float(str(facts["weight"])) < 1e6:
            raise SpecError(f"the weight of {what} must be a number above 0, not {weight!r}")
    return facts
