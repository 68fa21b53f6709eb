import json
import os
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path

import pytest
from pydantic import BaseModel

from batch_agent.cli.results import FileWriter, StdoutWriter, result_line
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.job import AgentError, AgentResult, Timings, UnreadableRow
from batch_agent.messages import Message, Usage


class Color(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    label: object = None


class Model(BaseModel):
    color: Color
    when: date


def record(output: object, **more: object) -> dict[str, object]:
    line = result_line(AgentResult(3, "job", {"a": 1}, True, output, **more))  # type: ignore[arg-type]
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_a_line_has_the_result_and_the_input_and_not_the_transcript() -> None:
    usage, timings = Usage(10, 4, 2, 1), Timings(0.1, 0.2, 0.3, 0.6, None)
    messages = (Message("user", "x"),)
    assert record("text", attempts=2, turns=1, usage=usage, timings=timings, messages=messages) == {
        "index": 3,
        "job_id": "job",
        "ok": True,
        "output": "text",
        "error": None,
        "attempts": 2,
        "turns": 1,
        "usage": {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 2, "reasoning_tokens": 1},
        "timings": {"queued": 0.1, "inference": 0.2, "tool_wait": 0.3, "total": 0.6, "first_token": None},
        "input": {"a": 1},
    }


def test_a_failed_line_has_the_error_and_the_raw_text() -> None:
    error = AgentError("validate", "NotJSON", "no JSON", False)
    parsed = json.loads(result_line(AgentResult(0, "0", "row", False, None, error, raw_text="prose")))
    assert parsed["error"] == {"stage": "validate", "type": "NotJSON", "message": "no JSON", "retryable": False}
    assert (parsed["ok"], parsed["raw_text"], parsed["input"]) == (False, "prose", "row")


def test_an_unreadable_row_has_no_input() -> None:
    result: AgentResult[object] = AgentResult(0, "0", UnreadableRow("line 3"), False, None)
    assert json.loads(result_line(result))["input"] is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Model(color=Color.RED, when=date(2024, 1, 2)), {"color": "red", "when": "2024-01-02"}),
        ([Point(1, Color.RED)], [{"x": 1, "label": "red"}]),
        ({"n": 2**80, "c": Color.RED, "p": Point(1)}, {"n": 2**80, "c": "red", "p": {"x": 1, "label": None}}),
        ({"s": {1}, "f": float("nan"), 1: date(2024, 1, 2)}, {"s": [1], "f": None, "1": "2024-01-02"}),
        ("half \ud83d", "half \ud83d"),
    ],
)
def test_any_output_becomes_json(output: object, expected: object) -> None:
    assert record(output)["output"] == expected


RESULT: AgentResult[object] = AgentResult(0, "0", "x", True, "y")


async def test_a_file_keeps_its_old_content_until_the_first_result(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(ZeroDivisionError), FileWriter(path):
        1 / 0  # noqa: B018
    assert path.read_text() == "old\n"
    with FileWriter(path) as writer:
        await writer.write(RESULT)
        assert path.read_bytes() == result_line(RESULT)  # on disk at once
        await writer.write(RESULT)
    assert path.read_bytes() == 2 * result_line(RESULT)
    with FileWriter(path):
        pass
    assert path.read_bytes() == b""


async def test_a_file_that_cannot_be_written_is_an_error_before_the_run_and_a_full_disk_one_during_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match=r"cannot write the results to .*out\.jsonl: No such file or directory"):
        FileWriter(tmp_path / "gone" / "out.jsonl")
    with (
        pytest.raises(BatchAgentError, match="cannot write the results to /dev/full: No space left"),
        FileWriter(Path("/dev/full")) as writer,
    ):
        await writer.write(RESULT)


async def test_standard_output_gets_whole_lines_and_a_reader_that_is_gone_is_noticed() -> None:
    reader, descriptor = os.pipe()
    with StdoutWriter(descriptor) as writer:
        await writer.write(RESULT)
        assert os.read(reader, 10_000) == result_line(RESULT)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            await writer.write(RESULT)
    os.close(descriptor)
