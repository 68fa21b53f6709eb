"""What the simulated model answers: determined by the request alone, so equal requests get equal answers.

The words have no meaning. A plan needs their number, the tool calls, and JSON that fits the schema.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import mapping
from batch_agent.backends.simulated.instances import minimal_instance
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import END, TOKEN_BYTES, count_tokens, encode, encode_call
from batch_agent.messages import Message, ToolCall, ToolSpec

WORDS = ("sim", "ula", "ted", "ans", "wer", "tok", "ens", "and", "the", "rest", "with")


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """``output`` is its tokens, including END; ``cut``: ``max_tokens`` ended it before END."""

    text: str
    calls: tuple[ToolCall, ...]
    output: bytes
    cut: bool

    @property
    def finish_reason(self) -> str:
        return "length" if self.cut else "tool_calls" if self.calls else "stop"

    def text_until(self, tokens: int) -> str:
        """Return the text of the first ``tokens`` tokens; a character in two tokens appears with the second."""
        return self.text.encode()[: tokens * TOKEN_BYTES].decode("utf-8", "ignore")

    def calls_until(self, tokens: int) -> int:
        """Return how many calls are complete after ``tokens`` tokens."""
        position, complete = count_tokens(encode(self.text)), 0
        for call in self.calls:
            position += count_tokens(encode_call(call))
            complete += position <= tokens
        return complete


def chat_answer(model: EngineModel, prompt: bytes, messages: Sequence[Message], shape: RequestShape) -> SimulatedAnswer:
    digest = hashlib.blake2b(b"%d" % model.seed + prompt, digest_size=8).hexdigest()
    tool = _chosen_tool(model, digest, messages, shape)
    if tool is not None:
        value = minimal_instance(tool.parameters or {"type": "object"}, filler=f"simulated-{digest[:4]}")
        call = ToolCall(f"call_{digest}", tool.name, orjson.dumps(value if isinstance(value, dict) else {}).decode())
        return _cut("", (call,), shape.max_tokens)
    if shape.schema is not None:
        text = orjson.dumps(minimal_instance(shape.schema, filler="simulated")).decode()
        return _cut(text, (), shape.max_tokens)
    return text_answer(model, prompt, max_tokens=shape.max_tokens)


def text_answer(model: EngineModel, prompt: bytes, *, max_tokens: int | None = None) -> SimulatedAnswer:
    """Return an answer of ``answer_tokens`` tokens, or fewer if ``max_tokens`` requires it."""
    length = min(model.answer_tokens, max_tokens or model.answer_tokens)
    start = hashlib.blake2b(b"%d" % model.seed + prompt, digest_size=32).digest()
    words = " ".join(WORDS[start[i % 32] % len(WORDS)] for i in range(length))
    size = (length - 1) * TOKEN_BYTES  # the last token is END
    return _cut(f"simulated {start.hex()[:8]} {words}"[: size - 1] + "." if size else "", (), max_tokens)


def _chosen_tool(model: EngineModel, digest: str, messages: Sequence[Message], shape: RequestShape) -> ToolSpec | None:
    tools, choice = shape.tools, shape.tool_choice
    if not tools or choice == "none":
        return None
    if isinstance(choice, dict):
        choice = mapping(choice.get("function")).get("name")
    for tool in tools:
        if tool.name == choice:
            return tool
    called = sum(1 for message in messages if message.tool_calls)
    if choice != "required" and called >= model.tool_calls_per_agent:
        return None
    return tools[int(digest, 16) % len(tools)]


def _cut(text: str, calls: tuple[ToolCall, ...], max_tokens: int | None) -> SimulatedAnswer:
    whole = encode(text) + b"".join(map(encode_call, calls)) + END
    if max_tokens is None or count_tokens(whole) <= max_tokens:
        return SimulatedAnswer(text, calls, whole, cut=False)
    answer = SimulatedAnswer(text, calls, whole[: max_tokens * TOKEN_BYTES], cut=True)
    return SimulatedAnswer(
        answer.text_until(max_tokens), calls[: answer.calls_until(max_tokens)], answer.output, cut=True
    )
