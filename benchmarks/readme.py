"""``python -m benchmarks.readme``: writes what was measured last (``results/``) into the pages that show numbers.

Each page has a place between two marks. ``--check`` writes nothing, and fails if a page differs from the files.
``--release`` also fails if a number of the project's README is older than the code that it measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import HEADLINES, RESULTS, stale

ROOT = Path(__file__).parent.parent
END = "<!-- end of measured -->"
TARGETS = ("p95 3", "p95 2")  # of people's latency, in the project's README
NAMES = (
    "throughput",
    "scheduler",
    "ending",
    "outages",
    "streaming",
    "startup",
    "gpu",
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


def everything() -> Iterator[str]:
    for name in NAMES:
        yield from section(name)


def read(name: str) -> dict[str, Any]:
    """Return a results file; empty if nothing was measured."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def bar(result: Mapping[str, Any], name: str) -> str:
    return next((f"{each['measured']:.2f}" for each in result["bars"] if each["name"].startswith(name)), "not measured")


def headlines() -> Iterator[str]:
    rows = []
    if costs := read("throughput"):
        whole, recorded, streamed = (
            bar(costs, f"CPU per turn, {what}")
            for what in (
                "batch_agent/loop: 2,000 agents, 2 turns",
                "batch_agent, recorded/loop",
                "batch_agent/loop: 2,000 agents, 2 turns, streamed",
            )
        )
        what = "CPU per turn, relative to a hand-written aiohttp loop without these features (lower is better)"
        said = f"{streamed} streamed, {whole} not streamed, {recorded} with every turn recorded"
        rows.append((what, said, "`python -m benchmarks.throughput`", costs))
    for engine, label in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if found := read(f"kv-{engine}"):
            faster = [f"{each['measured']:.2f}" for each in found["bars"] if "the loop over ours" in each["name"]]
            server = found["environment"]["server"]
            number = "two workloads" if len(faster) > 1 else "one workload"
            what = (
                "speed with a KV cache that is smaller than the agents' contexts, relative to a plain loop "
                f"({number}; {found['environment']['accelerator']}, {label} {server['version']}, "
                "random weights of the size of Qwen2.5-32B)"
            )
            rows.append((what, f"{' and '.join(faster)} times faster", "`make numbers-gpu`", found))
    if (found := read("people-vllm")) and "long" in found["measurements"]:
        env, scenes = found["environment"], found["measurements"]["long"]
        what = (
            "interactive requests while `batch-agent serve` works on a batch, five per second "
            f"({env['accelerator']}, vLLM {env['server']['version']}, the size of Qwen2.5-7B): 95th percentile of "
            "their latency, relative to an idle engine; and the throughput of the batch, relative to that without them"
        )
        held = [f"{scenes[name]['p95_over_idle']:.2f} and {scenes[name]['over_alone']:.2f}" for name in TARGETS]
        said = "; ".join(f"{each} with the target `{name}`" for each, name in zip(held, TARGETS, strict=True))
        rows.append((what, said, "`make numbers-gpu`", found))
    if found := read("peers"):
        own, *others = found["measurements"]["peers"]
        cpu = sorted(each["cpu_ms_per_turn"] / own["cpu_ms_per_turn"] for each in others)
        lost = sorted(each["rows_lost_in_outage"] for each in others if each["rows_lost_in_outage"] is not None)
        agents, command = found["measurements"]["agents"], "`make bench-peers`"
        what = "CPU per turn of the same work in eight other packages, relative to ours with every turn recorded"
        rows.append((what, f"{cpu[0]:.0f} to {cpu[-1]:.0f} times as much", command, found))
        what = f"rows lost of {agents} while the server is away for 12 s: ours; theirs"
        rows.append((what, f"{own['rows_lost_in_outage']:.0f}; {lost[0]:.0f} to {lost[-1]:.0f}", command, found))
    if found := read("at_scale"):
        said = f"{bar(found, 'simulated: throughput over the ideal')} of the ideal throughput"
        rows.append(
            ("one million agents on 1,000 endpoints, simulated", said, "`python -m benchmarks.at_scale`", found)
        )
    yield from markdown(
        ("what", "measured", "command", "date"),
        ((what, said, command, result["environment"]["date"][:10]) for what, said, command, result in rows),
    )


def peers() -> Iterator[str]:
    """The same work in other packages."""
    result = read("peers")
    agents = result["measurements"]["agents"]
    yield from (where(result["environment"]), "")
    rows = []
    for each in result["measurements"]["peers"]:
        again = each["requests_paid_again"]
        times = f"{each['cpu_ms_per_turn']:.2f} ms", f"{each['wall_s']:.1f} s", f"{each['first_result_s']:.1f} s"
        lost = (
            "not measured" if each["rows_lost_in_outage"] is None else f"{each['rows_lost_in_outage']:.0f} of {agents}"
        )
        repeated = "not measured" if again is None else f"{again:.0f} of {each['turns'] * agents:,}"
        rows.append((f"{each['peer']} {each['version']}".strip(), *times, lost, repeated))
    header = (
        "CPU per turn",
        "wall time",
        "first result",
        "rows lost in a 12 s outage",
        "requests repeated after kill -9",
    )
    yield from markdown(("package", *header), rows)


