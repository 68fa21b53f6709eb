"""What a test class declares about its wire, by name, and how the contract then compares.

- ``refuses``: options for which ``check`` raises a SpecError that names them.
- ``drops``: options and parts of a conversation that are not sent.
- ``lacks``: what the wire's answers cannot express, or what its peer cannot do; a reply then comes without it.
- ``combines``: whether the server enforces a schema in a request that also offers tools. False: such a request is sent
  without the schema. None: the server is not known, so both are sent if a caller asks for both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from batch_agent.backends.base import ModelRequest
from batch_agent.errors import BackendError, ContextOverflow, RateLimited, Rejected, Unavailable
from batch_agent.messages import Message, ToolCall, Usage
from batch_agent.testing.contract.peer import Heard, Refuse

REFUSABLE = frozenset({"max_tokens", "temperature", "top_p", "seed", "stop", "tool_choice", "schema", "extra_body"})
DROPPABLE = REFUSABLE | {
    "tool_name",  # whose a result is
    "call_ids",  # which call a result belongs to: its place says so
}
LACKABLE = frozenset(
    {
        "reasoning",
        "sealed",
        "several_calls",
        "text_beside_calls",
        "call_ids",  # the backend makes them all
        "broken_arguments",  # a call is one only if its arguments can be read
        "broken_whole",  # ... in an answer that is not streamed: they come as an object
        "usage",  # the engine counts for itself, whatever the script says
        "cached_tokens",
        "reasoning_tokens",
        "cache_write_tokens",
        "statuses",  # errors have types and no HTTP status
        "retry_after",
        "errors_inside",  # an answer that began well has no form for an error
        "parsed_arguments",  # the arguments of earlier calls are not parsed again: they go back as they were written
        "holding",  # the peer cannot stop in the middle of an answer
        "faults",  # an engine inside this process: no connection can break
        "keys",  # the wire has no key, or the test class cannot make a backend with one (``keyed``)
        "kept_connections",  # requests are sent on new connections, on purpose
        "combined_schema",  # the peer cannot see the schema of a request that offers tools
        "garbage",  # a stream has no form in which an event can be damaged
    }
)
_PARTS = ("cached_tokens", "reasoning_tokens", "cache_write_tokens")
REFUSALS: Mapping[Refuse, type[BackendError]] = {
    Refuse(429): RateLimited,
    Refuse(500): Unavailable,
    Refuse(503): Unavailable,
    Refuse(400): Rejected,
    Refuse(401): Rejected,
    Refuse(403): Rejected,
    Refuse(404): Rejected,
    Refuse(422): Rejected,
    Refuse(400, overflow=True): ContextOverflow,
}


class ContractTerms:
    model: ClassVar[str] = "test-model"
    refuses: ClassVar[frozenset[str]] = frozenset()
    drops: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[frozenset[str]] = frozenset()
    combines: ClassVar[bool | None] = False
    finishes: ClassVar[tuple[str, str]] = ("stop", "tool_calls")  # of a complete text, and of complete calls
    reserved: ClassVar[Sequence[str]] = ("messages", "stream")  # what extra_body may not set
    refusals: ClassVar[Mapping[Refuse, type[BackendError]]] = REFUSALS  # those that the peer can give
    choices: ClassVar[Sequence[str]] = ("auto", "none", "required", "search")  # of tools, that the wire knows
    patience: ClassVar[float] = 10.0  # seconds, for what would otherwise never end

    def needs(self, name: str) -> None:
        if name in self.lacks:
            pytest.skip(f"declared: this wire has no {name}, and nothing is left to check without")

    def assert_usage(self, usage: Usage, told: Usage) -> None:
        if "usage" in self.lacks:
            assert usage.prompt_tokens > 0
            assert usage.completion_tokens > 0
        else:
            absent = {part: 0 for part in _PARTS if part in self.lacks}
            assert usage == replace(told, **absent)

    def assert_calls(self, calls: Sequence[ToolCall], told: Sequence[ToolCall]) -> None:
        told = told[:1] if "several_calls" in self.lacks else told
        if "call_ids" in self.lacks:
            assert [(c.name, json.loads(c.arguments)) for c in calls] == [
                (c.name, json.loads(c.arguments)) for c in told
            ]
        else:
            assert tuple(calls) == tuple(told)

    def assert_heard(self, heard: Heard, request: ModelRequest) -> None:
        """Assert that the server understood the conversation that the engine holds, with its calls and results."""
        told = [self._plain(message) for message in request.conversation.messages]
        assert [_lines(message) for message in heard.messages] == [_lines(message) for message in told]

    def _plain(self, message: Message) -> Message:
        message = replace(message, reasoning="", sealed=None)
        if "tool_name" in self.drops:
            message = replace(message, tool_name="")
        if "call_ids" in self.drops:
            calls = tuple(replace(call, id="") for call in message.tool_calls)
            message = replace(message, tool_call_id="", tool_calls=calls)
        return message


def _lines(message: Message) -> list[str]:
    """Return a message in words, so that a difference can be read."""
    lines = [f"{message.role}: {message.content}"]
    if message.role == "tool":
        lines.append(f"is the result of {message.tool_call_id!r}, of the tool {message.tool_name!r}")
    lines += [f"calls {c.name!r} as {c.id!r} with {_value(c.arguments)}" for c in message.tool_calls]
    return lines


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return f"what is not JSON: {arguments}"
