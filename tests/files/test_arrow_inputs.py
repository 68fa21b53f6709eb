import datetime
import json
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from batch_agent.errors import SpecError
from batch_agent.files import LazyRows, read_inputs
from batch_agent.files.read import BATCH_ROWS

pa = pytest.importorskip("pyarrow", reason="Parquet and datasets need the package pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def save_dataset(directory: Path, *shards: object) -> None:
    """As ``Dataset.save_to_disk`` leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, table in zip(names, shards, strict=True):
        with pa.ipc.new_stream(str(directory / name), table.schema) as writer:  # type: ignore[attr-defined]
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (directory / "dataset_info.json").write_text("{}")


def test_a_parquet_file_is_read_by_batches_and_knows_its_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    count = 3 * BATCH_ROWS + 1
    pq.write_table(
        pa.table({"id": list(range(count)), "text": [f"t{n}" for n in range(count)]}), path, row_group_size=300
    )
    expected = [{"id": n, "text": f"t{n}"} for n in range(count)]
    assert read_inputs(path) == expected
    rows = read_inputs(path, at_once_bytes=0)
    assert isinstance(rows, LazyRows)
    assert rows.expected_rows() == count
    assert list(rows) == expected
    assert read_inputs(path, 2) == expected[:2]


def test_cells_become_what_json_can_carry(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    day = datetime.date(2024, 1, 2)
    row = {
        "text": b"caf\xc3\xa9",
        "image": {"bytes": b"\xff\xd8", "path": None},
        "day": day,
        "price": Decimal("1.50"),
        "tags": ["a", None],
        "took": datetime.timedelta(seconds=90),
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    assert read_inputs(path) == [
        {
            "text": "café",
            "image": {"bytes": "/9g=", "path": None},
            "day": "2024-01-02",
            "price": "1.50",
            "tags": ["a", None],
            "took": 90.0,
        }
    ]
    json.dumps(read_inputs(path))


def test_a_parquet_file_that_cannot_be_used_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(SpecError, match=r"cannot read the inputs .*rows\.parquet: "):
        read_inputs(path)
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(SpecError, match="more than one column 'a'"):
        read_inputs(path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(SpecError, match="needs the package pyarrow; install it with: pip install pyarrow"):
        read_inputs(tmp_path / "rows.parquet")


def test_a_dataset_on_disk_is_its_shards_one_after_another(tmp_path: Path) -> None:
    directory = tmp_path / "dataset"
    save_dataset(directory, pa.table({"x": list(range(400))}), pa.table({"x": [400, 401]}))
    assert read_inputs(directory) == [{"x": n} for n in range(402)]
    rows = read_inputs(directory, at_once_bytes=0)
    assert isinstance(rows, LazyRows)
    assert rows.expected_rows() == 402
    assert next(rows) == {"x": 0}
    rows.close()


def test_of_several_splits_one_must_be_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_dataset(tmp_path / split, pa.table({"s": [split]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SpecError, match=r"holds the splits train, test; give one of them: .*train"):
        read_inputs(tmp_path)
    assert read_inputs(tmp_path / "test") == [{"s": "test"}]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert read_inputs(tmp_path) == [{"s": "test"}]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", r"state\.json is not JSON"),
        ("[]", r"state\.json must hold an object"),
        ("{}", "does not list the files of the dataset"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', r"cannot read the inputs .*gone\.arrow"),
        ('{"_data_files": [{"filename": "state.json"}]}', "cannot read the inputs"),
        ('{"_data_files": [], "_indices_data_files": [{}]}', "save it again"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_an_error_at_once(tmp_path: Path, state: str, message: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(SpecError, match=message):
        read_inputs(tmp_path)


def test_a_dataset_that_the_datasets_package_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="writes a dataset with the package datasets itself")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]})
    dataset.select([2, 0]).save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "splits"))
    assert read_inputs(tmp_path / "one") == [{"text": "c", "label": 0}, {"text": "a", "label": 0}]
    assert len(list(read_inputs(tmp_path / "splits" / "train"))) == 3
    with pytest.raises(SpecError, match="splits train, test"):
        read_inputs(tmp_path / "splits")
