"""One server of a fleet: its backend, what the user stated about it, and its running requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from batch_agent.backends.base import Backend
from batch_agent.fleet.hostfile import Traits
from batch_agent.scheduler.server import Server


@dataclass(slots=True, eq=False)
class FleetServer:
    """``address`` is as the user gave it; ``name`` is unique in the fleet. The backend is entered on first use."""

    address: str
    name: str
    backend: Backend
    traits: Traits = field(default_factory=Traits)
    found: frozenset[str] | None = None  # the models that the server lists; None: unknown
    inflight: int = 0
    leaving: bool = False
    entered: bool = False
    _entering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def models(self) -> frozenset[str] | None:
        return self.found if self.traits.model is None else frozenset({self.traits.model})

    @property
    def known(self) -> Server:
        """Return what is known about the server, with the traits given to the fleet."""
        return self.traits.apply(self.backend.servers[""], self.backend.capabilities.default_inflight, self.found)

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

    def forget_loop(self) -> None:
        """Drop the state of a closed event loop."""
        self.entered, self.inflight, self._entering = False, 0, asyncio.Lock()
