import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from batch_agent.errors import SpecError
from batch_agent.files.results import result_line
from batch_agent.files.tables import ROW_GROUP_ROWS, InOrderOfInput, check_table, write_table
from batch_agent.job import AgentError, AgentResult, Timings, UnreadableRow
from batch_agent.messages import Usage


def table(directory: Path, results: Sequence[AgentResult[object]], name: str = "out.csv") -> Path:
    lines = directory / "results.jsonl"
    lines.write_bytes(b"".join(map(result_line, results)))
    write_table(InOrderOfInput(lines), directory / name)
    return directory / name


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ok(index: int, output: object, value: object = "row") -> AgentResult[object]:
    return AgentResult(index, f"j{index}", value, True, output)


FAILED: AgentResult[object] = AgentResult(
    1, "j1", UnreadableRow("line 2"), False, None, AgentError("compile", "InputError", "line 2 is bad, very")
)


def test_a_csv_has_the_inputs_columns_then_the_outputs_fields_then_the_results_own(tmp_path: Path) -> None:
    usage, timings = Usage(10, 4, 2, 1), Timings(total=1.5)
    first: AgentResult[object] = AgentResult(
        0, "a", {"id": "a", "n": 3}, True, {"label": "x, y", "tags": ["p"]}, None, 2, 1, usage, 0.25, timings
    )
    good, bad = csv_rows(table(tmp_path, [first, FAILED]))
    assert list(good.items()) == [
        *(("id", "a"), ("n", "3"), ("output.label", "x, y"), ("output.tags", '["p"]')),
        *(("ok", "true"), ("error_type", ""), ("error_message", ""), ("index", "0"), ("job_id", "a")),
        *(("attempts", "2"), ("turns", "1"), ("prompt_tokens", "10"), ("cached_tokens", "4")),
        *(("cache_write_tokens", "0"), ("completion_tokens", "2"), ("reasoning_tokens", "1")),
        *(("cost", "0.25"), ("seconds", "1.5")),
    ]
    assert (bad["ok"], bad["error_type"], bad["error_message"]) == ("false", "InputError", "line 2 is bad, very")
    assert (bad["output.label"], bad["id"]) == ("", "")


def test_text_outputs_and_text_rows_have_one_column_each(tmp_path: Path) -> None:
    (row,) = csv_rows(table(tmp_path, [ok(0, 'two\nlines "quoted"', "in")]))
    assert (row["output"], row["input"]) == ('two\nlines "quoted"', "in")


def test_an_input_column_whose_name_is_taken_says_that_it_is_the_inputs(tmp_path: Path) -> None:
    (row,) = csv_rows(table(tmp_path, [ok(0, {"a": 1}, {"index": 7, "output.a": 8, "input.index": 9})]))
    assert (row["index"], row["output.a"]) == ("0", "1")
    assert (row["input.index"], row["input.output.a"], row["input.input.index"]) == ("7", "8", "9")


def test_fields_that_only_some_rows_have_are_columns_too(tmp_path: Path) -> None:
    rows = csv_rows(table(tmp_path, [FAILED, ok(0, {"a": None}), ok(2, {"b": True}), ok(3, "text")]))
    assert [(row["output.a"], row["output.b"], row["output"]) for row in rows] == [
        ("", "", ""),
        ("", "", ""),
        ("", "true", ""),
        ("", "", "text"),
    ]


def test_no_results_make_a_table_with_a_header_and_tsv_has_tabs(tmp_path: Path) -> None:
    assert table(tmp_path, []).read_text().startswith("output,ok,error_type")
    assert table(tmp_path, [], "out.tsv").read_text().startswith("output\tok\terror_type\t")


def test_a_table_may_be_compressed(tmp_path: Path) -> None:
    text = gzip.decompress(table(tmp_path, [ok(0, "é \ud83d")], "out.csv.gz").read_bytes()).decode()
    assert "é \\ud83d" in text  # half a character is written out


def test_a_torn_line_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = tmp_path / "results.jsonl"
    lines.write_bytes(result_line(ok(0, "a")) + b"17\n" + result_line(ok(1, "b")) + b'{"index": 2, "ou')
    results = InOrderOfInput(lines)
    assert [record["index"] for record in results] == [0, 1]
    assert results.torn == 2


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    def broken() -> object:
        yield json.loads(result_line(ok(0, "a")))
        raise OSError(28, "No space left on device")

    class Broken:
        def __iter__(self) -> object:
            return broken()

    (tmp_path / "out.csv").write_text("old")
    with pytest.raises(OSError):
        write_table(Broken(), tmp_path / "out.csv")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "old"


def test_parquet_has_typed_columns_and_row_groups(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the package pyarrow")
    results = [
        ok(
            index,
            {"score": index / 2 if index else 1, "big": 2**60, "yes": True, "mixed": index if index else "zero"},
            {"n": index, "tags": [index], "deep": {"a": None}, "text": "é \ud83d", "none": None, "huge": 2**80},
        )
        for index in range(ROW_GROUP_ROWS + 1)
    ]
    path = table(tmp_path, [*results, replace(FAILED, index=len(results))], "out.parquet")
    file = pq.read_table(path)
    assert pq.ParquetFile(path).metadata.num_row_groups == 2
    assert {name: str(file.schema.field(name).type) for name in file.column_names} == {
        **{"index": "int64", "job_id": "string", "ok": "bool", "output.score": "double", "output.big": "int64"},
        **{"output.yes": "bool", "output.mixed": "string", "error_type": "string", "error_message": "string"},
        **{"attempts": "int64", "turns": "int64", "prompt_tokens": "int64", "cached_tokens": "int64"},
        "cache_write_tokens": "int64",
        **{"completion_tokens": "int64", "reasoning_tokens": "int64", "cost": "double", "seconds": "double"},
        **{"n": "int64", "tags": "string", "deep": "string", "text": "string", "none": "string", "huge": "string"},
    }
    first, second, failed = *file.slice(0, 2).to_pylist(), *file.slice(len(results)).to_pylist()
    assert (failed["ok"], failed["output.score"], failed["error_type"]) == (False, None, "InputError")
    assert (first["output.score"], first["output.mixed"], first["tags"], first["deep"]) == (
        1,
        "zero",
        "[0]",
        '{"a":null}',
    )
    assert (second["output.mixed"], second["output.big"], second["text"]) == ("1", 2**60, "é \\ud83d")
    assert file.num_rows == ROW_GROUP_ROWS + 2


def test_a_parquet_file_is_not_compressed_twice(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"already compressed; omit \.gz"):
        check_table(tmp_path / "out.parquet.gz")
