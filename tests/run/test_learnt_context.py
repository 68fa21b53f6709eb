"""What a server says of its model counts where the user says nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Capabilities, Facts
from batch_agent.errors import SpecError, Unavailable
from batch_agent.events import ContextCompacted, Event
from batch_agent.messages import Usage
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, virtual_clock


class Telling(ScriptedBackend):
    """Says how long its model's context is; or does what an exception says."""

    def __init__(self, script: Any, context: int | Exception | None) -> None:
        super().__init__(script, capabilities=Capabilities(reports_context=True))
        self.context = context
        self.probed: list[str] = []

    async def facts(self, model: str) -> Facts:
        self.probed.append(model)
        if isinstance(self.context, TimeoutError):
            await asyncio.Event().wait()
        if isinstance(self.context, Exception):
            raise self.context
        return Facts(self.context)


@Tool.define(cacheable=True)
async def look(page: int) -> str:
    return f"page {page}: " + "word " * 300


def looks(request: Request) -> Say:
    page = sum(message["role"] == "tool" for message in request.messages)
    usage = Usage(len(request.raw) // 4, 0, 10)
    return CallTools(ToolUse("look", {"page": page}), usage=usage) if page < 12 else Say("done", usage=usage)


async def compactions(backend: ScriptedBackend, **options: Any) -> int:
    events: list[Event] = []
    spec: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "tools": [look], "max_turns": 14, "backend": backend}
    async with BatchAgent.open(sinks=[events.append], **{**spec, **options}) as running:
        [_ async for _ in running.results()]
    return sum(isinstance(event, ContextCompacted) for event in events)


@virtual_clock
async def test_a_conversation_is_kept_within_the_context_that_the_server_tells() -> None:
    assert await compactions(Telling(looks, 3_000)) > 0
    assert await compactions(Telling(looks, 100_000)) == 0


@virtual_clock
async def test_the_users_word_counts_more_also_when_it_is_that_there_is_no_limit() -> None:
    assert await compactions(Telling(looks, 3_000), model_max_context=100_000) == 0
    assert await compactions(Telling(looks, 3_000), model_max_context=None) == 0


@pytest.mark.parametrize("trouble", [Unavailable("no"), TimeoutError(), None, 100])
@virtual_clock
async def test_a_server_that_cannot_be_asked_or_tells_nothing_of_use_is_worked_with_all_the_same(trouble: Any) -> None:
    backend = Telling(lambda request: Say("fine"), trouble)
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, model="m")
    assert result.output == "fine"
    assert backend.probed == ["m"]


@virtual_clock
async def test_whether_a_row_fits_is_the_servers_to_say_and_not_estimated() -> None:
    backend = Telling(lambda request: Say("fine"), 1_000)
    [result] = await BatchAgent.run(task="{input}", inputs=["word " * 4_000], backend=backend)
    assert result.ok


@virtual_clock
async def test_rows_that_are_to_be_cut_are_cut_to_the_context_that_the_server_tells() -> None:
    backend = Telling(lambda request: Say("fine"), 1_000)
    [result] = await BatchAgent.run(task="{input}", inputs=["word " * 4_000], backend=backend, oversized="truncate")
    assert result.shortened
    assert len(backend.requests[0].raw) < 4_000


@virtual_clock
async def test_rows_that_are_to_be_cut_need_a_context_from_somebody() -> None:
    for context in (None, Unavailable("no")):
        with pytest.raises(SpecError, match="needs model_max_context"):
            backend = Telling(lambda request: Say("fine"), context)
            await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, oversized="chunk")
        assert not backend.requests
