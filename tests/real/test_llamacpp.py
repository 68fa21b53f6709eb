"""Against a real llama.cpp server on the CPU. ``python -m tests.real llamacpp`` sets it up, starts it and runs this."""

from __future__ import annotations

import os
from typing import Literal

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent
from batch_agent.backends.registry import open_backend
from batch_agent.conformance.examination import CHECKS, examine

URL = os.environ.get("BATCH_AGENT_TEST_LLAMACPP", "")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not URL, reason="python -m tests.real llamacpp starts the server")]


class Mood(BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


async def test_rows_get_answers_that_fit_their_schema() -> None:
    texts = ["I love it.", "It broke at once."]
    results = await BatchAgent.run(task="Judge: {input}", inputs=texts, output_schema=Mood, backend=URL, max_tokens=64)
    assert [type(result.output) for result in results] == [Mood, Mood]


@pytest.mark.parametrize(
    "question",
    ["plain", "usage", "token_limit", "stream_form", "stream_usage", "schema", "schema_bounds", "bad_schema"],
)
async def test_it_does_what_a_run_needs(question: str) -> None:
    backend, _ = open_backend(URL)
    async with backend:
        [model] = await backend.models()
        report = await examine(backend, model, questions=[check for check in CHECKS if check.id == question])
    [answer] = report.answers
    assert answer.finding.status == "works", answer.finding
