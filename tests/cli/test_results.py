import contextlib
import gzip
import json
import os
import resource
from pathlib import Path

import pytest

from batch_agent.cli.output.results import ResultWriter, StdoutLines, open_results
from batch_agent.errors import BatchAgentError, Interrupted, SpecError
from batch_agent.files.results import result_line
from batch_agent.job import AgentError, AgentResult

RESULT: AgentResult[object] = AgentResult(0, "0", "x", True, "y")


async def test_a_file_keeps_its_old_content_until_the_first_result(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(ZeroDivisionError), open_results(path):
        1 / 0  # noqa: B018
    assert path.read_text() == "old\n"
    with open_results(path) as writer:
        await writer.write(RESULT)
        assert path.read_bytes() == result_line(RESULT)  # on disk at once
        await writer.write(RESULT)
    assert path.read_bytes() == 2 * result_line(RESULT)
    with open_results(path) as writer:
        pass
    assert writer.keeps_old and path.read_bytes() == 2 * result_line(RESULT)  # a run without rows
    with open_results(tmp_path / "new.jsonl"):
        pass
    assert (tmp_path / "new.jsonl").read_bytes() == b""


async def test_a_file_that_cannot_be_written_is_an_error_before_the_run_and_a_full_disk_one_during_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match=r"cannot write the results to .*out\.jsonl: No such file or directory"):
        open_results(tmp_path / "gone" / "out.jsonl")
    with (
        pytest.raises(BatchAgentError, match="cannot write the results to /dev/full: No space left"),
        open_results(Path("/dev/full")) as writer,
    ):
        await writer.write(RESULT)


async def test_standard_output_gets_whole_lines_and_a_reader_that_is_gone_is_noticed() -> None:
    reader, descriptor = os.pipe()
    with ResultWriter(StdoutLines(descriptor)) as writer:
        await writer.write(RESULT)
        assert os.read(reader, 10_000) == result_line(RESULT)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            await writer.write(RESULT)
    os.close(descriptor)


def result(index: int) -> AgentResult[object]:
    return AgentResult(index, str(index), {"n": index}, True, "x" * index)


def interrupted(index: int) -> AgentResult[object]:
    return AgentResult(index, str(index), {"n": index}, False, None, AgentError.of(Interrupted("stopped")))


def indices(content: bytes) -> list[int]:
    return [json.loads(line)["index"] for line in content.splitlines()]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def test_results_in_order_wait_beside_the_output_until_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_results(path, ordered=True) as writer:
        for index in (2, 1):
            await writer.write(result(index))
        assert path.read_bytes() == b""
        assert indices((tmp_path / "out.jsonl.waiting.jsonl").read_bytes()) == [2, 1]  # paid for, so on disk
        await writer.write(result(0))
        assert indices(path.read_bytes()) == [0, 1, 2]
        await writer.write(result(4))
    assert indices(path.read_bytes()) == [0, 1, 2, 4]
    assert names(tmp_path) == {"out.jsonl"}


async def test_a_run_that_fails_leaves_what_waited_in_the_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(ZeroDivisionError), open_results(path, ordered=True) as writer:
        await writer.write(result(3))
        await writer.write(result(1))
        1 / 0  # noqa: B018
    assert indices(path.read_bytes()) == [1, 3]


async def test_standard_output_can_be_in_order_too(capfd: pytest.CaptureFixture[str]) -> None:
    with open_results(None, ordered=True) as writer:
        for index in (1, 0, 3):
            await writer.write(result(index))
    assert indices(capfd.readouterr().out.encode()) == [0, 1, 3]


