"""The timeline of a run on disk stays small, however long the run is."""

from __future__ import annotations

from pathlib import Path

from batch_agent.record.timeline import (
    MOST_SAMPLES,
    MOST_SPANS,
    Line,
    TimelineFiles,
    read_status,
    read_timeline,
)


def sample(at: int) -> Line:
    return ["sample", at, at]


def turn(at: int) -> Line:
    return ["turn", at, at + 1, at, 1, "server"]


def test_a_long_run_keeps_samples_of_all_its_time_at_a_growing_interval(tmp_path: Path) -> None:
    files = TimelineFiles(tmp_path)
    files.begin({"task": "t"}, 0.0)
    for at in range(3 * MOST_SAMPLES):
        files.write([sample(at)], (), None)
    found = read_timeline(tmp_path)
    times = [line[1] for line in found.samples]
    assert len(times) <= MOST_SAMPLES and files.interval >= 4.0
    assert times[0] == 0 and times[-1] == 3 * MOST_SAMPLES - 1 and times == sorted(times)  # type: ignore[type-var]
    assert found.headers == [{"at": 0.0, "task": "t"}]


def test_the_first_and_the_latest_turns_are_kept(tmp_path: Path) -> None:
    files = TimelineFiles(tmp_path)
    files.begin({}, 0.0)
    every = 5 * MOST_SPANS
    for first in range(0, every, 700):
        files.write((), [turn(at) for at in range(first, min(first + 700, every))], None)
    found = read_timeline(tmp_path)
    rows = [span[3] for span in found.spans]
    assert found.cut and rows[:MOST_SPANS] == list(range(MOST_SPANS))
    assert rows[-MOST_SPANS:] == list(range(every - MOST_SPANS, every)) and len(rows) <= 3 * MOST_SPANS


def test_a_session_that_goes_on_appends_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    for session in range(2):
        files = TimelineFiles(tmp_path)
        files.begin({"session": session}, float(session))
        files.write([sample(session)], [turn(session)], {"state": "running", "session": session})
        with (tmp_path / "timeline.jsonl").open("ab") as file:
            file.write(b'["sample", 9, \n')
    found = read_timeline(tmp_path)
    assert [header["session"] for header in found.headers] == [0, 1]
    assert [line[1] for line in found.samples] == [0, 1] and len(found.spans) == 2
    assert read_status(tmp_path) == {"state": "running", "session": 1}


def test_a_run_without_a_timeline_has_an_empty_one(tmp_path: Path) -> None:
    assert read_timeline(tmp_path).samples == [] and read_status(tmp_path) is None
