"""Runs for people to review: some answers are wrong, some rows fail, and what the model says is easy to find."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from batch_agent import BatchAgent
from batch_agent.testing import Fail, Request, Say, ScriptedServer

LABELS = ["billing", "shipping", "account"]
SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string", "enum": LABELS}, "why": {"type": "string"}},
    "required": ["label", "why"],
    "additionalProperties": False,
}
CANARY = "canary-of-the-model"


def truth(row: int) -> str:
    return LABELS[row % 3]


def says(request: Request) -> Say | Fail:
    """Every fifth answer is wrong, and every seventh row fails by its content."""
    found = re.search(r"ticket (\d+)", str(request.body))
    assert found is not None
    row = int(found[1])
    if row % 7 == 3:
        return Fail(400, f"{CANARY} cannot be answered")
    label = truth(row + 1) if row % 5 == 0 else truth(row)
    return Say(f'{{"label": "{label}", "why": "{CANARY} {row}"}}')


def tickets(count: int) -> list[dict[str, object]]:
    return [{"id": f"T-{row}", "text": f"ticket {row}", "gold_label": truth(row)} for row in range(count)]


async def reviewed_run(place: Path | str, count: int = 30, script: Any = says, **options: Any) -> None:
    """Record a run over tickets."""
    async with ScriptedServer(script) as server:
        given = {
            "task": "What is it about? {text}",
            "inputs": tickets(count),
            "output_schema": SCHEMA,
            "gold": {"label": "gold_label"},
            "backend": server.backend_url,
            "model": "small",
            "run_dir": place,
            **options,
        }
        await BatchAgent.run(**given)
