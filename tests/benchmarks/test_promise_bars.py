"""The bars of promises on few simulated tables: right methods keep them, and each broken one misses them clearly."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from benchmarks.promise import BROKEN, Setting, Table, corrected, judgements, signed_and_broken

from benchmarks import promise


def test_few_tables_just_above_the_bar_are_signed_and_a_kill_changes_no_decision() -> None:
    settings = [Setting(0.80, 0.60, 300), Setting(0.90, 0.82, 1_000), Setting(0.97, 0.60, 1_000)]
    found = [signed_and_broken((setting, seed)) for setting in settings for seed in range(40)]
    assert sum(signed for signed, _ in found) <= 12  # 120 tables, of which 6 are expected at most: 12 is above 99 %
    assert all(same for _, same in found)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_method_signs_more_than_it_may(name: str) -> None:
    tables = 60 if name.startswith("a fixed-n") else 12
    assert sum(BROKEN[name](random.Random(f"{name} {seed}")) for seed in range(tables)) / tables > 0.08


@pytest.mark.parametrize("does", [promise.unfinished, promise.skipped, promise.failed])
def test_rows_that_are_not_judged_or_failed_break_no_promise_as_they_are_counted(does: object) -> None:
    assert callable(does)
    assert sum(does(random.Random(f"{seed}"), ours=True) for seed in range(25)) <= 4


def test_a_promise_costs_people_clearly_less_than_correcting_rows() -> None:
    tables = [Table.of(Setting(0.94, 0.82, 3_000), random.Random(seed)) for seed in range(6)]
    ours = [judgements(table) for table in tables]
    assert fmean(rows for rows, _ in ours) <= 0.6 * fmean(map(corrected, tables))
    looks = [low <= rows - at <= high for rows, looks in ours for at, low, high in looks]
    assert fmean(looks) >= 0.6  # of some twenty looks; 80 % of all


def test_a_learned_threshold_sends_few_more_rows_to_the_large_model_than_the_best_one() -> None:
    found = [promise.to_large((0.77, 0.95, 0.90, seed)) for seed in range(12)]
    assert sum(sent for sent, _, _ in found) <= 1.75 * sum(best for _, best, _ in found)  # 1.56 on 200 tables
    assert sum(broken for _, _, broken in found) <= 3
