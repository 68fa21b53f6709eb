"""Run against a server of your own, with a tool: python examples/on_my_server.py vllm://localhost:8000"""

import sys

from pydantic import BaseModel

from batch_agent import BatchAgent, Tool

STOCK = {"lamp": 4, "cable": 0, "desk": 1}


@Tool.define(cacheable=True)  # the same question is asked once for all agents
def in_stock(product: str) -> int:
    """How many pieces of a product are in stock."""
    return STOCK.get(product, 0)


class Reply(BaseModel):
    product: str
    available: bool


def main(backend: str | None = None) -> None:
    results = BatchAgent.run_sync(
        task="A customer wants {count} of the product {product}. Look up whether we have as many.",
        inputs=[{"count": count, "product": product} for product in STOCK for count in (1, 2, 5)],
        tools=[in_stock],
        output_schema=Reply,
        max_tokens=100,
        backend=backend,  # None: BATCH_AGENT_BACKEND, or the embedded model
        max_inflight=64,  # as many as the server computes together
        run_dir="runs/stock",
        resume=True,
    )
    for result in results:
        print(result.input, "→", result.output or result.error)


if __name__ == "__main__":
    main(*sys.argv[1:])
