"""Scripts decide the answer to each request. A list is used in order; a function sees the request. A control request
(``control_requests``) gets the answer that is next in the list, and leaves it there.

Without a script the answer is minimal: a forced tool call, the smallest JSON that fits the schema, or an echo.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence

import orjson

from batch_agent.backends.simulated.answers import minimal_instance
from batch_agent.testing.replies import Answered, CallTools, Fail, Hang, Say, ScriptedReply, ToolUse
from batch_agent.testing.request import Request
from batch_agent.testing.wire import error_object

Script = Sequence[ScriptedReply] | Callable[[Request], ScriptedReply | Awaitable[ScriptedReply]]

ECHO_CHARACTERS = 200


async def scripted_reply(script: Script | None, request: Request, earlier: Sequence[Request]) -> ScriptedReply:
    """Return the reply to a request that came after ``earlier`` ones."""
    if script is None:
        return default_reply(request)
    if callable(script):
        reply = script(request)
        return await reply if inspect.isawaitable(reply) else reply
    place = sum(not each.is_control for each in earlier)
    if place < len(script):
        return script[place]
    # Status 400, which no client retries: the test ends at the request that was not expected.
    message = f"the script has {len(script)} replies, and this is request {place + 1}"
    return Fail(400, error_object(400, message))


async def wait_due(reply: ScriptedReply) -> Answered:
    """Wait as long as the reply says; forever if it hangs."""
    await asyncio.sleep(reply.latency)
    while isinstance(reply, Hang):
        await asyncio.get_running_loop().create_future()
    return reply


def default_reply(request: Request) -> ScriptedReply:
    forced = next((tool for tool in request.tools if request.tool_choice in ("required", tool.name)), None)
    if forced is not None:
        arguments = minimal_instance(forced.parameters)
        # A function that is forced by name ends with stop, as in vLLM.
        reason = "tool_calls" if request.tool_choice == "required" else "stop"
        return CallTools(ToolUse(forced.name, arguments if isinstance(arguments, dict) else {}), finish_reason=reason)
    if request.schema is not None:
        return Say(orjson.dumps(minimal_instance(request.schema)).decode())
    return Say(f"echo: {request.text[:ECHO_CHARACTERS]}")
