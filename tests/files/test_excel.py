"""Excel files: rows from a sheet, and results in one. Without openpyxl they are refused before a run starts."""

from __future__ import annotations

import json
import logging
import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, SpecError
from batch_agent.cli.main import main
from batch_agent.files.excel import MOST_CHARACTERS
from batch_agent.files.read import read_inputs
from batch_agent.files.tables import check_table
from batch_agent.job import UnreadableRow
from batch_agent.testing import Say, ScriptedBackend

BACKEND = ["--backend", "simulated://instant", "--no-run-dir"]


@pytest.fixture
def openpyxl() -> Any:
    return pytest.importorskip("openpyxl", reason="Excel files need the package openpyxl")


def sheet(path: Path, openpyxl: Any, *rows: list[object], more: bool = False) -> Path:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    if more:
        book.create_sheet("second").append(["other"])
    book.save(path)
    book.close()
    return path


def cells(path: Path, openpyxl: Any) -> list[tuple[object, ...]]:
    book = openpyxl.load_workbook(path)
    try:
        return [tuple(cell.value for cell in row) for row in book.active.iter_rows()]
    finally:
        book.close()


def test_the_first_row_names_the_columns_and_cells_keep_their_types(tmp_path: Path, openpyxl: Any) -> None:
    when = datetime(2026, 2, 3, 4, 5)
    path = sheet(
        tmp_path / "rows.xlsx",
        openpyxl,
        ["id", "text", "n", "when", None],
        [1, " =keep it ", 2.5, when],
        [None, None, None, None],
        ["b", None, True, date(2026, 2, 3)],
        ["c", "x", 1, None, "beyond"],
    )
    first, second, third = read_inputs(path)
    assert first == {"id": 1, "text": " =keep it ", "n": 2.5, "when": "2026-02-03T04:05:00"}
    assert second == {"id": "b", "text": None, "n": True, "when": "2026-02-03T00:00:00"}
    assert isinstance(third, UnreadableRow) and "row 5 has 'beyond' in a column" in third.message


def test_a_large_sheet_is_read_as_its_rows_are_needed(tmp_path: Path, openpyxl: Any) -> None:
    path = sheet(tmp_path / "rows.xlsx", openpyxl, ["n"], *([n] for n in range(50)))
    rows = read_inputs(path, limit=20, at_once_bytes=1)
    assert next(iter(rows)) == {"n": 0} and len(list(rows)) == 19
    assert not isinstance(rows, list) and list(rows.again()) == [{"n": n} for n in range(20)]


@pytest.mark.parametrize(
    ("header", "says"),
    [(["a", "a"], "more than one column 'a'"), (["a", None, "b"], "its first row must name all columns")],
)
def test_a_header_that_names_no_columns_is_refused(
    tmp_path: Path, openpyxl: Any, header: list[object], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        read_inputs(sheet(tmp_path / "rows.xlsx", openpyxl, header, [1, 2, 3]))


def test_a_file_that_is_no_excel_file_is_named(tmp_path: Path, openpyxl: Any) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"id,text\n")
    with pytest.raises(SpecError, match=r"cannot read .*rows\.xlsx: it is not an Excel file, or it has a password"):
        read_inputs(tmp_path / "rows.xlsx")


def test_a_second_sheet_is_not_read_and_that_is_said(
    tmp_path: Path, openpyxl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_inputs(sheet(tmp_path / "rows.xlsx", openpyxl, ["a"], [1], more=True)) == [{"a": 1}]
    assert "has 2 sheets: 'Sheet' is read" in caplog.text


async def test_an_excel_file_is_the_inputs_of_a_run_in_python(tmp_path: Path, openpyxl: Any) -> None:
    path = sheet(tmp_path / "rows.xlsx", openpyxl, ["text"], ["one"], ["two"])
    results = await BatchAgent.run(task="Say {text}", inputs=path, backend=ScriptedBackend(lambda r: Say(r.text)))
    assert [result.output for result in results] == ["Say one", "Say two"]


def test_a_command_reads_and_writes_excel_files(
    tmp_path: Path, openpyxl: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sheet(tmp_path / "rows.xlsx", openpyxl, ["id", "text"], ["a", "one"], ["b", "two"])
    said = ["run", "--task", "Say {text}", "rows.xlsx", "--output", "out.xlsx", "--backend", "simulated://instant"]
    assert main([*said, "--run-dir", "run"]) == 0
    header, *rows = cells(tmp_path / "out.xlsx", openpyxl)
    assert header[:4] == ("id", "text", "output", "ok")
    assert [(row[0], row[1], row[3]) for row in rows] == [("a", "one", True), ("b", "two", True)]
    assert not (tmp_path / "out.xlsx.partial.jsonl").exists()
    assert main(["export", "run", "--output", "again.xlsx"]) == 0
    assert cells(tmp_path / "again.xlsx", openpyxl)[0] == header
    capsys.readouterr()
    assert main(["export", "run", "--format", "xlsx"]) == 1
    assert "an Excel file cannot be written to standard output" in capsys.readouterr().err


def test_what_a_model_says_is_text_and_no_formula(
    tmp_path: Path, openpyxl: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batch_agent.files.tables import write_table

    texts = ["=1+1", "a\x01b\ud800", "x" * (MOST_CHARACTERS + 1), " two\nlines ", str(2**70)]
    records = [{"index": n, "job_id": str(n), "input": "i", "ok": True, "output": text} for n, text in enumerate(texts)]
    with caplog.at_level(logging.WARNING, "batch_agent"):
        write_table(records, tmp_path / "out.xlsx")
    book = openpyxl.load_workbook(tmp_path / "out.xlsx")
    written = [row[1] for row in book.active.iter_rows(min_row=2)]
    assert [cell.data_type for cell in written] == ["s"] * 5
    assert (written[0].value, written[3].value, written[4].value) == ("=1+1", " two\nlines ", str(2**70))
    assert "\x01" not in written[1].value and len(written[2].value) == MOST_CHARACTERS
    book.close()
    assert "1 cells are longer than" in caplog.text


def test_without_the_package_a_run_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    Path("rows.csv").write_text("text\none\n")
    Path("rows.xlsx").write_bytes(b"PK")
    assert main(["run", "--task", "Say {text}", "rows.csv", "--output", "out.xlsx", *BACKEND]) == 1
    assert "writing out.xlsx needs the package openpyxl; install it with: pip install openpyxl" in (
        capsys.readouterr().err
    )
    assert not Path("out.xlsx").exists()
    assert main(["run", "--task", "Say {text}", "rows.xlsx", *BACKEND]) == 1
    assert "reading rows.xlsx needs the package openpyxl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.xls", "out.ods", "out.xlsx.gz"])
def test_other_spreadsheets_are_refused_as_outputs(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"cannot be written as|already compressed"):
        check_table(tmp_path / name)
    assert json.dumps([*tmp_path.iterdir()]) == "[]"
