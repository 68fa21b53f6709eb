"""Rebuilds the messages of an agent from its record.

The record of the tool loop has the model's answers and the tools' results. Prompts are computed here in the same way as
by the agent.
"""

from __future__ import annotations

from collections.abc import Iterator

from batch_agent.compiler.attachments import content_of
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import OutputError
from batch_agent.job import Job
from batch_agent.messages import Conversation, Message
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import parse_output
from batch_agent.record.steps import Past, conversation_of_ask


def conversations(shared: Conversation, past: Past) -> Iterator[tuple[Message, ...]]:
    """Yield the complete conversations of a user's worker: those that no later request continues."""
    asks = past.asked
    continued = {ask.after for ask in asks}
    for place in range(len(asks)):
        if place not in continued:
            yield tuple(conversation_of_ask(asks, place, shared.messages))


def transcript(job: Job, shared: Conversation, schema: OutputSchema[object] | None, past: Past) -> tuple[Message, ...]:
    """Return the messages that ``AgentResult.messages`` had."""
    messages = [*shared.messages, Message("user", content_of(job))]
    said = repairs(schema, past)
    for number, turn in enumerate(past.turns, start=1):
        reply = turn.reply
        messages.append(reply.message())
        for position, call in enumerate(reply.tool_calls):
            if position not in turn.outcomes:
                break
            messages.append(Message("tool", turn.outcomes[position].text, tool_call_id=call.id, tool_name=call.name))
        if number in said:
            messages.append(Message("user", said[number]))
    return tuple(messages)


def repairs(schema: OutputSchema[object] | None, past: Past) -> dict[int, str]:
    """Return the messages that showed the model the errors of its answers, by the number of the turn before them."""
    said: dict[int, str] = {}
    for number, turn in enumerate(past.turns[:-1], start=1):
        if schema is not None and not turn.reply.tool_calls:
            try:
                parse_output(turn.reply.text, schema)
            except OutputError as error:
                said[number] = repair_prompt(error, schema)
    return said
