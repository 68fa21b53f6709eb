"""Read by type checkers alone, mypy and pyright: the type of ``output_schema`` reaches ``result.output``, and a test of
the result settles whether there is one."""

from dataclasses import dataclass
from typing import Any, assert_type

from pydantic import BaseModel

from batch_agent import (
    AgentContext,
    AgentError,
    AgentResult,
    BatchAgent,
    BatchSpec,
    BlockingContext,
    Failure,
    Results,
    Success,
    Tool,
)


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
    assert_type(reviews, Results[Review])
    assert_type(reviews[0], Success[Review] | Failure)
    assert_type(reviews[0].output, Review | None)
    points = await BatchAgent.run(task="t", inputs=[], output_schema=list[Point], progress=True)
    assert_type(points[0].output, list[Point] | None)
    texts = await BatchAgent.run(task="t", inputs="rows.csv", tools=[double, len, "read_file"])
    assert_type(texts[0].output, str | None)
    anything = await BatchAgent.run(BatchSpec(task="t", inputs=[]), progress=False)
    assert_type(anything, Results[Any])
    async for result in BatchAgent.stream(task="t", inputs=[], output_schema=Review):
        assert_type(result.output, Review | None)
    async with BatchAgent.open(task="t", inputs=[], output_schema=Review) as run:
        async for result in run.results():
            assert_type(result.output, Review | None)
    assert_type(BatchAgent.run_sync(task="t", inputs=[], output_schema=Point), Results[Point])
    assert_type(double(2), int)


def lists(results: Results[Review]) -> None:
    known: list[AgentResult[Review]] = results
    assert_type(known[0].unwrap(), Review)
    assert_type(results.ok, list[Success[Review]])
    assert_type(results.failed, list[Failure])
    assert_type(results.outputs, list[Review])
    assert_type(results.cost, float | None)


def narrowed(result: AgentResult[Review]) -> list[str]:
    if result:
        assert_type(result.output, Review)
        assert_type(result.error, None)
    else:
        assert_type(result.output, None)
        assert_type(result.error, AgentError)
    if result.ok is True:
        assert_type(result.output, Review)
    if result.error is None:
        return result.output.findings
    assert_type(result.error, AgentError)
    return []


def matched(result: AgentResult[Review]) -> str:
    match result:
        case Success(output=review):
            return assert_type(review, Review).findings[0]
        case Failure(error=error):
            return assert_type(error, AgentError).message


def widened(result: AgentResult[Review]) -> AgentResult[object]:
    return result


async def work(row: Review, ctx: AgentContext) -> object:
    return (await ctx.ask("x", output_schema=Review)).output


def plain(row: Review, ctx: BlockingContext) -> str:
    return ctx.ask("x").text


async def worked() -> None:
    assert_type(await BatchAgent.run(worker=work, inputs=[], output_schema=Review), Results[Review])
    assert_type(await BatchAgent.run(worker=work, inputs=[]), Results[Any])
    assert_type(BatchAgent.run_sync(worker=plain, inputs=[], task="t"), Results[Any])
