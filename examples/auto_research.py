"""Research a topic: a planner asks questions, an agent with web search answers each, one answer makes a survey of it.

    python examples/auto_research.py --topic "heat pumps in old houses" --n-questions 5 --output survey.md

web_search takes the key of a search service from the environment (docs/tools.md); without one, agents are told so and
answer from memory.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from pydantic import BaseModel, Field

from batch_agent import AgentResult, BatchAgent, Tool


class Plan(BaseModel):
    items: list[str] = Field(description="questions, each of which can be researched by itself", min_length=1)


class Finding(BaseModel):
    answer: str
    sources: list[str]


class Survey(BaseModel):
    title: str
    markdown: str = Field(description="the text of the survey, with sections, as Markdown")


async def research(topic: str, n_questions: int, backend: str | None) -> str:
    findings, survey = await BatchAgent.run_with_map_reduce(
        plan_prompt="Write {n} questions whose answers together give a survey of: {topic}",
        plan_inputs=[{"topic": topic, "n": n_questions}],
        plan_output_schema=Plan,
        task="Research this question with web_search and answer it with sources: {item}",
        tools=[Tool.web_search],
        output_schema=Finding,
        max_turns=6,
        reduce=f"Write a survey of {topic} from these {{n}} findings. Where one is an error, say what is missing.",
        reduce_schema=Survey,
        backend=backend,
    )
    sources = sorted({source for finding in findings if finding.output for source in finding.output.sources})
    if isinstance(survey, AgentResult):  # the findings are there all the same
        parts = [f"# {topic}", f"There is no survey: {survey.error}"]
        answers = [finding.output.answer for finding in findings if finding.output]
        parts += [f"## Finding {number}\n\n{answer}" for number, answer in enumerate(answers, 1)]
    else:
        parts = [f"# {survey.title}", survey.markdown]
    return "\n\n".join([*parts, "## Sources", "\n".join(f"- {source}" for source in sources) or "none"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Research a topic and write a survey in Markdown.")
    parser.add_argument("--topic", default="how to measure the moisture of soil")
    parser.add_argument("--n-questions", type=int, default=4)
    parser.add_argument("--backend", help="where inference happens; else BATCH_AGENT_BACKEND")
    parser.add_argument("--output", type=Path, help="the Markdown file; else standard output")
    options = parser.parse_args()
    text = asyncio.run(research(options.topic, options.n_questions, options.backend))
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
