"""Rows and results that come from a record which others can write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batch_agent.errors import InputError, StoreError
from batch_agent.job import AgentError, Failure
from batch_agent.record.row_json import decode_result, decode_row, encode_result

WHOLE: dict[str, Any] = json.loads(
    encode_result(
        Failure(index=3, job_id="3", input="a", ok=False, output=None, error=AgentError("infer", "Rejected", "no")),
        None,
        worker=1,
        messages=True,
    )
)


def test_a_result_comes_back() -> None:
    result, worker = decode_result(json.dumps(WHOLE).encode(), 3, None, resumed=False)
    assert (result.job_id, result.ok, worker) == ("3", False, 1)
    assert result.error is not None and result.error.type == "Rejected"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[5]",
        b"\xff",
        b"[" * 100_000,
        *(json.dumps({**WHOLE, name: 5}).encode() for name in ("error", "usage", "timings", "messages", "artifacts")),
        *(json.dumps({key: WHOLE[key] for key in WHOLE if key != name}).encode() for name in ("job_id", "usage")),
    ],
)
def test_a_result_that_no_worker_wrote_is_an_error_that_names_the_row(data: bytes) -> None:
    with pytest.raises(StoreError, match="the result of row 3 in the record is damaged or forged"):
        decode_result(data, 3, None, resumed=False)


def test_a_row_that_is_nested_too_deeply_fails_alone() -> None:
    with pytest.raises(InputError):
        decode_row(b"[" * 100_000)
