"""``batch-agent serve``: the batch APIs of OpenAI and Anthropic, and interactive requests, in front of any backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 8787
GB = 1024**3
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """A target for the latency of interactive requests: ``percentile`` of 100 requests take at most ``times`` as long
    as on an idle engine."""

    times: float
    percentile: int = 50

    def __str__(self) -> str:
        return f"{self.times:g}" if self.percentile == 50 else f"p{self.percentile} {self.times:g}"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of a server. ``interactive_latency`` is the target; a number means the median, None no target. Times
    are in seconds."""

    data: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    max_lines: int = 1_000_000
    reserve: int = GB
    keep: float = 30 * DAY
    anthropic_window: float = DAY
    interactive_latency: float | LatencyTarget | None = 2.5
    max_inflight: int | None = None
    shared: bool = False  # several processes serve the same data
    store: str = ""  # URL of the Redis server that has the runs of batches; implies ``shared``
    outage_patience: float = 60.0  # that interactive requests wait out an outage; then they get 503
    drain: float = 5.0  # for answers and lines in flight, when the server is stopped
    now: Callable[[], float] = time.time
    elapsed: Callable[[], float] | None = (
        None  # real time; None: that of the system, or ``now`` if that is not the clock
    )
