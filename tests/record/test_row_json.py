"""Rows and results that come from a record which others can write."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, field_serializer

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, StoreError
from batch_agent.files.results import result_line
from batch_agent.job import AgentError, Failure, Success
from batch_agent.messages import Message, ToolCall
from batch_agent.record.row_json import decode_result, decode_row, encode_result, line_of


class Point(BaseModel):
    x: int
    y: int


class Unwritable(BaseModel):
    x: int

    @field_serializer("x")
    def write(self, _: int) -> int:
        raise ValueError("it stays here")


REJECTED = AgentError("infer", "Rejected", "no")
SAID = (Message("user", "Is it?"), Message("assistant", "no", (ToolCall("1", "look", "{}"),), reasoning="hm"))
WRITTEN = Failure(3, "3", {"a": 1 << 70}, False, None, REJECTED, messages=SAID, raw_text="\ud800 no")
DATA = encode_result(WRITTEN, None, worker=1, messages=True)
LINE, HEAD, TEXTS = DATA.split(b"\n")
# One object, as earlier versions wrote it.
WHOLE: dict[str, Any] = {**json.loads(LINE), "worker": 1, "messages": json.loads(TEXTS)[1]}


@pytest.mark.parametrize("data", [DATA, json.dumps(WHOLE).encode()])
def test_a_result_comes_back(data: bytes) -> None:
    result, worker = decode_result(data, 3, None, resumed=False)
    assert (result, worker) == (WRITTEN, 1)
    assert pickle.loads(pickle.dumps(decode_result(data, 3, None, resumed=False)[0])) == WRITTEN
    assert replace(decode_result(data, 3, None, resumed=False)[0], index=4) == replace(WRITTEN, index=4)


def test_a_result_comes_back_with_its_input_and_its_output_as_an_instance_of_the_schema() -> None:
    done = Success(3, "3", "a", True, Point(x=1, y=2), raw_text="1, 2")
    data = encode_result(done, OutputSchema.of(Point), worker=2, messages=False)
    assert line_of(data) == result_line(done, OutputSchema.of(Point))
    result, worker = decode_result(data, 3, OutputSchema.of(Point), resumed=True, value=("a",))
    assert (result, worker) == (replace(done, input=("a",), resumed=True), 2)


def test_an_output_that_cannot_be_written_makes_the_row_a_failure() -> None:
    done = Success(3, "3", "a", True, Unwritable(x=1), raw_text="1")
    result, _ = decode_result(
        encode_result(done, OutputSchema.of(Unwritable), worker=2, messages=False), 3, None, resumed=False
    )
    assert result.error is not None and "cannot be written as JSON" in result.error.message
    assert result.raw_text == "1"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[5]",
        b"\xff",
        b"[" * 100_000,
        b"\n".join([LINE, HEAD]),
        b"\n".join([LINE, b"5", TEXTS]),
        b"\n".join([LINE, b"[1]", TEXTS]),
        *(json.dumps({**WHOLE, name: 5}).encode() for name in ("error", "usage", "timings", "messages", "artifacts")),
        *(json.dumps({key: WHOLE[key] for key in WHOLE if key != name}).encode() for name in ("job_id", "usage")),
    ],
)
def test_a_result_that_no_worker_wrote_is_an_error_that_names_the_row(data: bytes) -> None:
    with pytest.raises(StoreError, match="the result of row 3 in the record is damaged or forged"):
        decode_result(data, 3, None, resumed=False)


@pytest.mark.parametrize("texts", [b"", b"5", b'["text", 5]', b'["text", [["user"]]]'])
def test_texts_that_no_worker_wrote_are_an_error_when_they_are_read(texts: bytes) -> None:
    result, _ = decode_result(b"\n".join([LINE, HEAD, texts]), 3, None, resumed=False)
    with pytest.raises(StoreError, match="the result of row 3 in the record is damaged or forged"):
        assert result.messages


def test_a_result_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'text'"):
        assert WRITTEN.text  # type: ignore[attr-defined]


def test_a_row_that_is_nested_too_deeply_fails_alone() -> None:
    with pytest.raises(InputError):
        decode_row(b"[" * 100_000)
