"""The default worker: a model that uses tools until it has an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from batch_agent.agent.dialogue import Dialogue
from batch_agent.errors import OutputError

InnerWorker: TypeAlias = Callable[[object, Dialogue], Awaitable[object]]


async def tool_loop(row: object, dialogue: Dialogue) -> object:
    """Return the output of the agent. The loop requests an answer. If the answer calls tools, it runs them and repeats.
    If the answer is invalid, or calls tools that were not offered, it tells the model so and repeats."""
    shapes = dialogue.shapes
    shape = shapes.first
    offers_tools = bool(shape.tools) and shape.tool_choice != "none"
    while True:
        reply = await dialogue.ask(shape)
        if not reply.tool_calls:
            try:
                return dialogue.read(reply)
            except OutputError as error:
                dialogue.repair(error)
            shape = shapes.repair
        elif offers_tools:
            await dialogue.call(reply.tool_calls)
            shape = shapes.later
        else:
            dialogue.refuse(reply.tool_calls)
            shape = shapes.repair
