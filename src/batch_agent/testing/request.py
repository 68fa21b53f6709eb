"""A request as a script sees it, and the checks that a server makes before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import mapping, objects_of, string_of
from batch_agent.dispatch.control import CONTROL_WORDS
from batch_agent.gateway.chat import ChatDialect
from batch_agent.gateway.client_request import ClientDialect
from batch_agent.messages import JsonObject, Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Request:
    """``number`` counts requests from 0 in order of arrival; ``raw`` is the original body, for tests of bytes."""

    dialect: ClassVar[ClientDialect] = ChatDialect()

    number: int
    path: str
    body: JsonObject
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain a key
    raw: bytes = field(default=b"", repr=False)

    @property
    def messages(self) -> list[JsonObject]:
        return objects_of(self.body.get("messages"))

    @property
    def turn(self) -> int:
        """Return how many answers this conversation already has."""
        return sum(1 for message in self.messages if message.get("role") == "assistant")

    @property
    def text(self) -> str:
        """Return the text of the last message, of any role."""
        return content_text(self.messages[-1].get("content")) if self.messages else self.prompts[-1]

    @property
    def is_control(self) -> bool:
        """Return whether it is a control request, which belongs to no row."""
        return CONTROL_WORDS in self.text

    @property
    def model(self) -> str:
        return str(self.body.get("model") or "")

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Return whether to send usage; without a stream it is always sent."""
        return not self.streamed or mapping(self.body.get("stream_options")).get("include_usage") is True

    @property
    def prompts(self) -> list[str]:
        """Return the prompts of ``/v1/completions``: one or several."""
        prompt = self.body.get("prompt")
        return [str(part) for part in prompt] if isinstance(prompt, list) else [str(prompt or "")]

    @property
    def max_tokens(self) -> int | None:
        return self.shape.max_tokens

    @property
    def schema(self) -> JsonObject | None:
        """Return the JSON schema that the answer must fit."""
        return self.shape.schema

    @property
    def tool_choice(self) -> JsonValue:
        """Return the tool choice: a keyword, or a tool's name."""
        return self.shape.tool_choice

    @property
    def tools(self) -> list[ToolSpec]:
        return [*self.shape.tools]

    def conversation(self) -> list[Message]:
        """Return the messages as values."""
        return self.dialect.read_messages(self.body, []) if self.messages else []

    @property
    def shape(self) -> RequestShape:
        """Return everything except the messages, by the names of RequestShape."""
        return self.dialect.read_kind(self.body, "").shape


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    message: str
    param: str | None = None


def refusal(request: Request, models: list[str] | None) -> Refusal | None:
    """Return what a real server would refuse in the request, or None."""
    if models is not None and request.model not in models:
        return Refusal(404, f"The model `{request.model}` does not exist.", "model")
    if request.path.endswith("/chat/completions") and not request.messages:
        return Refusal(400, "messages must be a list of at least one message", "messages")
    if request.path.endswith("/v1/completions") and not request.body.get("prompt"):
        return Refusal(400, "prompt must be a text or a list of texts", "prompt")
    limit = request.body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        return Refusal(400, f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    return None


def content_text(content: JsonValue) -> str:
    """Return a message's content, text or parts, as text."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in objects_of(content))
    return string_of(content)
