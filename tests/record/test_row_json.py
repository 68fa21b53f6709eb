"""Rows and results that come from a record which others can write."""

from __future__ import annotations

import json
import pickle
from dataclasses import InitVar, dataclass, replace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_serializer, field_validator

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, StoreError
from batch_agent.files.results import result_line
from batch_agent.job import AgentError, Failure, Success
from batch_agent.messages import Message, ToolCall
from batch_agent.outputs.validate import parse_output
from batch_agent.record.row_json import decode_result, decode_row, encode_result, encode_row, line_of


class Point(BaseModel):
    x: int
    y: int


class Unwritable(BaseModel):
    x: int

    @field_serializer("x")
    def write(self, _: int) -> int:
        raise ValueError("it stays here")


class Renamed(BaseModel):
    rating: int = Field(default=0, alias="Rating")


class Hundredfold(BaseModel):
    price: int

    @field_validator("price")
    @classmethod
    def in_cents(cls, value: int) -> int:
        return value * 100


class FromText(BaseModel):
    stars: int

    @field_validator("stars", mode="before")
    @classmethod
    def counted(cls, value: object) -> int:
        if not isinstance(value, str):
            raise ValueError("a text is required")
        return int(value.split()[0])


class Derived(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def next(self) -> int:
        return self.a + 1


class Hidden(BaseModel):
    a: int
    why: str = Field(default="", exclude=True)


@dataclass
class Seeded:
    a: int
    seed: InitVar[int]


REJECTED = AgentError("infer", "Rejected", "no")
SAID = (Message("user", "Is it?"), Message("assistant", "no", (ToolCall("1", "look", "{}"),), reasoning="hm"))
WRITTEN = Failure(3, "3", {"a": 1 << 70}, False, None, REJECTED, messages=SAID, raw_text="\ud800 no")
DATA = encode_result(WRITTEN, None, worker=1, messages=True)
LINE, HEAD, TEXTS = DATA.split(b"\n")
SHOWN: dict[str, Any] = json.loads(LINE)


def with_line(line: dict[str, Any]) -> bytes:
    return b"\n".join([json.dumps(line).encode(), HEAD, TEXTS])


def test_a_result_comes_back() -> None:
    result, worker = decode_result(DATA, 3, None, resumed=False)
    assert (result, worker) == (WRITTEN, 1)
    assert pickle.loads(pickle.dumps(decode_result(DATA, 3, None, resumed=False)[0])) == WRITTEN
    assert replace(decode_result(DATA, 3, None, resumed=False)[0], index=4) == replace(WRITTEN, index=4)


def test_a_result_comes_back_with_its_input_and_its_output_as_an_instance_of_the_schema() -> None:
    done = Success(3, "3", "a", True, Point(x=1, y=2), raw_text="1, 2")
    data = encode_result(done, OutputSchema.of(Point), worker=2, messages=False)
    assert line_of(data) == result_line(done, OutputSchema.of(Point))
    result, worker = decode_result(data, 3, OutputSchema.of(Point), resumed=True, value=("a",))
    assert (result, worker) == (replace(done, input=("a",), resumed=True), 2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Renamed, '{"Rating": 5}'),
        (Hundredfold, 'Sure: ```json\n{"price": 5}\n```'),
        (FromText, '{"stars": "5 of 5"}'),
        (Derived, '{"a": 1}'),
        (Hidden, '{"a": 1, "why": "because"}'),
        (Seeded, '{"a": 1, "seed": 2}'),
        (dict[str, Renamed], '{"one": {"Rating": 5}}'),
    ],
)
def test_an_output_is_the_same_in_another_process_although_its_schema_reads_what_it_writes_differently(
    kind: object, text: str
) -> None:
    schema = OutputSchema.of(kind)
    assert schema is not None and not schema.reads_back
    done = Success(3, "3", "a", True, parse_output(text, schema).value, raw_text=text)
    data = encode_result(done, schema, worker=2, messages=False)
    result, _ = decode_result(data, 3, schema, resumed=False)
    assert result == done and json.loads(line_of(data))["output"] == schema.to_plain(done.output)


def test_an_output_that_no_other_process_could_read_is_a_failure_everywhere() -> None:
    schema = OutputSchema.of(Hundredfold)
    merged = Success(3, "3", "a", True, Hundredfold(price=7), raw_text='{"price": 3}')  # of two parts: 4 and 3
    data = encode_result(merged, schema, worker=2, messages=False)
    result, _ = decode_result(data, 3, schema, resumed=False)
    assert not json.loads(line_of(data))["ok"] and not result.ok and result.error is not None
    assert (result.error.type, "own output" in result.error.message) == ("Invalid", True)


@pytest.mark.parametrize("kind", [Point, list[Point], dict[str, int | None]])
def test_a_plain_schema_is_read_without_the_text_of_the_model(kind: object) -> None:
    schema = OutputSchema.of(kind)
    assert schema is not None and schema.reads_back


def test_votes_samples_and_doubts_come_back_and_the_samples_as_instances_of_the_schema() -> None:
    schema = OutputSchema.of(Point)
    votes = {"x": {"counts": {"1": 2}, "against": 0}}
    sampled: Any = Success(3, "a", None, True, Point(x=1, y=2))
    sampled.votes, sampled.samples, sampled.doubts = (
        votes,
        (Point(x=1, y=2), None, Point(x=1, y=3)),
        {"x": 0.5, "y": None},
    )
    data = encode_result(sampled, schema, worker=1, messages=False)
    result, _ = decode_result(data, 3, schema, resumed=True)
    assert (result.votes, result.samples, result.doubts) == (votes, sampled.samples, sampled.doubts)
    assert result.doubt == 0.5
    assert json.loads(line_of(data))["doubt"] == 0.5


def test_a_row_that_its_schema_would_change_on_the_way_is_refused() -> None:
    assert decode_row(encode_row(Renamed(Rating=5)), OutputSchema.of(Renamed))[0] == Renamed(Rating=5)
    with pytest.raises(InputError, match="another value"):
        decode_row(encode_row(Hundredfold(price=5)), OutputSchema.of(Hundredfold))


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
        *(with_line({**SHOWN, name: 5}) for name in ("error", "usage", "timings", "artifacts")),
        *(with_line({key: SHOWN[key] for key in SHOWN if key != name}) for name in ("job_id", "usage")),
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
