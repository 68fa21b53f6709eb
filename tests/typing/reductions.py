"""Read by the type checker alone: the types of ``output_schema`` and ``reduce_schema`` reach what comes back."""

from typing import assert_type

from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, Pipeline, Results


class Review(BaseModel):
    findings: list[str]


class Summary(BaseModel):
    text: str


async def reductions() -> None:
    results, summary = await BatchAgent.run_with_reduce(
        task="t", inputs=[], output_schema=Review, reduce="r", reduce_schema=Summary
    )
    assert_type(results, Results[Review])
    assert_type(summary, Summary | AgentResult[Summary])
    texts, text = await BatchAgent.run_with_reduce(task="t", inputs=[], reduce="r")
    assert_type(texts[0].output, str | None)
    assert_type(text, str | AgentResult[str])
    found, paper = await BatchAgent.run_with_map_reduce(
        plan_prompt="p", task="{item}", output_schema=Review, reduce="r", reduce_schema=Summary
    )
    assert_type(found, Results[Review])
    assert_type(paper, Summary | AgentResult[Summary])


async def pipelines() -> None:
    reviews = Pipeline(["a"]).map(task="t", output_schema=Review)
    assert_type(reviews, Pipeline[Review])
    findings = reviews.flat_map(lambda review: review.findings).filter(bool)
    assert_type(findings, Pipeline[str])
    assert_type(reviews.join(findings, key=lambda r: r.findings[0], other_key=str), Pipeline[tuple[Review, str]])
    outcome = await findings.reduce("r", output_schema=Summary).run()
    assert_type(outcome.outputs, list[Summary])
