"""What one turn runs through does not grow: see benchmarks/path.py."""

from __future__ import annotations

from benchmarks import path

# Between the first and the second request of one recorded row with a tool call. Fewer is better: lower them when a
# change removes something.
FILES, NESTED, CALLS, CROSSINGS = 29, 8, 460, 115
# Of the functions that a run of one recorded row executes, in all threads, without docstrings: what a reader follows.
RUN_LINES = 10_650
TRIES = 12  # a timer of the run may fire between the two requests; an answer in more pieces takes more calls


def test_a_turn_runs_through_few_files_and_nested_coroutines() -> None:
    with path.scripted() as url:
        for _ in range(TRIES):
            numbers = path.between_requests(url).numbers()
            if numbers["files"] <= FILES and numbers["calls"] <= CALLS and numbers["crossings"] <= CROSSINGS:
                break
    assert numbers["nested_coroutines"] <= NESTED
    assert numbers["files"] <= FILES, numbers
    assert numbers["calls"] <= CALLS, numbers
    assert numbers["crossings"] <= CROSSINGS, numbers


def test_a_whole_run_of_one_row_can_be_read() -> None:
    with path.scripted() as url:
        numbers = path.of_whole_run(url)
    assert numbers["run_functions"] > 500  # it was seen
    assert numbers["run_lines_of_functions"] <= RUN_LINES, numbers