async def test_a_compressed_file_is_complete_at_the_end_and_keeps_its_old_content_until_the_first_result(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.jsonl.gz"
    path.write_bytes(gzip.compress(b"old"))
    with pytest.raises(ZeroDivisionError), open_results(path):
        1 / 0  # noqa: B018
    assert gzip.decompress(path.read_bytes()) == b"old"
    with pytest.raises(ZeroDivisionError), open_results(path) as writer:
        await writer.write(RESULT)
        await writer.write(RESULT)
        1 / 0  # noqa: B018
    assert gzip.decompress(path.read_bytes()) == 2 * result_line(RESULT)
    with open_results(tmp_path / "new.jsonl.gz"):
        pass
    assert gzip.decompress((tmp_path / "new.jsonl.gz").read_bytes()) == b""


async def test_a_file_may_be_compressed_with_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstd files need the package zstandard")
    with open_results(tmp_path / "out.jsonl.zst") as writer:
        await writer.write(RESULT)
    with zstandard.open(tmp_path / "out.jsonl.zst", "rb") as file:
        assert file.read() == result_line(RESULT)


async def test_a_table_in_input_order_is_made_at_the_end_of_results_that_are_beside_it_until_then(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")
    with open_results(path) as writer:
        await writer.write(result(1))
        await writer.write(result(0))
        assert path.read_text() == "old"
        assert indices((tmp_path / "out.csv.partial.jsonl").read_bytes()) == [1, 0]
        assert writer.destination == str(path)
    header, first, second = path.read_text().splitlines()
    assert header.startswith("n,output,ok,")
    assert (first.split(",")[1], second.split(",")[1]) == ("", "x")
    assert names(tmp_path) == {"out.csv"}


async def test_a_run_that_could_not_start_leaves_the_old_table(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), open_results(path):
        1 / 0  # noqa: B018
    assert path.read_text() == "old" and names(tmp_path) == {"out.csv"}
    with open_results(path):
        pass
    assert path.read_text() == "old"  # a run without rows
    with open_results(tmp_path / "new.csv"):
        pass
    assert (tmp_path / "new.csv").read_text().count("\n") == 1  # the header alone


async def test_results_stay_when_their_table_cannot_be_made(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with (
        pytest.raises(BatchAgentError, match=r"cannot write the table .*; the results are in .*\.partial\.jsonl"),
        open_results(path) as writer,
    ):
        await writer.write(RESULT)
        path.mkdir()
    assert (tmp_path / "out.csv.partial.jsonl").read_bytes() == result_line(RESULT)


@pytest.mark.parametrize("ordered", [False, True])
async def test_what_another_process_has_beside_its_output_is_not_touched_by_a_start_that_fails(
    tmp_path: Path, ordered: bool
) -> None:
    path = tmp_path / "out.csv"
    beside = {tmp_path / f"{path.name}.{kind}.jsonl": kind for kind in ("partial", "waiting")}
    for file, content in beside.items():
        file.write_text(content)
    with pytest.raises(ZeroDivisionError), open_results(path, ordered=ordered):
        1 / 0  # noqa: B018
    assert {file: file.read_text() for file in tmp_path.iterdir()} == beside


async def test_a_live_run_keeps_its_results_when_a_second_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_results(path, ordered=True) as live:
        for index in (0, 2, 3):
            await live.write(result(index))
        with pytest.raises(ZeroDivisionError), open_results(path, ordered=True):
            1 / 0  # noqa: B018
        await live.write(result(1))
    assert indices(path.read_bytes()) == [0, 1, 2, 3]


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_place_that_goes_away_before_the_first_result_is_an_error_in_words(
    tmp_path: Path, ordered: bool
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with (
        pytest.raises(BatchAgentError, match=r"cannot .*: No such file"),
        open_results(place / "out.csv", ordered=ordered) as writer,
    ):
        place.rmdir()
        await writer.write(RESULT)


@pytest.mark.parametrize("name", ["gone/out.jsonl", "gone/out.csv", "gone/out.jsonl.gz"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_place_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path, name: str, ordered: bool) -> None:
    with pytest.raises(SpecError, match=r"cannot write the results to .*gone.*: No such file or directory"):
        open_results(tmp_path / name, ordered=ordered)
    with pytest.raises(SpecError, match="it is a directory"):
        (tmp_path / "out.csv").mkdir()
        open_results(tmp_path / "out.csv", ordered=ordered)


async def test_the_first_answer_replaces_an_older_output_with_the_interrupted_rows(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("older results\n")
    with open_results(tmp_path / "out.jsonl") as writer:
        for index, ok in enumerate((False, True, False)):
            await writer.write(result(index) if ok else interrupted(index))
    assert indices((tmp_path / "out.jsonl").read_bytes()) == [0, 1, 2]


@pytest.mark.parametrize("to_stdout", [False, True])
async def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path, to_stdout: bool) -> None:
    path = tmp_path / "out.jsonl"
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("wb"))
        writer = stack.enter_context(ResultWriter(StdoutLines(file.fileno())) if to_stdout else open_results(path))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        try:
            with pytest.raises(BatchAgentError, match="cannot write the results"):
                for index in range(100):
                    await writer.write(result(index))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = path.read_text()
    assert 500 < len(text) <= 1_000 and text.endswith("\n")
    assert indices(text.encode()) == list(range(writer.written))
