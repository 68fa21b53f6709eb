import csv
import io
import json
from pathlib import Path

import pytest

from batch_agent.cli.main import main
from batch_agent.files.results import result_line
from batch_agent.job import AgentError, AgentResult, Timings
from batch_agent.record.rundir import failure_line


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run leaves that was killed while it wrote its last line."""
    directory = tmp_path / "run"
    directory.mkdir()
    error = AgentError("infer", "RateLimited", "too many", True)
    good = [AgentResult(index, str(index), {"text": f"t{index}"}, True, {"score": index}) for index in (3, 0, 2)]
    bad: AgentResult[object] = AgentResult(
        1, "1", {"text": "t1"}, False, None, error, attempts=4, cost=0.5, timings=Timings(total=2.5)
    )
    (directory / "run.json").write_text('{"state": "running"}')
    (directory / "results.jsonl").write_bytes(b"".join(map(result_line, good)) + b'{"index": 4, "job')
    (directory / "failures.jsonl").write_bytes(failure_line(bad))
    return directory


def test_a_table_has_every_row_in_input_order_and_says_what_it_left_out(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_dir), "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["index"], row["ok"], row["output.score"], row["text"]) for row in rows] == [
        ("0", "true", "0", "t0"),
        ("1", "false", "", "t1"),
        ("2", "true", "2", "t2"),
        ("3", "true", "3", "t3"),
    ]
    assert (rows[1]["error_type"], rows[1]["error_message"], rows[1]["attempts"]) == ("RateLimited", "too many", "4")
    assert (rows[1]["cost"], rows[1]["seconds"]) == ("0.5", "2.5")
    assert "skipped 1 line that is not complete" in err


def test_a_table_goes_to_a_file_whatever_its_name(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run_dir.parent / "table.txt"
    assert main(["export", str(run_dir), "--format", "tsv", "--output", str(target)]) == 0
    assert target.read_text().startswith("text\toutput.score\tok\terror_type\t")
    assert capsys.readouterr().out == ""


def test_a_parquet_file_is_exported(run_dir: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the package pyarrow")
    target = run_dir.parent / "table.parquet"
    assert main(["export", str(run_dir), "--format", "parquet", "--output", str(target)]) == 0
    assert pq.read_table(target).column("output.score").to_pylist() == [0, None, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "--format", "csv"], "gone holds no run"),
        (["run", "--format", "parquet"], "give --output FILE"),
        (["run", "--format", "csv", "--output", "gone/out.csv"], "cannot write gone/out.csv: No such file"),
        (["run", "--format", "parquet", "--output", "out.parquet.gz"], "omit .gz"),
        (["run", "--format", "messages"], "was not started by the command line"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    run_dir: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run_dir.parent)
    assert main(["export", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "kind", "recorded", "message"),
    [
        ("run/journal.db", "csv", True, "is in the run directory"),
        ("run/table.csv", "messages", True, "is in the run directory"),
        ("rows.jsonl", "csv", True, "is the file of the inputs"),
        ("rows.jsonl", "messages", False, "is the file of the inputs"),
        ("spec.yaml", "csv", True, "is the file of the spec"),
    ],
)
def test_an_export_does_not_replace_what_the_run_consists_of(
    run_dir: Path, output: str, message: str, kind: str, recorded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """``recorded``: whether the command named the inputs, or its spec did."""
    inputs = run_dir.parent / "rows.jsonl"
    (run_dir.parent / "spec.yaml").write_text("task: t\ninputs: rows.jsonl\n")
    command = {"spec": str(run_dir.parent / "spec.yaml"), "inputs": str(inputs) if recorded else None}
    (run_dir / "run.json").write_text(json.dumps({"state": "complete", "command": command}))
    inputs.write_text("old")
    (run_dir / "journal.db").write_text("old")
    before = {path: path.read_bytes() for path in run_dir.parent.rglob("*") if path.is_file()}
    assert main(["export", str(run_dir), "--format", kind, "--output", str(run_dir.parent / output)]) == 1
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run_dir.parent.rglob("*") if path.is_file()} == before


def test_a_run_whose_spec_is_gone_is_exported_all_the_same(run_dir: Path) -> None:
    command = {"spec": str(run_dir.parent / "gone.yaml"), "inputs": None}
    (run_dir / "run.json").write_text(json.dumps({"state": "complete", "command": command}))
    assert main(["export", str(run_dir), "--format", "csv", "--output", str(run_dir.parent / "out.csv")]) == 0


def test_a_run_without_results_is_an_empty_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "results.jsonl").unlink()
    (run_dir / "failures.jsonl").write_text("")
    assert main(["export", str(run_dir), "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert json.loads((run_dir / "run.json").read_text())  # and nothing in the directory has changed
