"""Numbers on pages: those of the results files, whose simulated ones are those of this code."""

from __future__ import annotations

import json

import pytest

from benchmarks import kv, readme, report

SIMULATED = json.loads((report.RESULTS / "kv-simulated.json").read_text())


def test_pages_have_the_numbers_of_the_results_files() -> None:
    assert not readme.differing(), "python -m benchmarks.readme"


@pytest.mark.parametrize("name", kv.WORKS)
def test_simulated_numbers_of_the_kv_cache_are_those_of_this_code_and_meet_their_bars(name: str) -> None:
    work = kv.WORKS[name]
    published = {line["variant"]: line["seconds"] for line in SIMULATED["measurements"] if line["work"] == name}
    variants = [f"loop {work.agents}", "ours"] if work.bars else [f"loop {work.agents}", "off", "ours"]
    seconds = {variant: float(str(kv.simulated(work, variant)["seconds"])) for variant in variants}
    assert seconds == pytest.approx({variant: published[variant] for variant in variants}, rel=0.002), "make numbers"
    missed = [bar.name for bar in kv.bars_of(work, seconds, "simulated") if not bar.met]
    assert not missed


def test_numbers_that_are_older_than_the_code_that_they_measure_are_named() -> None:
    found = report.stale()
    assert "kv-simulated" not in found or found["kv-simulated"], "a date is known for each"
    if found:
        pytest.skip("older than the code that they measure: " + ", ".join(f"{n} ({on})" for n, on in found.items()))


def test_a_results_file_of_other_code_is_stale_and_one_of_this_code_is_not(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(tmp_path, type(report.RESULTS))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name, measures in (("kv-vllm", report.digest_of("kv-vllm")), ("kv-sglang", "of other code")):
        env = {"measures": measures, "date": "2026-01-02T00:00:00+00:00"}
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": env}))
    (tmp_path / "without-measures.json").write_text("{}")
    assert report.stale() == {"kv-sglang": "2026-01-02"}
