"""The worker of a run that names no other: a model that uses tools until it has an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batch_agent.backends.base import RequestShape
from batch_agent.engine.agent.shapes import Shapes
from batch_agent.errors import OutputError
from batch_agent.messages import Reply, ToolCall


class Looping(Protocol):
    """A conversation in which the loop asks and calls."""

    @property
    def shapes(self) -> Shapes: ...

    async def ask(self, shape: RequestShape) -> Reply: ...

    async def call(self, calls: Sequence[ToolCall]) -> list[str]: ...

    def read(self, reply: Reply) -> object:
        """Raises OutputError."""
        ...

    def repair(self, error: OutputError) -> None:
        """Raises the error where it was shown to the model often enough."""
        ...


async def tool_loop(row: object, ctx: Looping) -> object:
    """Ask. Use the tools that the answer calls and ask again; show the model what is wrong with an answer that does not
    validate and ask again; else the answer is the output."""
    shapes = ctx.shapes
    shape = shapes.first
    while True:
        reply = await ctx.ask(shape)
        if reply.tool_calls:
            await ctx.call(reply.tool_calls)
            shape = shapes.later
        else:
            try:
                return ctx.read(reply)
            except OutputError as error:
                ctx.repair(error)
            shape = shapes.repair
