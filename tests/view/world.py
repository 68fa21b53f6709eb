"""Runs to look at: a few hundred rows of a triage, at three servers, with everything that can be seen of a run."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from batch_agent import Tool
from batch_agent.agent.prepare import prepare
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedServer, ToolUse

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "[click](javascript:alert(1)) \x1b[31mred\x1b[0m \u202egnp.exe\u202c \x00 </script>"
)
SUBJECTS = ["invoice twice", "cannot log in", "refund", "where is my parcel", "broken kettle", "change of address"]


class Ticket(BaseModel):
    category: str
    urgent: bool
    reply: str


@Tool.define(cacheable=True)
async def look_up_order(order: str) -> str:
    """Looks an order up.

    Args:
        order: its number
    """
    if order.endswith("7"):
        raise RuntimeError(f"order {order} is locked")
    return f'{{"order": "{order}", "state": "shipped", "carrier": "Post", "items": ["kettle", "lid"]}}'


@Tool.define(cacheable=True)
async def policy(topic: str) -> str:
    """Says what the shop's policy is.

    Args:
        topic: what about
    """
    return f"Policy on {topic}: refunds within 30 days; {HOSTILE if topic == 'hostile' else 'be kind'}."


def answers(pace: float, seed: str = "") -> Callable[[Request], Say | Fail]:
    def answer(request: Request) -> Say | Fail:
        asked = str(request.messages[1]["content"])
        chance = random.Random(f"{seed}{asked}{len(request.messages)}")
        wait = {"latency": pace * chance.uniform(0.3, 1.6)}
        if "T-1013 " in asked:
            return Fail(400, **wait)
        if "T-1021 " in asked and request.turn < 9:
            return CallTools(ToolUse("policy", {"topic": f"thing {request.turn}"}), **wait)
        if request.turn == 0:
            subject = next((each for each in SUBJECTS if each in asked), "hostile")
            calls = [
                ToolUse("look_up_order", {"order": f"A-{chance.randrange(40)}"}),
                ToolUse("policy", {"topic": subject}),
            ]
            return CallTools(*calls, reasoning="The customer is unhappy. I should look the order up first.", **wait)
        if chance.random() < 0.06 and request.turn == 1:
            return Say('{"category": "billing", "urgent": "perhaps"}', **wait)
        category = chance.choice(["billing", "shipping", "account", "other"])
        reply = HOSTILE if "hostile" in asked else f"We are sorry about this. Your {category} case is with us now."
        body = Ticket(category=category, urgent=chance.random() < 0.3, reply=reply).model_dump_json()
        return Say(body if chance.random() > 0.04 else f"Here it is: {body[:-1]}", **wait)

    return answer


def rows(count: int) -> list[dict[str, Any]]:
    chance = random.Random(1)
    made = []
    for number in range(count):
        subject = HOSTILE if number == 5 else SUBJECTS[number % len(SUBJECTS)]
        text = "hostile" if number == 5 else f"Dear shop, about {subject}: order A-{number % 40}. Please help!"
        made.append({"id": f"T-{1000 + number}", "subject": subject, "text": text, "lang": chance.choice(["en", "de"])})
    return made


@asynccontextmanager
async def triage(
    run_dir: Path, count: int = 60, *, pace: float = 0.0, servers: int = 3, seed: str = "", **options: Any
) -> AsyncIterator[Run[Any]]:
    """A run over tickets, entered; its results are to be taken."""
    async with AsyncExitStack() as stack:
        places = [
            await stack.enter_async_context(ScriptedServer(answers(pace, seed), models=["triage-7b"]))
            for _ in range(servers)
        ]
        spec = BatchSpec(
            **{
                "task": "Sort ticket {id} ({lang}): {subject}\n\n{text}",
                "system_prompt": "You sort the tickets of a shop. Be brief and kind; look things up first.",
                "inputs": rows(count),
                "tools": [look_up_order, policy],
                "output_schema": Ticket,
                "backend": [place.backend_url for place in places],
                "model": "triage-7b",
                "prices": {"input": 0.4, "output": 1.6},
                "run_dir": run_dir,
                "max_inflight": 24,
                **options,
            }
        )
        yield await stack.enter_async_context(Run(prepare(spec)))


async def recorded(run_dir: Path, count: int = 60, **options: Any) -> Path:
    """The directory of a run that is over."""
    async with triage(run_dir, count, **options) as run:
        async for _ in run.results():
            pass
    return run_dir
