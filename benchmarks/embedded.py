"""The embedded engine: BatchAgent.run on local:// against the same pipeline driven by hand, same weights and prompts.

    python -m benchmarks.embedded [agents ...]

one at a time   the pipeline gets a request when the one before is done
all at once     the pipeline gets all requests, then a loop steps it until they are done
leader first    as before, by one who knows that requests which start cold together do not share their prefix
batch agent     BatchAgent.run, the pipeline in its own process

Loading the model and compiling the grammar are not counted: each contender answers one unrelated request first. Each
runs in a process of its own, in turn, and prints its tokens per second; the ratios are what counts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from importlib import metadata
from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from batch_agent import BatchAgent
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.local import from_url, physical_cores, weights
from batch_agent.backends.local.child import open_pipeline
from batch_agent.backends.local.grammar import compile_turn
from batch_agent.messages import Conversation, Message, Usage
from benchmarks.report import Bar, environment, finish, table

MAX_TOKENS = 96
WATCH_SECONDS = 0.01
ONE_AT_A_TIME = 32  # of however many: its speed does not depend on who follows
TASK = "Ticket {number}: order {order} was charged twice."
RULES = "Rule {n}: a ticket about money goes to billing, one about a fault to bugs, any other to the account team. "
SYSTEM = "You sort support tickets. " + "".join(RULES.format(n=n) for n in range(1, 19))  # about 500 tokens


class Ticket(BaseModel):
    category: Literal["billing", "bug", "account"]
    urgency: int = Field(ge=1, le=5)
    summary: str = Field(max_length=60)


def rows(agents: int) -> list[dict[str, int]]:
    return [{"number": n, "order": n * 7919 % 10_000} for n in range(agents)]


def shape() -> RequestShape:
    return RequestShape(model="smollm2", schema=Ticket.model_json_schema(), max_tokens=MAX_TOKENS)


class ByHand:
    """The pipeline as a short script would use it."""

    def __init__(self) -> None:
        import openvino_genai

        path = weights.fetch()
        config = {"threads": physical_cores(), "kv_gb": 1, "max_seqs": 64}
        self.genai, self.pipeline = openvino_genai, open_pipeline(openvino_genai, path, config)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.grammar = compile_turn(shape(), MAX_TOKENS).text
        self.ids = iter(range(1, 1 << 30))

    def add(self, system: str, task: str) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        config = self.genai.GenerationConfig(max_new_tokens=MAX_TOKENS)
        config.structured_output_config = self.genai.StructuredOutputConfig(grammar=self.grammar)
        return self.pipeline.add_request(next(self.ids), prompt, config)

    def finish(self, handles: list[Any]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in handles]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for got, handle in zip(tokens, handles, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        got.extend(output.generated_ids)
        return tokens


def by_hand(agents: int, contender: str) -> dict[str, float]:
    hand = ByHand()
    hand.finish([hand.add("Hello.", "Hello.")])
    tasks = [TASK.format(**row) for row in rows(agents)]
    began = time.perf_counter()
    if contender == "one at a time":
        answers = [hand.finish([hand.add(SYSTEM, task)])[0] for task in tasks[:ONE_AT_A_TIME]]
    else:
        handles = [hand.add(SYSTEM, tasks[0])]
        while contender == "leader first" and not handles[0].can_read():
            hand.pipeline.step()
        answers = hand.finish(handles + [hand.add(SYSTEM, task) for task in tasks[1:]])
    seconds = time.perf_counter() - began
    for tokens in answers:
        Ticket.model_validate_json(hand.tokenizer.decode(tokens))
    return {"seconds": seconds, "tokens": sum(map(len, answers))}


async def watch_gaps(gaps: list[float]) -> None:
    """Ten milliseconds apart: the engine wants every core, and a busier watch would slow what it watches."""
    before = time.perf_counter()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        now = time.perf_counter()
        gaps.append(now - before - WATCH_SECONDS)
        before = now


async def batch_agent(agents: int) -> dict[str, float]:
    async with from_url("local://") as backend:
        hello = Conversation([Message("system", "Hello."), Message("user", "Hello.")])
        await backend.infer(ModelRequest(shape(), hello, "warm-up"))
        gaps: list[float] = []
        watcher = asyncio.create_task(watch_gaps(gaps))
        began = time.perf_counter()
        results = await BatchAgent.run(
            task=TASK,
            inputs=rows(agents),
            system_prompt=SYSTEM,
            output_schema=Ticket,
            backend=backend,
            max_tokens=MAX_TOKENS,
            no_hoist=True,
        )
        seconds = time.perf_counter() - began
        watcher.cancel()
    assert all(result.ok for result in results), [result.error for result in results if not result.ok][:3]
    usage = sum((result.usage for result in results), Usage())
    return {
        "seconds": seconds,
        "tokens": usage.completion_tokens,
        "cached": usage.cached_tokens / usage.prompt_tokens,
        "gap_ms": max(gaps) * 1000,
    }


CONTENDERS = ("one at a time", "all at once", "leader first", "batch agent")


def measure(contender: str, agents: int) -> dict[str, float]:
    if contender == "batch agent":
        return asyncio.run(batch_agent(agents))
    return by_hand(agents, contender)


def compare(agents: int) -> tuple[dict[str, object], list[Bar]]:
    found: dict[str, dict[str, float]] = {}
    for contender in CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.embedded", "--only", contender, str(agents)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[contender] = json.loads(output.splitlines()[-1])
    speed = {contender: got["tokens"] / got["seconds"] for contender, got in found.items()}
    rows = ((name, f"{got['seconds']:.1f}", f"{speed[name]:.1f}") for name, got in found.items())
    print(table((f"{agents} agents", "seconds", "tokens/s"), rows), end="\n\n", flush=True)
    ours = found["batch agent"]
    bars = [
        Bar(f"tokens/s over one at a time, {agents} agents", speed["batch agent"] / speed["one at a time"], ">=", 4),
        Bar(f"tokens/s over all at once, {agents} agents", speed["batch agent"] / speed["all at once"], ">=", 0.9),
        Bar(f"share of prompt tokens cached, {agents} agents", ours["cached"], ">=", 0.9),
        Bar(f"longest gap of the event loop in ms, {agents} agents", ours["gap_ms"], "<=", 50),
    ]
    return {"agents": agents, "tokens_per_second": speed, "runs": found}, bars


def main() -> int:
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return 0
    env = environment()
    env["packages"] = {**cast("dict[str, str]", env["packages"]), "openvino-genai": metadata.version("openvino-genai")}
    compared = [compare(agents) for agents in map(int, sys.argv[1:] or ("32", "200"))]
    return finish("embedded", env, [bar for _, bars in compared for bar in bars], [what for what, _ in compared])


if __name__ == "__main__":
    sys.exit(main())
