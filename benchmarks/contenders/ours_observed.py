"""``BatchAgent.run`` that is watched: OBSERVED names by what, of ``page``, ``prometheus`` and ``opentelemetry``.

The page needs a run directory. Another process serves it: its CPU is measured in ``benchmarks.view``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders import ours
from benchmarks.workload import Review, Work, contend

WATCHERS: dict[str, dict[str, Any]] = {
    "page": {"view": True},
    "prometheus": {"metrics_port": int(os.environ.get("METRICS_PORT", "0"))},
    "opentelemetry": {"telemetry": True},
}


async def run(work: Work) -> list[Review]:
    options: dict[str, Any] = {}
    for name in os.environ["OBSERVED"].split():
        options |= WATCHERS[name]
    with tempfile.TemporaryDirectory() as directory:
        return await ours.run(work, Path(directory) if "view" in options else None, **options)


if __name__ == "__main__":
    contend(run)
