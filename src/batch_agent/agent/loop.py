"""The default worker: a model that uses tools until it has an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batch_agent.agent.shapes import Shapes
from batch_agent.backends.base import RequestShape
from batch_agent.errors import OutputError
from batch_agent.messages import Reply, ToolCall


class Looping(Protocol):
    """A conversation in which the loop sends requests and calls tools."""

    @property
    def shapes(self) -> Shapes: ...

    async def ask(self, shape: RequestShape) -> Reply: ...

    async def call(self, calls: Sequence[ToolCall]) -> list[str]: ...

    def read(self, reply: Reply) -> object:
        """Return the output in an answer. Raises OutputError if it is invalid."""

    def repair(self, error: OutputError) -> None:
        """Show the error to the model. Raises the error if the retries are used up."""


async def tool_loop(row: object, ctx: Looping) -> object:
    """Return the output of the agent. The loop requests an answer. If the answer calls tools, it runs them and repeats.
    If the answer is invalid, it shows the error to the model and repeats."""
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
