"""Read by the type checker alone: the type of ``output_schema`` reaches ``result.output``."""

from dataclasses import dataclass
from typing import assert_type

from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, Tool


class Review(BaseModel):
    findings: list[str]


@dataclass
class Point:
    x: int


@Tool.define(cacheable=True)
def double(number: int) -> int:
    return number * 2


async def outputs() -> None:
    reviews = await BatchAgent.run(task="t", inputs=[], output_schema=Review)
    assert_type(reviews, list[AgentResult[Review]])
    assert_type(reviews[0].output, Review | None)
    points = await BatchAgent.run(task="t", inputs=[], output_schema=list[Point])
    assert_type(points[0].output, list[Point] | None)
    texts = await BatchAgent.run(task="t", inputs=[], tools=[double, len, "read_file"])
    assert_type(texts[0].output, str | None)
    async for result in BatchAgent.stream(task="t", inputs=[], output_schema=Review):
        assert_type(result, AgentResult[Review])
    async with BatchAgent.open(task="t", inputs=[], output_schema=Review) as run:
        async for result in run.results():
            assert_type(result, AgentResult[Review])
    assert_type(BatchAgent.run_sync(task="t", inputs=[], output_schema=Point), list[AgentResult[Point]])
    assert_type(double(2), int)
