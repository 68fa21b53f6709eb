"""How large prompts are: in bytes, and in tokens as far as a server has counted their beginnings.

A prompt grows from turn to turn, and begins like those of all other rows. So most of it was counted before: as the
prompt of the turn before, or in the shortest prompt that any row had so far.
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

MESSAGE_BYTES = 16  # a role, an id and the marks that a template writes around a message or a call


@dataclass(slots=True, eq=False)
class _Shape:
    """What is known of the requests of one shape."""

    size: int  # bytes, beside the messages
    shared: WeakKeyDictionary[Conversation, Counted]  # what all rows begin with
    latest: WeakKeyDictionary[Conversation, Counted]  # of each conversation, its latest prompt


class PromptSizes:
    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[RequestShape, _Shape] = WeakKeyDictionary()

    def prompt_bytes(self, request: ModelRequest) -> int:
        return self._shape(request.shape).size + sum(map(_message_bytes, request.conversation.messages))

    def known(self, request: ModelRequest) -> Counted | None:
        """The longest beginning of its prompt that was counted before."""
        shape, conversation = self._shape(request.shape), request.conversation
        found = shape.latest.get(conversation)
        if found is None and conversation.parent is not None:
            found = shape.shared.get(conversation.parent)
        return found

    def learn(self, request: ModelRequest, prompt_bytes: int, usage: Usage) -> None:
        """``prompt_bytes`` is what the prompt had when it was sent."""
        if not usage.prompt_tokens:
            return
        shape, conversation = self._shape(request.shape), request.conversation
        # Reasoning is sent back on some wires, sealed, and then counts as prompt.
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
    """Tools, and a schema that the server keeps: providers write it into the prompt too."""
    schema = 0 if shape.schema is None else len(to_json(shape.schema))
    return schema + sum(size_bytes(tool_text(tool)) for tool in shape.tools)
