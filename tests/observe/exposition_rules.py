"""Prometheus's text format as its own parser reads it, and promtool where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict

SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\]|\\["\\n])*",?)+)\})? (\S+)$')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\["\\n])*)"')


def read_page(text: str) -> dict[str, dict[str, float]]:
    """The values by name and labels. Fails on anything that a strict parser would refuse."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    helped: set[str] = set()
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped, f"{name} comes twice"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped and name not in types
            types[name] = kind
        else:
            match = SAMPLE.match(line)
            assert match, line
            name, labels, value = match[1], match[2] or "", float(match[3])
            family = re.sub("_(bucket|sum|count)$", "", name)
            family = family if types.get(family) == "histogram" else name
            assert family == [*types][-1], f"{line} is not below its own header"
            assert labels not in values[name], f"{line} comes twice"
            if types[family] == "counter":
                assert name.endswith("_total"), name
            values[name][labels] = value
    _check_histograms(types, values)
    assert all(name.startswith("batch_agent_") for name in types)
    return dict(values)


def _check_histograms(types: dict[str, str], values: dict[str, dict[str, float]]) -> None:
    for name, kind in types.items():
        if kind != "histogram":
            continue
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for labels, count in values[f"{name}_bucket"].items():
            found = dict(LABEL.findall(labels))
            rest = ",".join(f'{key}="{value}"' for key, value in found.items() if key != "le")
            series[rest].append((float(found["le"]), count))
        for rest, buckets in series.items():
            assert buckets == sorted(buckets) and buckets[-1][0] == float("inf")
            assert buckets[-1][1] == values[f"{name}_count"][rest]
            assert rest in values[f"{name}_sum"]


def promtool(*arguments: str, text: str = "") -> str | None:
    """What promtool complains about; None where it is not installed."""
    if (program := shutil.which("promtool")) is None:
        return None
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, check=False)
    return done.stdout * bool(done.returncode) + done.stderr if done.returncode else ""
