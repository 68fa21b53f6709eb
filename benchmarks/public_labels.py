"""The walk of docs/jobs/trusted_labels.md on a public set: four intents of Snips, 400 rows, with two fields of gold.

    git clone --depth 1 https://github.com/snipsco/nlu-benchmark
    python -m benchmarks.public_labels nlu-benchmark

The data (CC0; the authors ask to be cited: Coucke et al., 2018) is not part of this project. Two prompts are tried on a
pilot of the same 100 rows, and each runs on all rows then. ``intent`` is a choice, and ``slot`` the words of the first
slot of the query, so that a text is scored too. The bar is that what a pilot says is true: of 1,000 other pilots, drawn
from the same answers by other keys, 95 % have an interval that covers the accuracy of all rows. One pilot proves
nothing: that of the usual key has 36 rows of the easiest intent, where 25 are expected, and its interval misses.
Needs the extra local; other backends with ``--backend``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from batch_agent import BatchAgent, Results
from batch_agent.trust.intervals import share
from batch_agent.trust.order import KeyedOrder
from benchmarks import report

INTENTS = ("AddToPlaylist", "BookRestaurant", "GetWeather", "RateBook")
FOLDER = "2017-06-custom-intent-engines"
SCHEMA = {"intent": "|".join(INTENTS), "slot": "text"}
SHOWN = """You read requests to an assistant.
"add this tune to my jogging playlist" {"intent": "AddToPlaylist", "slot": "tune"}
"a table for two at an Italian place in Rome" {"intent": "BookRestaurant", "slot": "two"}
"will it rain in Oslo tomorrow" {"intent": "GetWeather", "slot": "Oslo"}
"four stars for this novel" {"intent": "RateBook", "slot": "four"}"""
PROMPTS: dict[str, dict[str, str]] = {
    "plain": {"task": 'Intent of the request, and the first detail in it: "{text}"'},
    "shown": {"task": '"{text}"', "system_prompt": SHOWN},
}
PILOT, PILOTS = 100, 1000


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the 400 rows in an order that says nothing. ``slot`` is empty where a query has none."""
    rows = []
    for intent in INTENTS:
        path = folder / FOLDER / intent / f"validate_{intent}.json"
        for number, each in enumerate(json.loads(path.read_bytes().decode("utf-8", "replace"))[intent]):
            text = "".join(part["text"] for part in each["data"]).strip()
            slot = next((part["text"].strip() for part in each["data"] if "entity" in part), "")
            rows.append({"id": f"{intent}-{number}", "text": text, "intent": intent, "first": slot})
    random.Random(1).shuffle(rows)
    return rows


def run(rows: list[dict[str, str]], backend: str, **options: Any) -> Results[Any]:
    return BatchAgent.run_sync(
        inputs=rows,
        output_schema=SCHEMA,
        backend=backend,
        temperature=0,
        max_tokens=60,
        gold={"intent": "intent", "slot": "first"},
        gold_sample="random",
        **options,
    )


def coverage(results: Results[Any], field: str, truth: float, with_slot: set[str]) -> float:
    """Return the share of pilots, each of another key, whose interval covers the accuracy of all rows."""
    wrong = {row.name for row in results.score(wrong=True).wrong or () if field in row.fields}
    scored = [result.job_id for result in results if field == "intent" or result.job_id in with_slot]
    found = 0
    for key in range(PILOTS):
        drawn = KeyedOrder(f"pilot {key}").first(scored, PILOT)
        right = sum(scored[place] not in wrong for place in drawn)
        low, high = share(right, PILOT, len(scored)).interval
        found += low - 1e-9 <= truth <= high + 1e-9
    return found / PILOTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public_labels", description=__doc__)
    parser.add_argument("folder", type=Path, help="the clone of snipsco/nlu-benchmark")
    parser.add_argument("--backend", default="local://smollm2")
    options = parser.parse_args()
    env, rows, lines, bars = report.environment(), rows_of(options.folder), list[tuple[str, ...]](), list[report.Bar]()
    measured: dict[str, object] = {"rows": len(rows), "backend": options.backend}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        for name, prompt in PROMPTS.items():
            place = Path(folder) / name
            pilot = run(rows, options.backend, run_dir=place, pilot=PILOT, pilot_only=True, **prompt).score()
            results = run(rows, options.backend, run_dir=place, resume=True, **prompt)
            whole = results.score()
            measured[name] = {"pilot": pilot.to_json(), "all": whole.to_json()}
            for field in ("intent", "slot"):
                interval, truth = pilot[field].interval, whole[field].accuracy
                assert interval is not None and truth is not None
                covered = coverage(results, field, truth, {row["id"] for row in rows if row["first"]})
                bars.append(report.Bar(f"{name}, {field}: pilots whose interval covers all rows", covered, ">=", 0.93))
                shown = f"{interval.low:.2f} to {interval.high:.2f}"
                lines.append((f"{name}, {field}", f"{pilot[field].accuracy:.2f}", shown, f"{truth:.2f}"))
    print(report.table(("prompt, field", "pilot", "interval", "all rows"), lines), "\n")
    return report.finish("public_labels", env, bars, measured)


if __name__ == "__main__":
    sys.exit(main())