def of_engines() -> Iterator[str]:
    """The two workloads whose contexts do not fit, on real engines."""
    rows = []
    for engine, label in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if not (found := read(f"kv-{engine}")):
            continue
        env = found["environment"]
        yield f"{label} {env['server']['version']} on {env['accelerator']}, {env['date'][:10]}, commit {env['commit']}."
        for work, by_variant in of_works(found["measurements"]).items():
            loop = next((variant for variant in by_variant if variant.startswith("loop")), "")
            if not loop or "ours" not in by_variant:
                continue  # only one of both was measured
            plain, mine = (statistics.median(by_variant[variant]["seconds"]) for variant in (loop, "ours"))
            jobs = [statistics.median(by_variant[variant]["seconds_per_job"]) for variant in (loop, "ours")]
            each = [", ".join(f"{one:.1f}" for one in by_variant[variant]["seconds"]) for variant in (loop, "ours")]
            mean = f"{jobs[0]:.1f}; {jobs[1]:.1f}"
            rows.append((f"{label}, {work}", *each, f"{plain / mine:.2f}", mean))
    if rows:
        yield ""
    header = ("workload", "plain loop", "default", "times faster", "mean seconds per job: loop; default")
    yield from markdown(header, rows)


def of_people() -> Iterator[str]:
    """Latency of people against the throughput of the batch beside them, on real engines."""
    for engine, label in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if not (found := read(f"people-{engine}")):
            continue
        env = found["environment"]
        yield f"{label} {env['server']['version']} on {env['accelerator']}, {env['date'][:10]}, commit {env['commit']}."
        yield ""
        rows = []
        for mix, scenes in found["measurements"].items():
            for name, scene in scenes.items():
                if "over_alone" not in scene or "p95_over_idle" not in scene or name == "idle":
                    continue
                first = scenes.get(f"{name}, first", {}).get("p95_over_idle")
                times = f"{scene['median_over_idle']:.2f}", f"{scene['p95_over_idle']:.2f}"
                what = f"plain loop, {name.removeprefix('loop ')} lines" if name.startswith("loop") else f"`{name}`"
                at_first = "" if first is None else f"{first:.2f}"
                rows.append((f"{mix}: {what}", *times, at_first, f"{scene['over_alone']:.2f}"))
        header = ("prompts: target", "median", "95th percentile", "the same, first 20 s", "batch")
        yield from markdown(header, rows)
        yield ""


def of_simulated() -> Iterator[str]:
    result = read("kv-simulated")
    env = result["environment"]
    yield f"{env['date'][:10]}, commit {env['commit']}."
    yield ""
    rows = []
    for work, by_variant in of_works(result["measurements"]).items():
        loops = {variant: of["seconds"][0] for variant, of in by_variant.items() if variant.startswith("loop ")}
        all_at_once = next(iter(loops))
        best = min((seconds, variant) for variant, seconds in loops.items())
        few = f"{best[0]:.1f} ({best[1].removeprefix('loop ')})" if len(loops) > 1 else ""
        mine, tokens = by_variant["ours"]["seconds"][0], by_variant["ours"]["recomputed_tokens"][0]
        off = by_variant["off"]["seconds"][0]
        ttl, pinned = (by_variant[variant]["seconds"][0] for variant in ("ttl", "ours+pin"))
        jobs = "; ".join(f"{by_variant[variant]['seconds_per_job'][0]:.1f}" for variant in ("ttl", "ours"))
        default = f"{mine:.1f} ({tokens / 1000:.0f}k)"
        rows.append(
            (work, f"{loops[all_at_once]:.1f}", few, f"{ttl:.1f}", f"{off:.1f}", default, f"{pinned:.1f}", jobs)
        )
    names = (
        "plain loop",
        "best static number",
        "CacheTTL",
        "`kvflow=False`",
        "default (recomputed tokens)",
        "with pins",
    )
    yield from markdown(("workload", *names, "mean seconds per job: CacheTTL; default"), rows)


def of_works(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the numbers of each variant of each work, in the order of the file."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for line in lines:
        of = found.setdefault(line["work"], {}).setdefault(line["variant"], {})
        for name in ("seconds", "seconds_per_job", "recomputed_tokens"):
            of.setdefault(name, []).append(line[name])
    return found


# Each place in a page: its mark, and what stands there.
PLACES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "benchmarks/README.md": {"<!-- measured -->": everything, "<!-- measured: peers -->": peers},
    "README.md": {"<!-- measured: headlines -->": headlines},
    "docs/serve.md": {"<!-- measured: people -->": of_people},
    "docs/kv.md": {"<!-- measured: engines -->": of_engines, "<!-- measured: simulated -->": of_simulated},
}


def filled(page: str, text: str) -> str:
    """Return the page with the numbers of the files."""
    for begin, lines in PLACES[page].items():
        before, rest = text.split(begin)
        after = rest.split(END, 1)[1]
        text = f"{before}{begin}\n" + "\n".join(lines()).strip("\n") + f"\n\n{END}{after}"
    return text


def differing() -> list[str]:
    return [page for page in PLACES if filled(page, text := (ROOT / page).read_text()) != text]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description="Numbers of pages from files.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs from the files")
    parser.add_argument("--release", action="store_true", help="the same, and fail if a number of README is old")
    options = parser.parse_args()
    if not options.check and not options.release:
        for page in PLACES:
            (ROOT / page).write_text(filled(page, (ROOT / page).read_text()))
    failed = [f"{page} does not have the numbers of the files: python -m benchmarks.readme" for page in differing()]
    for name, date in stale().items():
        said = f"{name} ({date}) is older than the code that it measures"
        if options.release and name in HEADLINES:
            failed.append(f"{said}, and a headline of README.md: make numbers, make numbers-gpu or make bench-peers")
        else:
            print(said)
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
