"""An agent that gives work to other agents, for each row:
python examples/agents/with_agents_of_agents.py vllm://localhost:8000"""

import asyncio
import sys

from batch_agent import AgentContext, BatchAgent, Tool

CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Cork", "Bern", "Nice", "Graz", "Baku", "Doha"]
ROWS = [{"id": f"{city}-{day}", "city": city, "day": day} for city in CITIES for day in ("today", "tomorrow")]
VIEWS = ("a farmer", "a sailor")


@Tool.define()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: {len(city)} degrees"


async def work(row: dict[str, str], ctx: AgentContext) -> str:
    question = f"What should I wear in {row['city']} {row['day']}?"
    said = await asyncio.gather(*(ctx.loop(f"You are {view}. {question}", tools=[weather]) for view in VIEWS))
    notes = "\n".join(f"{view}: {text}" for view, text in zip(VIEWS, said, strict=True))
    return await ctx.loop(f"{question} Decide between these answers.\n{notes}", tools=[weather])


def main(backend: str | None = None) -> None:
    results = BatchAgent.run_sync(
        worker=work, inputs=ROWS, tools=[weather], backend=backend, max_agents=8, run_dir="runs/agents", resume=True
    )
    for result in results:
        print(result.job_id, "→", result.output or result.error)


if __name__ == "__main__":
    main(*sys.argv[1:])
