"""A request as a script sees it, and the checks that a server makes before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from pydantic import JsonValue

from batch_agent.messages import Content, Image, JsonObject, Message, Part, Role, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Request:
    """``number`` counts requests from 0 in order of arrival; ``raw`` is the original body, for tests of bytes."""

    number: int
    path: str
    body: JsonObject
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain a key
    raw: bytes = field(default=b"", repr=False)

    @property
    def messages(self) -> list[JsonObject]:
        return _objects(self.body.get("messages"))

    @property
    def turn(self) -> int:
        """Return how many answers this conversation already has."""
        return sum(1 for message in self.messages if message.get("role") == "assistant")

    @property
    def text(self) -> str:
        """Return the text of the last message, of any role."""
        return content_text(self.messages[-1].get("content")) if self.messages else self.prompts[-1]

    @property
    def model(self) -> str:
        return str(self.body.get("model") or "")

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Return whether to send usage; without a stream it is always sent."""
        options = self.body.get("stream_options")
        return not self.streamed or (isinstance(options, dict) and options.get("include_usage") is True)

    @property
    def prompts(self) -> list[str]:
        """Return the prompts of ``/v1/completions``: one or several."""
        prompt = self.body.get("prompt")
        return [str(part) for part in prompt] if isinstance(prompt, list) else [str(prompt or "")]

    @property
    def max_tokens(self) -> int | None:
        for key in ("max_completion_tokens", "max_tokens"):
            if isinstance(value := self.body.get(key), int):
                return value
        return None

    @property
    def schema(self) -> JsonObject | None:
        """Return the JSON schema that the answer must fit."""
        form = self.body.get("response_format")
        named = form.get("json_schema") if isinstance(form, dict) else None
        schema = named.get("schema") if isinstance(named, dict) else None
        return schema if isinstance(schema, dict) else None

    @property
    def tool_choice(self) -> JsonValue:
        """Return the tool choice in the format of chat requests."""
        return self.body.get("tool_choice")

    @property
    def tools(self) -> list[ToolSpec]:
        tools = []
        for tool in _objects(self.body.get("tools")):
            if isinstance(function := tool.get("function"), dict):
                parameters = function.get("parameters")
                tools.append(
                    ToolSpec(
                        str(function.get("name") or ""),
                        str(function.get("description") or ""),
                        parameters if isinstance(parameters, dict) else {"type": "object"},
                    )
                )
        return tools

    def conversation(self) -> list[Message]:
        """Return the messages as values."""
        return [_message(message) for message in self.messages]


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
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _message(wire: JsonObject) -> Message:
    calls = []
    for call in _objects(wire.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict):
            name, arguments = str(function.get("name") or ""), str(function.get("arguments") or "")
            calls.append(ToolCall(str(call.get("id") or ""), name, arguments))
    role = wire.get("role")
    known = cast(Role, role if role in ("system", "assistant", "tool") else "user")
    return Message(known, _content(wire.get("content")), tuple(calls), str(wire.get("tool_call_id") or ""))


def _content(content: JsonValue) -> Content:
    """Return the content; as parts only if there is a picture among them."""
    parts = [_part(part) for part in _objects(content)]
    return tuple(parts) if any(isinstance(part, Image) for part in parts) else content_text(content)


def _part(part: JsonObject) -> Part:
    image = part.get("image_url")
    return Image(str(image.get("url"))) if isinstance(image, dict) else str(part.get("text") or "")


def _objects(value: JsonValue) -> list[JsonObject]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
