"""A pydantic-ai agent works on each row: python examples/agents/with_pydantic_ai.py vllm://localhost:8000"""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from batch_agent import AgentContext, BatchAgent

CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Cork", "Bern", "Nice", "Graz", "Baku", "Doha"]
ROWS = [{"id": f"{city}-{day}", "city": city, "day": day} for city in CITIES for day in ("today", "tomorrow")]


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: {len(city)} degrees"


async def work(row: dict[str, str], ctx: AgentContext) -> str:
    model = OpenAIChatModel(ctx.model, provider=OpenAIProvider(base_url=ctx.base_url, api_key=ctx.api_key))
    agent = Agent(model, system_prompt="Look the weather up, then answer in one sentence.", tools=[weather])
    question = f"What should I wear in {row['city']} {row['day']}?"
    if "--stream" in sys.argv:
        async with agent.run_stream(question) as answer:
            return await answer.get_output()
    return (await agent.run(question)).output


def main(backend: str | None = None) -> None:
    results = BatchAgent.run_sync(
        worker=work, inputs=ROWS, backend=backend, max_agents=8, run_dir="runs/pydantic_ai", resume=True
    )
    for result in results:
        print(result.job_id, "→", result.output or result.error)


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if argument != "--stream"])
