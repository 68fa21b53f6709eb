"""A LangGraph graph works on each row: python examples/agents/with_langgraph.py vllm://localhost:8000"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from batch_agent import AgentContext, BatchAgent

CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Cork", "Bern", "Nice", "Graz", "Baku", "Doha"]
ROWS = [{"id": f"{city}-{day}", "city": city, "day": day} for city in CITIES for day in ("today", "tomorrow")]


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: {len(city)} degrees"


async def work(row: dict[str, str], ctx: AgentContext) -> str:
    streaming = "--stream" in sys.argv
    model = ChatOpenAI(model=ctx.model, base_url=ctx.base_url, api_key=ctx.api_key, streaming=streaming)
    with_tools = model.bind_tools([weather])

    async def think(state: MessagesState) -> dict[str, list[object]]:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    question = f"Look the weather up. What should I wear in {row['city']} {row['day']}?"
    state = await graph.compile().ainvoke({"messages": [("user", question)]})
    return str(state["messages"][-1].content)


def main(backend: str | None = None) -> None:
    results = BatchAgent.run_sync(
        worker=work, inputs=ROWS, backend=backend, max_agents=8, run_dir="runs/langgraph", resume=True
    )
    for result in results:
        print(result.job_id, "→", result.output or result.error)


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if argument != "--stream"])
