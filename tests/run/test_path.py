"""What one turn runs through does not grow: see benchmarks/path.py."""

from __future__ import annotations

from benchmarks import path

# Between the first and the second request of one recorded row with a tool call. Fewer is better: lower them when a
# change removes something.
FILES, NESTED, CALLS, CROSSINGS = 25, 8, 520, 150
TRIES = 12  # a timer of the run may fire between the two requests; an answer in more pieces takes more calls


def test_a_turn_runs_through_few_files_and_nested_coroutines() -> None:
    with path.scripted() as url:
        for _ in range(TRIES):
            numbers = path.between_requests(url).numbers()
            if numbers["files"] <= FILES:
                break
    assert numbers["nested_coroutines"] <= NESTED
    assert numbers["files"] <= FILES, numbers
    assert numbers["calls"] <= CALLS, numbers
    assert numbers["crossings"] <= CROSSINGS, numbers
