"""A function of your own works on each row: python examples/agents/with_a_function.py vllm://localhost:8000"""

import sys

from batch_agent import AgentContext, BatchAgent, Tool

CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Cork", "Bern", "Nice", "Graz", "Baku", "Doha"]
ROWS = [{"id": f"{city}-{day}", "city": city, "day": day} for city in CITIES for day in ("today", "tomorrow")]


@Tool.define()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: {len(city)} degrees"


async def work(row: dict[str, str], ctx: AgentContext) -> str:
    ctx.say(f"What should I wear in {row['city']} {row['day']}?")
    reply = await ctx.ask(tools=[weather])
    while reply.tool_calls:
        for call in reply.tool_calls:
            await ctx.call(call)
        reply = await ctx.ask(tools=[weather])
    return reply.text


def main(backend: str | None = None) -> None:
    results = BatchAgent.run_sync(
        worker=work, inputs=ROWS, tools=[weather], backend=backend, max_agents=8, run_dir="runs/function", resume=True
    )
    for result in results:
        print(result.job_id, "→", result.output or result.error)


if __name__ == "__main__":
    main(*sys.argv[1:])
