"""Lines that share a long prefix run beside each other, after the first of them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

from tests.serve.served import CHAT, serving
from tests.serve.test_openai_batches import backend

from batch_agent.testing import Request, Say
from batch_agent.testing.replies import ScriptedReply


def line(name: str, system: str) -> dict[str, object]:
    messages = [{"role": "system", "content": system * 1000}, {"role": "user", "content": f"{system} {name}"}]
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "m", "messages": messages}}


async def test_the_others_of_a_group_come_after_its_first_line_and_no_group_waits_for_another(tmp_path: Path) -> None:
    gate, order = asyncio.Event(), list[str]()

    async def script(request: Request) -> ScriptedReply:
        order.append(request.text.split()[-2])
        if len(order) <= 3:
            await gate.wait()
        return Say("done")

    groups = ("aaa", "bbb", "ccc")
    lines = [line(f"l{number}", groups[number % 3]) for number in range(30)]
    async with backend(script) as model, serving(tmp_path, model) as client:
        batch = await client.create(lines)
        await model.wait_requests(3)
        assert set(order) == set(groups)  # the first line of each
        gate.set()
        done = await client.wait(batch["id"])
        assert done["request_counts"]["completed"] == 30
        rest = order[3:]
        assert sum(one != next for one, next in pairwise(rest)) <= 6  # siblings beside each other
