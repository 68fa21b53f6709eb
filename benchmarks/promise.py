"""Does a promise about a table hold, and what does it cost people? On simulated tables, so any machine does.

``python -m benchmarks.promise [PART …]``. ``kept`` signs 1,000 tables in each of 12 settings, with the truth just above
the bar, looks after each row and random kills, and counts the tables that are signed and broken. ``broken`` does the
same with methods that are wrong: each must break the promise, else the bar measures nothing. ``people`` counts the
judgements that a promise costs, and ``model`` the rows that a large model gets; ``left`` looks how often the 80 %
interval of the judgements left holds. Doubts are normal, with the AUROC of the setting; people are right, and
repaired rows count as wrong with the error that the promise assumes of people.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from batch_agent.trust.anytime import refuted
from batch_agent.trust.forecast import interval, plan
from batch_agent.trust.intervals import finite
from batch_agent.trust.promise import (
    FIXED_GRID,
    PEOPLE_ERROR,
    Promise,
    Tables,
    Walk,
    band,
    first_step,
    grid,
    outcomes_in_order,
    read_promise,
)
from benchmarks import report

NORMAL = NormalDist()
PROMISE = read_promise("label.accuracy >= 0.96")
TABLES, OF_PEOPLE, OVERLAP = 1000, 200, 0.1
NOISE = 0.02  # of the share of 1,000 tables
MOST_LOOKS = 4000  # rows of the audit of one table, one look after each
PARTS = ("kept", "broken", "people", "model", "left")


class Setting(NamedTuple):
    accuracy: float
    auroc: float
    rows: int


SETTINGS = (
    Setting(0.80, 0.60, 300),
    Setting(0.80, 0.82, 3_000),
    Setting(0.80, 0.90, 1_000),
    Setting(0.85, 0.75, 1_000),
    Setting(0.85, 0.90, 20_000),
    Setting(0.90, 0.60, 3_000),
    Setting(0.90, 0.82, 1_000),
    Setting(0.90, 0.90, 300),
    Setting(0.94, 0.75, 3_000),
    Setting(0.94, 0.82, 20_000),
    Setting(0.97, 0.60, 1_000),
    Setting(0.97, 0.90, 3_000),
)
COSTS = tuple(
    Setting(accuracy, auroc, rows)
    for accuracy in (0.80, 0.85, 0.90, 0.94, 0.97)
    for auroc in (0.82, 0.90)
    for rows in (3_000, 20_000)
)


@dataclass(slots=True)
class Table:
    """A table in the order of its audit: the doubt of each row, and whether its answer is wrong."""

    doubts: list[float]
    wrong: list[bool]
    thresholds: tuple[float, ...]
    bands: list[int]

    @classmethod
    def of(cls, setting: Setting, draw: random.Random) -> Table:
        apart = NORMAL.inv_cdf(setting.auroc) * math.sqrt(2)  # two normal distributions with this AUROC
        wrong = [draw.random() > setting.accuracy for _ in range(setting.rows)]
        doubts = [NORMAL.cdf(draw.gauss(apart * each, 1) / 1.5) for each in wrong]
        thresholds = grid(doubts)
        return cls(doubts, wrong, thresholds, [band(thresholds, doubt) for doubt in doubts])

    def tables(self, promise: Promise = PROMISE, error: float = PEOPLE_ERROR, *, by_people: bool = True) -> Tables:
        counts = [0] * (len(self.thresholds) + 1)
        for each in self.bands:
            counts[each] += 1
        return Tables.of_bands(promise, counts, error, by_people=by_people)

    def kept_wrong(self, place: int) -> int:
        return sum(wrong and each <= place for wrong, each in zip(self.wrong, self.bands, strict=True))

    def first_broken(self, most: Sequence[int]) -> int:
        """Return the first threshold whose table does not keep the promise, or their number."""
        counts = [0] * (len(self.thresholds) + 1)
        for wrong, each in zip(self.wrong, self.bands, strict=True):
            counts[each] += wrong
        found = 0
        for place, allowed in enumerate(most):
            found += counts[place]
            if found > allowed >= 0:
                return place
        return len(most)

    def just_above(self, draw: random.Random) -> int:
        """Change answers until the first broken table is just above the bar. Returns its threshold."""
        most = self.tables().most()
        place = self.first_broken(most)
        if place == len(most):  # every table keeps the promise: more answers are wrong
            place -= 1
            right = [row for row, wrong in enumerate(self.wrong) if not wrong and self.bands[row] <= place]
            for row in draw.sample(right, most[place] + 1 - self.kept_wrong(place)):
                self.wrong[row] = True
            return self.first_broken(most)
        own = [row for row, wrong in enumerate(self.wrong) if wrong and self.bands[row] == place]
        for row in draw.sample(own, min(len(own) - 1, self.kept_wrong(place) - most[place] - 1)):
            self.wrong[row] = False
        return place


def signed_and_broken(job: tuple[Setting, int]) -> tuple[bool, bool]:
    """Return whether a table is signed at a threshold that breaks the promise, at any look; and whether a session that
    was killed decided the same from what it had recorded."""
    setting, seed = job
    draw = random.Random(f"kept {setting} {seed}")
    table = Table.of(setting, draw)
    broken = table.just_above(draw)
    tables = table.tables()
    walk, kills = Walk(tables), {draw.randrange(min(MOST_LOOKS, setting.rows)) for _ in range(2)}
    for row in range(min(MOST_LOOKS, setting.rows)):
        walk.add(table.bands[row], wrong=table.wrong[row])
        if row in kills:  # the next session replays the record
            again = Walk(tables)
            for earlier in range(row + 1):
                again.add(table.bands[earlier], wrong=table.wrong[earlier])
            if (again.passed, again.wrong) != (walk.passed, walk.wrong):
                return False, False
            walk = again
        if walk.passed is not None and walk.passed >= broken:
            return True, True
    return False, True


def kept(tables: int, pool: ProcessPoolExecutor) -> tuple[list[report.Bar], object]:
    shares: dict[str, float] = {}
    same = True
    for setting in SETTINGS:
        found = [*pool.map(signed_and_broken, [(setting, seed) for seed in range(tables)], chunksize=20)]
        shares[_named(setting)] = sum(each for each, _ in found) / tables
        same = same and all(each for _, each in found)
    worst = max(shares, key=lambda name: shares[name])
    few = "" if tables == TABLES else " (few tables, so much noise)"
    return [
        report.Bar(
            f"signed and broken, {tables:,} tables in each of {len(shares)} settings{few}", _mean(shares), "<=", 0.05
        ),
        report.Bar(f"signed and broken, worst setting ({worst})", shares[worst], "<=", 0.05 + NOISE),
        report.Bar("decisions that a kill changed", 0 if same else 1, "<=", 0),
    ], shares


# What is wrong. Each variant returns whether it signs a table that is just above the bar.


def fixed_bound(draw: random.Random) -> bool:
    """An exact bound for a fixed number of rows, looked at after each row."""
    table = Table.of(Setting(0.90, 0.82, 1_000), draw)
    place = table.just_above(draw)
    most, found = table.tables().most()[place], 0
    for row in range(600):
        found += table.wrong[row] and table.bands[row] <= place
        if row >= 20 and 1_000 * (1 - finite(1 + row - found, 1 + row, 1_000, 0.9).low) <= most:
            return True
    return False


def chosen_after(draw: random.Random) -> bool:
    """A threshold for each of 20 classes, chosen by the rows that prove them: below the first audited rows that are
    wrong, as far as a bound on the same rows allows."""
    rows, seen, classes = 3_000, 400, 20
    table = Table.of(Setting(0.80, 0.75, rows), draw)
    of = [draw.randrange(classes) for _ in range(rows)]
    most = math.floor(PROMISE.most_wrong(rows))
    few = max(found for found in range(seen) if rows * (1 - finite(seen - found, seen, rows, 0.9).low) <= most)
    ladders = [
        sorted(table.doubts[row] for row in range(seen) if table.wrong[row] and of[row] == each)
        for each in range(classes)
    ]
    steps = [0] * classes  # wrong rows that a class may have below its threshold
    for _ in range(few):
        gains = [_gain(ladder, step) for ladder, step in zip(ladders, steps, strict=True)]
        steps[gains.index(max(gains))] += 1
    limits = [ladder[step] if step < len(ladder) else 1.0 for ladder, step in zip(ladders, steps, strict=True)]
    return sum(table.wrong[row] and table.doubts[row] < limits[of[row]] for row in range(rows)) > most


def _gain(ladder: Sequence[float], step: int) -> float:
    """Return by how much the threshold of a class grows if one more wrong row may be below it."""
    own = [*ladder, 1.0]
    return own[step + 1] - own[step] if step + 1 < len(own) else 0.0


def _signs(table: Table, broken: int, rows: Sequence[int]) -> bool:
    """Return whether an audit of these rows, in their order, signs what is broken."""
    walk = Walk(table.tables())
    for row in rows:
        walk.add(table.bands[row], wrong=table.wrong[row])
        if walk.passed is not None and walk.passed >= broken:
            return True
    return False


def first_rows(draw: random.Random) -> bool:
    """The first rows of the file are the audit. Rows get harder."""
    table = Table.of(Setting(0.94, 0.82, 1_000), draw)
    broken = table.just_above(draw)
    file = sorted(range(1_000), key=lambda row: draw.random() + table.wrong[row])
    return _signs(table, broken, file[:500])


def _audit_that(ours: bool, draw: random.Random, state: Callable[[bool], str]) -> bool:
    """Return whether an audit signs a broken table, of which only some rows can be counted now. ``ours`` waits at the
    first of the others; the wrong audit passes over them."""
    table = Table.of(Setting(0.94, 0.82, 1_000), draw)
    broken = table.just_above(draw)
    states = [state(wrong) for wrong in table.wrong]
    if not ours:
        return _signs(table, broken, [row for row in range(600) if states[row] == "judged"])
    judged = (
        None if states[row] == "open" else (table.bands[row], table.wrong[row] or states[row] == "given up")
        for row in range(600)
    )
    walk = Walk(table.tables())
    for each, wrong in outcomes_in_order(judged):
        walk.add(each, wrong=wrong)
        if walk.passed is not None and walk.passed >= broken:
            return True
    return False


def unfinished(draw: random.Random, *, ours: bool = False) -> bool:
    """Rows that are not finished are passed over. Slow rows are wrong."""
    return _audit_that(ours, draw, lambda wrong: "open" if wrong and draw.random() < 0.5 else "judged")


def skipped(draw: random.Random, *, ours: bool = False) -> bool:
    """Rows that people have skipped twice are passed over. Hard rows are skipped."""
    return _audit_that(ours, draw, lambda wrong: "given up" if wrong and draw.random() < 0.5 else "judged")


def failed(draw: random.Random, *, ours: bool = False) -> bool:
    """Failed rows are left out: of 1,000 rows 30 failed, and of the others just as many are wrong as may be."""
    rows = 1_000
    most = math.floor(PROMISE.most_wrong(rows))
    places = ["failed"] * 30 + ["wrong"] * (most - 29) + ["right"] * (rows - most - 1)
    draw.shuffle(places)
    counted = places if ours else [each for each in places if each != "failed"]
    found, bad = 0, math.floor(PROMISE.most_wrong(len(counted))) + 1
    for seen, each in enumerate(counted[:600], 1):
        found += each != "right"
        if refuted(bad, found, seen, len(counted), PROMISE.prior_b):
            return True
    return False


BROKEN: Mapping[str, Callable[[random.Random], bool]] = {
    "a fixed-n bound, looked at after each row": fixed_bound,
    "thresholds chosen after the audit and proved on it": chosen_after,
    "the first rows as audit": first_rows,
    "unfinished rows passed over": unfinished,
    "skipped rows passed over": skipped,
    "failed rows left out": failed,
}


def _broken(job: tuple[str, int]) -> bool:
    name, seed = job
    return BROKEN[name](random.Random(f"{name} {seed}"))


def _right(job: tuple[str, int]) -> bool:
    name, seed = job
    does = {"unfinished rows": unfinished, "skipped rows": skipped, "failed rows": failed}[name]
    return does(random.Random(f"{name} {seed}"), ours=True)


def broken(tables: int, pool: ProcessPoolExecutor) -> tuple[list[report.Bar], object]:
    bars, shares = list[report.Bar](), dict[str, float]()
    for name in BROKEN:
        share = sum(pool.map(_broken, [(name, seed) for seed in range(tables)], chunksize=10)) / tables
        shares[name] = share
        bars.append(report.Bar(f"broken: {name}: signed and broken", share, ">=", 0.05 + NOISE + 0.01))
    for name in ("unfinished rows", "skipped rows", "failed rows"):
        share = sum(pool.map(_right, [(name, seed) for seed in range(tables)], chunksize=10)) / tables
        shares[f"ours: {name}"] = share
        bars.append(report.Bar(f"the same tables, as we count {name}: signed and broken", share, "<=", 0.05 + NOISE))
    return bars, shares


# What it costs


def judgements(table: Table) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the rows that people judge until the promise holds, and the interval of what is left at some looks."""
    rows = len(table.bands)
    walk, first = Walk(table.tables()), first_step(PROMISE, None)
    look = decide = min(first, rows)
    looks: list[tuple[int, int, int]] = []
    for row in range(rows):
        walk.add(table.bands[row], wrong=table.wrong[row])
        if walk.drawn >= look:
            looks.append((walk.drawn, *interval(walk, walk.seen)))
            look = math.ceil(1.5 * walk.drawn)
        if walk.drawn >= decide:
            found = plan(walk, walk.seen)
            if found.audit == 0:
                return walk.drawn + found.repair, looks
            decide = walk.drawn + max(1, min(found.audit, walk.drawn // 20))
    return rows, looks


def corrected(table: Table) -> int:
    """Return the rows that people judge if they correct rows in key order until the same bound holds."""
    rows, found = len(table.bands), 0
    allowed = float(PROMISE.most_wrong(rows))
    for seen in range(1, rows + 1):
        found += table.wrong[seen - 1]
        most = math.floor(allowed - PEOPLE_ERROR * seen + found)  # those that were found are right now
        if refuted(most + 1, found, seen, rows, PROMISE.prior_b):
            return seen
    return rows


def _cost(job: tuple[Setting, int]) -> tuple[float, float, list[bool]]:
    setting, seed = job
    table = Table.of(setting, random.Random(f"people {setting} {seed}"))
    ours, looks = judgements(table)
    holds = [low <= ours - at <= high for at, low, high in looks]
    return ours * (1 + OVERLAP), corrected(table) * (1 + OVERLAP), holds


def costs(tables: int, pool: ProcessPoolExecutor) -> Mapping[Setting, list[tuple[float, float, list[bool]]]]:
    each = max(1, tables // 4)  # of a setting: 200 tables for each accuracy
    return {setting: [*pool.map(_cost, [(setting, seed) for seed in range(each)], chunksize=5)] for setting in COSTS}


def people(found: Mapping[Setting, list[tuple[float, float, list[bool]]]]) -> tuple[list[report.Bar], object]:
    shares = {
        _named(setting): fmean(each[0] for each in some) / fmean(each[1] for each in some)
        for setting, some in found.items()
    }
    bars = []
    for accuracy, limit in ((0.80, 0.75), (0.85, 0.75), (0.90, 0.6), (0.94, 0.6), (0.97, 0.8)):
        own = [shares[_named(setting)] for setting in found if setting.accuracy == accuracy]
        bars.append(
            report.Bar(f"people's judgements over corrected rows, accuracy {accuracy}", fmean(own), "<=", limit)
        )
    return bars, shares


def left(found: Mapping[Setting, list[tuple[float, float, list[bool]]]]) -> tuple[list[report.Bar], object]:
    looks = {_named(setting): [hold for each in some for hold in each[2]] for setting, some in found.items()}
    every = [hold for some in looks.values() for hold in some]
    return [
        report.Bar(f"80 % interval of the judgements left ({len(every):,} looks): holds", fmean(every), ">=", 0.75)
    ], {name: fmean(some) for name, some in looks.items()}


MODELS = ((0.70, 0.95, 0.90), (0.77, 0.95, 0.90), (0.85, 0.95, 0.90), (0.88, 0.96, 0.90))


def to_large(job: tuple[float, float, float, int]) -> tuple[int, int, bool]:
    """Return the rows that the large model gets, those with an oracle's threshold, and whether the table that is signed
    breaks the promise. The audit's size is fixed, so the exact bound for one look is used."""
    small, large, share, _ = job
    rows, audited = 20_000, 400
    draw = random.Random(f"model {job}")
    promise = read_promise(f"label.accuracy >= {share}")
    table = Table.of(Setting(small, 0.79, rows), draw)
    large_wrong = [draw.random() > large for _ in range(rows)]
    table.thresholds = grid(table.doubts[:audited], FIXED_GRID)
    table.bands = [band(table.thresholds, doubt) for doubt in table.doubts]
    walk = Walk(table.tables(promise, 0.0, by_people=False), fixed=audited)
    for row in range(audited):
        walk.add(table.bands[row], wrong=table.wrong[row], sent_wrong=large_wrong[row])
    place = 0 if walk.passed is None else walk.passed
    sent = sum(each > place for each in table.bands[audited:]) + audited
    allowed, found = promise.most_wrong(rows), sum(large_wrong)
    oracle = rows
    for row in sorted(range(rows), key=lambda row: table.doubts[row]):
        found += table.wrong[row] - large_wrong[row]
        if found > allowed:
            break
        oracle -= 1
    wrong = (table.wrong[row] if table.bands[row] <= place else large_wrong[row] for row in range(rows))
    return sent, oracle, walk.passed is not None and sum(wrong) > allowed


def model(tables: int, pool: ProcessPoolExecutor) -> tuple[list[report.Bar], object]:
    bars, shares = list[report.Bar](), dict[str, object]()
    for small, large, share in MODELS:
        found = [*pool.map(to_large, [(small, large, share, seed) for seed in range(tables)], chunksize=5)]
        sent, oracle, broken = (fmean(each[part] for each in found) for part in range(3))
        sent, oracle = sent / 20_000, oracle / 20_000
        name = f"small {small}, large {large}, promise {share}"
        shares[name] = {"large": sent, "oracle": oracle, "signed and broken": broken}
        bars.append(report.Bar(f"learned threshold signed and broken, {name}", broken, "<=", 0.05 + NOISE))
        if oracle >= 0.3:
            bars.append(report.Bar(f"rows of the large model over an oracle's, {name}", sent / oracle, "<=", 1.6))
        else:
            bars.append(report.Bar(f"more of all rows to the large model, {name}", sent - oracle, "<=", 0.35))
    return bars, shares


def _named(setting: Setting) -> str:
    return f"accuracy {setting.accuracy}, AUROC {setting.auroc}, N {setting.rows:,}"


def _mean(shares: Mapping[str, float]) -> float:
    return fmean(shares.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promise", description="Does a promise hold?")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--tables", type=int, default=TABLES)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    env, bars, measurements = report.environment(), list[report.Bar](), dict[str, object]()
    parts = options.parts or PARTS
    few = min(OF_PEOPLE, options.tables)
    with ProcessPoolExecutor(options.processes) as pool:
        found = costs(few, pool) if {"people", "left"} & {*parts} else {}
        does: Mapping[str, Callable[[], tuple[list[report.Bar], object]]] = {
            "kept": lambda: kept(options.tables, pool),
            "broken": lambda: broken(few, pool),
            "people": lambda: people(found),
            "model": lambda: model(few, pool),
            "left": lambda: left(found),
        }
        for part in parts:
            if part not in does:
                parser.error(f"there is no part {part!r}: {', '.join(PARTS)}")
            own, measurements[part] = does[part]()
            bars += own
    return report.finish("promise", env, bars, {"simulated": True, **measurements})


if __name__ == "__main__":
    sys.exit(main())
