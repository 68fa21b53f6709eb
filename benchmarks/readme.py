"""``python -m benchmarks.readme``: writes what was measured last (``results/``) into README.md, between two marks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
NAMES = (
    "throughput",
    "scheduler",
    "ending",
    "outages",
    "streaming",
    "startup",
    "gpu",
    "people",
    "capacity",
    "fleet",
    "at_scale",
    "cluster",
    "cluster-linear",
    "cluster-processes",
    "cluster-record",
    "cluster-memory",
    "gateway",
    "serve",
    "ticks",
    "reduce",
    "contexts",
    "batching",
    "prewarm",
    "memory",
    "growth",
    "embedded",
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "| --- |" + " ---: |" * (len(header) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def where(env: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items())
    return (
        f"{env['date'][:10]}, commit {env['commit']}, {env['cpu']}, {env['cores']} cores, {env['kernel']}, "
        f"Python {env['python']}, {packages}; load {env['load_before']} when it began."
    )


def bars(result: dict[str, Any]) -> Iterator[str]:
    rows = (
        (bar["name"], f"{bar['measured']:.2f}", bar["bar"].replace("<=", "≤").replace(">=", "≥"), _met(bar["met"]))
        for bar in result["bars"]
    )
    yield from markdown(("bar", "measured", "allowed", ""), rows)


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def contenders(result: dict[str, Any]) -> Iterator[str]:
    """CPU per turn and agents per second of everyone, where more than the baseline was measured."""
    works = [item for item in result["measurements"] if len(item.get("contenders", ())) > 2]
    if not works:
        return
    names = list(works[0]["contenders"])
    yield from ("", "µs of CPU per turn; agents per second. In brackets: how many times ours its CPU is.", "")
    yield from markdown(("work", *names), ((work["work"], *_cells(work["contenders"], names)) for work in works))


def _cells(costs: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in costs:
            yield "not done"
            continue
        cpu, rate = costs[name]["cpu_per_turn_s"]["median"], costs[name]["agents_per_second"]["median"]
        yield f"{cpu * 1e6:,.0f} µs ({costs[name]['cpu_over_ours']:.1f}); {rate:,.0f}/s"


def section(name: str) -> Iterator[str]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return
    result = json.loads(path.read_text())
    yield from ("", f"### {name}", "", where(result["environment"]), "")
    yield from bars(result)
    if name == "throughput":
        yield from contenders(result)
    if name == "embedded":
        yield from ("", "Tokens per second.", "")
        speeds = [(f"{item['agents']} agents", item["tokens_per_second"]) for item in result["measurements"]]
        yield from markdown(("", *speeds[0][1]), ((what, *(f"{n:.0f}" for n in of.values())) for what, of in speeds))


def main() -> None:
    before, rest = README.read_text().split(BEGIN)
    after = rest.split(END)[1]
    measured = "\n".join(line for name in NAMES for line in section(name))
    README.write_text(f"{before}{BEGIN}\n{measured}\n\n{END}{after}")


if __name__ == "__main__":
    main()
