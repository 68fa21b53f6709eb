"""An agent of the OpenAI Agents SDK works on each row: python examples/agents/with_openai_agents.py openai://"""

import sys

from openai import AsyncOpenAI

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from batch_agent import AgentContext, BatchAgent

CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Cork", "Bern", "Nice", "Graz", "Baku", "Doha"]
ROWS = [{"id": f"{city}-{day}", "city": city, "day": day} for city in CITIES for day in ("today", "tomorrow")]

set_tracing_disabled(True)  # it would send traces to OpenAI, whatever the backend


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: {len(city)} degrees"


async def work(row: dict[str, str], ctx: AgentContext) -> str:
    async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
        agent = Agent(
            name="packer",
            instructions="Look the weather up, then answer in one sentence.",
            model=OpenAIResponsesModel(model=ctx.model, openai_client=client),
            tools=[weather],
        )
        question = f"What should I wear in {row['city']} {row['day']}?"
        if "--stream" in sys.argv:
            streaming = Runner.run_streamed(agent, question)
            async for _ in streaming.stream_events():
                pass
            return str(streaming.final_output)
        return str((await Runner.run(agent, question)).final_output)


def main(backend: str | None = None) -> None:
    results = BatchAgent.run_sync(
        worker=work, inputs=ROWS, backend=backend, max_agents=8, run_dir="runs/openai_agents", resume=True
    )
    for result in results:
        print(result.job_id, "→", result.output or result.error)


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if argument != "--stream"])
