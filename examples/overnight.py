"""Overnight on a paid API, with a budget: OPENAI_API_KEY=… python examples/overnight.py rows.csv"""

import logging
import os
import sys

from batch_agent import BatchAgent
from batch_agent.files import read_inputs


def main(path: str) -> None:
    results = BatchAgent.run_sync(
        task="Translate this review into French. Answer with the translation alone.\n\n{text}",
        inputs=read_inputs(path),
        backend=os.environ.get("BATCH_AGENT_BACKEND", "openai://"),
        model="gpt-4.1-mini",
        prices={"input": 0.4, "cached": 0.1, "output": 1.6},  # $ per million tokens: look up today's
        max_cost=2.50,  # $; a call that might exceed it is not sent
        max_tokens=300,  # bounds what one call may cost
        max_outage=4 * 3600,  # seconds to wait for an API that is down
        run_dir="runs/overnight",
        resume=True,
        on_result=lambda result: print(result.job_id, result.output or result.error, flush=True),
    )
    spent = sum(result.cost or 0 for result in results if not result.resumed)
    failed = sum(not result.ok for result in results)
    print(f"{len(results)} rows, {failed} failed, ${spent:.4f} spent in this session")


if __name__ == "__main__":
    logging.basicConfig()  # an outage, a budget that is spent: said as it happens
    main(*(sys.argv[1:] or ["examples/data/reviews.csv"]))
