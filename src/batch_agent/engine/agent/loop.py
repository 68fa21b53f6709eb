"""The worker of a run that names no other: a model that uses tools until it has an answer."""

from __future__ import annotations

from batch_agent.engine.agent.loop_context import LoopContext
from batch_agent.errors import OutputError


async def tool_loop(row: object, ctx: LoopContext) -> object:
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
