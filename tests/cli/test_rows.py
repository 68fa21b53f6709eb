import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from batch_agent.cli.spec import rows
from batch_agent.cli.spec.rows import read_pipe, read_rows
from batch_agent.errors import SpecError
from batch_agent.job import UnreadableRow


def test_a_path_is_read_as_a_file_and_a_missing_one_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n2\n")
    assert read_rows(str(tmp_path / "rows.csv"), 1) == [{"a": "1"}]
    with pytest.raises(SpecError, match=r"cannot read the inputs .*gone\.jsonl: No such file"):
        read_rows(str(tmp_path / "gone.jsonl"))


async def test_a_pipe_is_read_line_by_line_while_the_loop_goes_on(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)  # so that neither end waits for the other
    rows = read_rows(str(pipe))
    assert isinstance(rows, AsyncGenerator)
    os.write(writer, b'\xef\xbb\xbf"a"\n\n{"b":')
    assert await anext(rows) == "a"
    waiting = asyncio.ensure_future(anext(rows))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    os.write(writer, b" 2}\n17\n")
    assert await waiting == {"b": 2}
    unreadable = await anext(rows)
    assert isinstance(unreadable, UnreadableRow) and "line 4" in unreadable.message
    await rows.aclose()
    os.close(writer)


async def test_the_last_line_of_a_pipe_needs_no_newline_and_a_limit_ends_it_early() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'"a"\n"b"')
    os.close(writer)
    assert [row async for row in read_pipe(reader, "pipe", None)] == ["a", "b"]
    reader, writer = os.pipe()
    os.write(writer, b'\n"a"\n\n"b"\n"c"\n')
    assert [row async for row in read_pipe(reader, "pipe", 2)] == ["a", "b"]
    os.close(writer)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 7, 1000])
async def test_a_row_is_whole_wherever_a_pipe_divides_it(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    reader, writer = os.pipe()
    os.write(writer, b'"a long row"\n\n"b"\n{"c": "\xc3\xa9"}\n17\n"last"')
    os.close(writer)
    *good, number, last = [row async for row in read_pipe(reader, "pipe", None)]
    assert good == ["a long row", "b", {"c": "\u00e9"}]
    assert isinstance(number, UnreadableRow) and "pipe line 5" in number.message
    assert last == "last"
