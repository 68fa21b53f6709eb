"""The parts of scheduling by an engine's KV cache. Each can be switched on and off alone.

``kvflow="auto"`` enables the parts with a measured gain (docs/kv.md), ``True`` all of them, ``False`` none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class KvParts:
    admission: bool = True  # an agent whose context does not fit waits
    order: bool = True  # among ready agents, those whose context is probably still cached go first
    touch: bool = False  # an evicted context is computed again while the agent's tool runs
    keep_alive: bool = False  # the shared prefix is touched while all agents wait for tools and others use the engine
    pin: bool = False  # engines that support it keep the contexts of agents that wait for tools

    @classmethod
    def of(cls, kvflow: bool | Literal["auto"]) -> Self:
        """Return the parts that a value of the option ``kvflow`` enables."""
        return cls() if kvflow == "auto" else cls(*(5 * [kvflow]))

    @property
    def any(self) -> bool:
        return self.admission or self.order or self.touch or self.keep_alive or self.pin
