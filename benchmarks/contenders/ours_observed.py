"""``BatchAgent.run`` that is watched: OBSERVED names by what, ``prometheus``, ``opentelemetry`` or both.

The page of a run (``view=True``) would be one more name here: it needs a run directory, and is measured by itself in
``benchmarks.view``.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.contenders import ours
from benchmarks.workload import Review, Work, contend

WATCHERS: dict[str, dict[str, Any]] = {
    "prometheus": {"metrics_port": int(os.environ.get("METRICS_PORT", "0"))},
    "opentelemetry": {"telemetry": True},
}


async def run(work: Work) -> list[Review]:
    options: dict[str, Any] = {}
    for name in os.environ["OBSERVED"].split():
        options |= WATCHERS[name]
    return await ours.run(work, **options)


if __name__ == "__main__":
    contend(run)
