"""Sizes of prompts: in bytes, and in tokens as far as a server has counted a prefix of them.

A prompt grows from turn to turn, and starts with the same prefix as all other rows. So most of it was counted before:
in the previous turn, or in the shortest prompt of any row so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from pydantic_core import to_json

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.budget import content_bytes, size_bytes
from batch_agent.compiler.plan import tool_text
from batch_agent.messages import Conversation, Message, Usage
from batch_agent.scheduler.budget import Counted

MESSAGE_BYTES = 16  # a role, an id and the markers that a chat template adds per message or call


@dataclass(slots=True, eq=False)
class _Shape:
    """What is known about requests of one shape."""

    size: int  # bytes, without the messages
    shared: WeakKeyDictionary[Conversation, Counted]  # the prefix that all rows share
    latest: WeakKeyDictionary[Conversation, Counted]  # the latest prompt of each conversation


class PromptSizes:
    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[RequestShape, _Shape] = WeakKeyDictionary()

    def prompt_bytes(self, request: ModelRequest) -> int:
        return self._shape(request.shape).size + sum(map(_message_bytes, request.conversation.messages))

    def known(self, request: ModelRequest) -> Counted | None:
        """Return the longest prefix of the prompt that was counted before."""
        shape, conversation = self._shape(request.shape), request.conversation
        found = shape.latest.get(conversation)
        if found is None and conversation.parent is not None:
            found = shape.shared.get(conversation.parent)
        return found

    def learn(self, request: ModelRequest, prompt_bytes: int, usage: Usage) -> None:
        """Learn from an answer. ``prompt_bytes`` is the size of the prompt when it was sent."""
        if not usage.prompt_tokens:
            return
        shape, conversation = self._shape(request.shape), request.conversation
        # Some wires send encrypted reasoning back; it then counts as prompt.
        shape.latest[conversation] = Counted(prompt_bytes, usage.prompt_tokens + usage.reasoning_tokens)
        if (parent := conversation.parent) is not None:
            least = shape.shared.get(parent)
            if least is None:
                shape.shared[parent] = Counted(
                    shape.size + sum(map(_message_bytes, parent.messages)), usage.prompt_tokens
                )
            elif usage.prompt_tokens < least.tokens:
                shape.shared[parent] = Counted(least.prompt_bytes, usage.prompt_tokens)

    def _shape(self, shape: RequestShape) -> _Shape:
        known = self._shapes.get(shape)
        if known is None:
            known = _Shape(_shape_bytes(shape), WeakKeyDictionary(), WeakKeyDictionary())
            self._shapes[shape] = known
        return known


def _message_bytes(message: Message) -> int:
    size = MESSAGE_BYTES + content_bytes(message.content)
    for call in message.tool_calls:
        size += MESSAGE_BYTES + size_bytes(call.name) + size_bytes(call.arguments)
    return size


def _shape_bytes(shape: RequestShape) -> int:
    """Return the bytes of the tools and of the schema. Providers write an enforced schema into the prompt too."""
    schema = 0 if shape.schema is None else len(to_json(shape.schema))
    return schema + sum(size_bytes(tool_text(tool)) for tool in shape.tools)
