"""What a program may give as ``inputs``."""

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, Results, SpecError
from batch_agent.files.inputs import SLICE_ROWS, FrameRows, rows_from
from batch_agent.files.read import LazyRows
from batch_agent.testing import ScriptedBackend

DAY = datetime.datetime(2026, 1, 2, 3, 4, 5)
COLUMNS: dict[str, list[Any]] = {"id": [7, 8], "text": ["a", None], "score": [1.5, float("nan")], "day": [DAY, None]}
ROWS = [
    {"id": 7, "text": "a", "score": 1.5, "day": "2026-01-02T03:04:05"},
    {"id": 8, "text": None, "score": None, "day": None},
]


async def run(inputs: object, task: str = "{text}") -> Results[str]:
    return await BatchAgent.run(task=task, inputs=inputs, backend=ScriptedBackend())  # type: ignore[call-overload]


def frame(library: str, columns: dict[str, list[Any]]) -> Any:
    module = pytest.importorskip(library)
    if library == "datasets":
        return module.Dataset.from_dict(columns)
    return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


LIBRARIES = ["pandas", "polars", "pyarrow", "datasets"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_table_is_its_rows_and_what_is_missing_is_none(library: str) -> None:
    assert rows_from(frame(library, COLUMNS)) == ROWS


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_table_is_run_row_by_row_and_its_length_is_known(library: str) -> None:
    results = await run(frame(library, {"id": [7, 8], "text": ["a", "b"]}))
    assert [result.job_id for result in results] == ["7", "8"]
    assert [result.input for result in results] == [{"id": 7, "text": "a"}, {"id": 8, "text": "b"}]
    assert results.summary.statistics.total == 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_large_table_is_turned_into_rows_as_they_are_needed(library: str) -> None:
    count = 500_001
    rows = rows_from(frame(library, {"n": range(count)}) if library != "datasets" else numbered(count))
    assert isinstance(rows, FrameRows)
    assert len(rows) == count
    taken = iter(rows)
    assert [next(taken) for _ in range(SLICE_ROWS + 2)] == [{"n": n} for n in range(SLICE_ROWS + 2)]
    assert next(iter(rows)) == {"n": 0}


def numbered(count: int) -> Any:
    table = pytest.importorskip("pyarrow").table({"n": range(count)})
    return pytest.importorskip("datasets").Dataset(table)


def test_pandas_cells_of_every_kind_become_what_json_can_carry() -> None:
    pandas = pytest.importorskip("pandas")
    numpy = pytest.importorskip("numpy")
    table = pandas.DataFrame(
        {
            "whole": pandas.array([1, None], dtype="Int64"),
            "when": pandas.to_datetime(["2026-01-02", None]),
            "took": pandas.to_timedelta([90, None], unit="s"),
            "kind": pandas.Categorical(["a", None]),
            "list": [numpy.array([1, 2]), None],
            "number": [numpy.float32(0.5), numpy.int64(3)],
            3: [True, False],
        }
    )
    assert rows_from(table) == [
        {
            "whole": 1,
            "when": "2026-01-02T00:00:00",
            "took": 90.0,
            "kind": "a",
            "list": [1, 2],
            "number": 0.5,
            "3": True,
        },
        {"whole": None, "when": None, "took": None, "kind": None, "list": None, "number": 3.0, "3": False},
    ]


def test_a_record_batch_is_its_rows() -> None:
    batch = pytest.importorskip("pyarrow").record_batch({"a": [1, 2]})
    assert rows_from(batch) == [{"a": 1}, {"a": 2}]


def test_a_subclass_of_a_frame_is_a_frame() -> None:
    pandas = pytest.importorskip("pandas")
    assert rows_from(type("Mine", (pandas.DataFrame,), {})({"a": [1]})) == [{"a": 1}]


def test_columns_of_one_name_and_tables_without_columns_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(SpecError, match="the pandas DataFrame has more than one column 'a'"):
        rows_from(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(SpecError, match="has no columns"):
        rows_from(pandas.DataFrame())


def test_a_lazy_frame_and_a_dict_of_splits_say_what_to_give() -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(SpecError, match=r"LazyFrame: collect\(\) it first"):
        rows_from(polars.LazyFrame({"a": [1]}))
    datasets = pytest.importorskip("datasets")
    with pytest.raises(SpecError, match=r"give one of its splits, such as inputs=dataset\['train'\]"):
        rows_from(datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1]})}))


async def test_a_dataset_that_was_saved_or_selected_from_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    dataset.save_to_disk(tmp_path / "saved")
    assert [result.input for result in await run(tmp_path / "saved")] == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert rows_from(dataset.filter(lambda row: row["text"] != "b").with_format("numpy")) == [
        {"text": "a"},
        {"text": "c"},
    ]
    assert len(await run(dataset.to_iterable_dataset())) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"text": "b"}\n'),
        ("rows.json", '[{"text": "a"}, {"text": "b"}]'),
        ("rows.csv", "text\na\nb\n"),
        ("rows.tsv", "text\na\nb\n"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
async def test_a_path_is_the_rows_of_its_file(
    tmp_path: Path, name: str, content: str, kind: type[str] | type[Path]
) -> None:
    (tmp_path / name).write_text(content)
    results = await run(kind(tmp_path / name))
    assert [result.input for result in results] == [{"text": "a"}, {"text": "b"}]
    assert results.summary.statistics.total == 2


async def test_lines_of_text_are_rows_from_a_path_and_from_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\ufeffAda\n\n  Grace \r\nélan", encoding="utf-8", newline="")
    expected = ["Ada", "  Grace ", "élan"]
    assert rows_from(path) == expected
    with path.open(encoding="utf-8-sig") as file:
        assert [result.input for result in await run(file, "{input}")] == expected
    path.write_bytes(b"good\nbad \xff\n")
    results = await run(path, "{input}")
    assert results[0].ok
    assert "names.txt line 2 is not UTF-8" in str(results[1].error)


async def test_a_large_file_is_read_as_needed_and_closed_when_the_run_is_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("x" * 1_000 + "\n" + ("y" * 1_000 + "\n") * 20_000)
    rows = rows_from(path)
    assert isinstance(rows, LazyRows)
    async with BatchAgent.open(task="{input}", inputs=rows, backend=ScriptedBackend()) as opened:
        await anext(opened.results())
    expected = rows.expected_rows()
    assert 15_000 < expected < 25_000
    with pytest.raises(ValueError, match="closed"):
        list(rows)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("Summarise this", "it is one text, 'Summarise this', and not a file"),
        ("a\nb\nc", r"text\.splitlines\(\)"),
        ("", "it is one text"),
        ("x" * 10_000, "it is one text, 'xx"),
        ("nul\0", "it is one text"),
        ("rows.csv", "there is no file rows.csv"),
        (Path("rows.csv"), "cannot read the inputs rows.csv: No such file"),
        ({"text": "a"}, "inputs is one dict, not rows: give a list"),
        (b"bytes", "inputs is one bytes, not rows"),
        (5, "inputs must be a list, iterator or async iterator, not int"),
    ],
)
async def test_what_is_no_rows_is_an_error_that_says_what_to_give(
    given: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=says):
        await run(given, "{input}")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SpecError, match="neither a file nor a directory"):
        rows_from(tmp_path / "pipe.jsonl")


def test_rows_as_they_are_stay_as_they_are() -> None:
    def numbers() -> Iterator[str]:
        yield "a"

    for rows in (["a"], ("a",), {"a", "b"}, numbers()):
        assert rows_from(rows) is rows
