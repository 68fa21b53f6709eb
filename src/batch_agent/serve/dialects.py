"""The wires of clients, by path: ``/v1/completions`` and ``/v1/embeddings``; the others are the gateway's. Pure.

``/v1/embeddings`` exists only for a backend with the same wire. A completion of one prompt is also written as a message
to any other backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.gateway.chat import FINISHES, ChatDialect
from batch_agent.gateway.client_request import (
    BadRequest,
    ClientDialect,
    ClientRequest,
    Envelope,
    RequestKind,
    number,
    own_document,
    sse,
    string,
    texts,
    whole,
)
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.gateway.responses import ResponsesDialect
from batch_agent.messages import JsonObject, Message, Reply

CHAT = ChatDialect()


class _PlainDialect:
    """A wire of OpenAI's API without a conversation."""

    wire = ""

    def error(self, status: int, message: str, param: str | None = None) -> JsonObject:
        return CHAT.error(status, message, param)

    def error_event(self, status: int, message: str) -> bytes:
        return CHAT.error_event(status, message)

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        own = own_document(reply, self.wire)
        assert own is not None, "only a backend of the same wire gets such a request"
        return own


class CompletionsDialect(_PlainDialect):
    """Completions of a prompt, without messages."""

    wire = "completions"

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        lost = [name for name in ("echo", "suffix", "logprobs", "logit_bias") if body.get(name)]
        lost += [name for name in ("n", "best_of") if body.get(name) not in (None, 1)]
        shape = RequestShape(
            model=string(body.get("model"), "model") or model,
            max_tokens=whole(body, "max_tokens"),
            temperature=number(body, "temperature"),
            top_p=number(body, "top_p"),
            stop=texts(body.get("stop"), "stop"),
        )
        return RequestKind(shape, lost)

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return [Message("user", prompt)]
        if not prompt:
            raise BadRequest("prompt must be a text, or a list of prompts", "prompt")
        lost.append("a prompt that is not one text")
        return [Message("user", "")]

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        if (own := own_document(reply, self.wire)) is not None:
            return own
        finish = FINISHES.get(reply.finish_reason, reply.finish_reason)
        usage = reply.usage
        return {
            "id": f"cmpl-{envelope.name}",
            "object": "text_completion",
            "created": envelope.created,
            "model": envelope.model,
            "choices": [{"index": 0, "text": reply.text, "logprobs": None, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        head = {name: value for name, value in document.items() if name not in ("choices", "usage")}
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            assert isinstance(choice, dict)
            yield sse({**head, "choices": [{**choice, "finish_reason": None}]})
            yield sse({**head, "choices": [{**choice, "text": ""}]})
        options = request.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield sse({**head, "choices": [], "usage": document.get("usage")})
        yield b"data: [DONE]\n\n"


class EmbeddingsDialect(_PlainDialect):
    wire = "embeddings"

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        shape = RequestShape(model=string(body.get("model"), "model") or model)
        return RequestKind(shape, ["embeddings"])

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        given: JsonValue = body.get("input")
        if not given:
            raise BadRequest("input must be a text, or a list of texts", "input")
        first = next((text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str)), "")
        return [Message("user", first)]

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        raise BadRequest("embeddings are not streamed", "stream")


MESSAGES = MessagesDialect()
DIALECTS: Mapping[str, ClientDialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": CompletionsDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/embeddings": EmbeddingsDialect(),
    "/v1/messages": MESSAGES,
}
