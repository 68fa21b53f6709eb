"""Answers of Bedrock's ``converse`` and ``converse-stream``, read into a Reply. Pure.

The blocks are those of Anthropic's wire under other names, so they are renamed and read as such. A stream consists of
frames with checksums, each an event or an error; boto's own parser reads them.
"""

from __future__ import annotations

from collections.abc import Callable

from botocore.eventstream import EventStreamBuffer, ParserError
from pydantic import JsonValue

from batch_agent.backends.anthropic.answer import AnswerStream, MessageAnswer, OpenBlock, arguments_of
from batch_agent.backends.base import OnToolCall
from batch_agent.backends.http.wire import Naming, mapping, object_of
from batch_agent.messages import JsonObject, Reply

_STOPS = {"guardrail_intervened": "refusal", "content_filtered": "refusal"}
_COUNTS = {
    "inputTokens": "input_tokens",
    "outputTokens": "output_tokens",
    "cacheReadInputTokens": "cache_read_input_tokens",
    "cacheWriteInputTokens": "cache_creation_input_tokens",
}


def read_answer(body: bytes, naming: Naming) -> Reply:
    document = object_of(body, naming.faults)
    message = mapping(mapping(document.get("output")).get("message"))
    content = message.get("content")
    if not isinstance(content, list):
        raise naming.faults.bad(f"the answer has no content: {naming.faults.clean(body.decode('utf-8', 'replace'))}")
    answer = MessageAnswer(naming)
    for block in content:
        named = _named(mapping(block))
        answer.add(named, arguments_of(named))
    answer.stopped(_stop(document))
    answer.use(_counts(document.get("usage")))
    return answer.reply()


class ConverseStream(AnswerStream):
    """Reads frames instead of events."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        super().__init__(naming, on_tool_call, clock, said)
        self._frames = EventStreamBuffer()

    def feed(self, chunk: bytes) -> bool:
        self._frames.add_data(chunk)
        try:
            for frame in self._frames:
                told = object_of(frame.payload or b"{}", self._faults)
                self._held += len(frame.payload or b"")
                self._check_held()
                headers = frame.headers
                if headers.get(":message-type") != "event":
                    kind = headers.get(":exception-type") or headers.get(":error-code")
                    raise self._faults.reported({**told, "type": kind})
                self._event(str(headers.get(":event-type")), told)
        except ParserError as error:  # a wrong checksum or an impossible length
            raise self._broken(f"the stream is damaged: {error}") from None
        return self._done

    def _event(self, kind: str, event: JsonObject) -> None:
        number = event.get("contentBlockIndex")
        match kind:
            case "contentBlockStart":
                self._open[number] = OpenBlock(_named(mapping(event.get("start"))))
            case "contentBlockDelta":
                self._delta(number, mapping(event.get("delta")))
            case "contentBlockStop":
                self._close_block(number)
            case "messageStop":
                self._answer.stopped(_stop(event))
            case "metadata":  # comes last, with the usage
                self._answer.use(_counts(event.get("usage")))
                self._done = True

    def _delta(self, number: object, delta: JsonObject) -> None:
        self._begun()
        kind, told = next(iter(delta.items()), ("", None))
        block = self._open.get(number)
        if block is None:  # only tool calls start with an event of their own
            block = self._open[number] = OpenBlock(_named({kind: "" if kind == "text" else {}}))
        if kind == "text" and isinstance(told, str):
            self._said.append(told)
            block.extend({"text": told})
        elif kind == "toolUse":
            block.extend({"partial_json": mapping(told).get("input")})
        elif kind == "reasoningContent":
            names = {"text": "thinking", "signature": "signature", "redactedContent": "data"}
            block.extend({names[name]: piece for name, piece in mapping(told).items() if name in names})
            if "redactedContent" in mapping(told):
                block.become("redacted_thinking")


def _named(block: JsonObject) -> JsonObject:
    """Return the block with the names of Anthropic's wire."""
    if "toolUse" in block:
        use = mapping(block["toolUse"])
        return {"type": "tool_use", "id": use.get("toolUseId"), "name": use.get("name"), "input": use.get("input", {})}
    if "reasoningContent" in block:
        content = mapping(block["reasoningContent"])
        if "redactedContent" in content:
            return {"type": "redacted_thinking", "data": content["redactedContent"]}
        told = mapping(content.get("reasoningText"))
        signed: JsonObject = {"signature": told["signature"]} if "signature" in told else {}
        return {"type": "thinking", "thinking": told.get("text", ""), **signed}
    if "text" in block:
        return {"type": "text", "text": block["text"]}
    return {"type": "other", **block}


def _stop(document: JsonObject) -> JsonObject:
    stop = document.get("stopReason")
    return {"stop_reason": _STOPS.get(stop, stop) if isinstance(stop, str) else None}


def _counts(usage: JsonValue) -> JsonObject:
    return {_COUNTS[name]: count for name, count in mapping(usage).items() if name in _COUNTS}
