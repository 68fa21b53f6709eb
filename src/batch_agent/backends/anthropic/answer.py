"""Answers of Anthropic's ``/v1/messages``, whole or streamed, read into a Reply. Pure.

An answer is a list of blocks: text, thinking with a signature, tool calls, and results of the server's own tools. In a
stream, each block is opened, filled and closed; a tool call is complete when its block is closed. An answer is complete
when it has a valid stop reason. If an answer has more than text and tool calls, its blocks are sealed: the next request
sends them back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from pydantic import JsonValue

from batch_agent.backends.anthropic.request import WIRE, fit, is_empty
from batch_agent.backends.base import OnToolCall
from batch_agent.backends.http.wire import (
    EventReader,
    Naming,
    counted,
    echoed_object,
    json_of,
    mapping,
    object_of,
    string_of,
)
from batch_agent.errors import ContextOverflow, Rejected, Truncated
from batch_agent.messages import JsonObject, Reply, Sealed, ToolCall, Usage

PAUSED = "pause_turn"  # the server wants the answer back in order to continue it
_GOOD = {"end_turn", "stop_sequence", "tool_use", PAUSED}
_PLAIN = ("text", "tool_use")


def read_answer(body: bytes, naming: Naming) -> Reply:
    document = object_of(body, naming.faults)
    if document.get("type") == "error" or "error" in document:
        raise naming.faults.reported(document)
    content = document.get("content")
    if not isinstance(content, list):
        raise naming.faults.bad(f"the answer has no content: {naming.faults.clean(body.decode('utf-8', 'replace'))}")
    answer = MessageAnswer(naming)
    for block in content:
        if isinstance(block, dict):
            answer.add(block, arguments_of(block))
    answer.stopped(document)
    answer.use(document.get("usage"))
    answer.model = string_of(document.get("model"))
    return answer.reply()


class AnswerStream(EventReader):
    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        super().__init__(naming, on_tool_call, clock, said)
        self._answer = MessageAnswer(naming, on_tool_call)
        self._open: dict[object, OpenBlock] = {}  # by the server's index

    def finish(self) -> Reply:
        self._close()
        if self._answer.stop is None:
            raise self._unfinished()
        for number in list(self._open):
            self._close_block(number)
        return self._answer.reply(self._first_token)

    def _event(self, name: str, event: JsonObject) -> None:
        match event.get("type"):
            case "content_block_delta":
                block, delta = self._open.get(event.get("index")), event.get("delta")
                if block is None or not isinstance(delta, dict):
                    raise self._faults.bad("the stream continues a block that was not started")
                self._begun()
                if isinstance(text := delta.get("text"), str):
                    self._said.append(text)
                block.extend(delta)
            case "content_block_start":
                block = self._open[event.get("index")] = OpenBlock(mapping(event.get("content_block")))
                if text := block.text:
                    self._said.append(text)
            case "content_block_stop":
                self._close_block(event.get("index"))
            case "message_start":
                begun = mapping(event.get("message"))
                self._answer.use(begun.get("usage"))
                self._answer.model = string_of(begun.get("model"))
            case "message_delta":
                self._answer.stopped(mapping(event.get("delta")))
                self._answer.use(event.get("usage"))
            case "message_stop":
                self._done = True
            case "error":
                raise self._faults.reported(event)

    def _close_block(self, number: object) -> None:
        block = self._open.pop(number, None)
        if block is not None:
            self._answer.add(*block.whole())


class OpenBlock:
    """An incomplete block: its first fields, and the pieces of text added to them."""

    __slots__ = ("_began", "_pieces")

    def __init__(self, began: JsonObject) -> None:
        self._began = began
        self._pieces: dict[str, list[str]] = {}

    @property
    def text(self) -> str:
        return string_of(self._began.get("text"))

    def extend(self, delta: JsonObject) -> None:
        for name, piece in delta.items():
            if isinstance(piece, str) and name != "type":
                self._pieces.setdefault(name, []).append(piece)
            elif name == "citation":
                citations = self._began.get("citations")
                self._began["citations"] = [*(citations if isinstance(citations, list) else []), piece]

    def become(self, kind: str) -> None:
        """Set the type of the block. One wire sends it only later."""
        self._began = {"type": kind}

    def whole(self) -> tuple[JsonObject, str]:
        """Return the block, and the arguments as the model wrote them if it is a tool call."""
        block = dict(self._began)
        given = block.get("input")
        arguments = "".join(self._pieces.pop("partial_json", ())) or (arguments_of(block) if given else "")
        for name, pieces in self._pieces.items():
            block[name] = string_of(block.get(name)) + "".join(pieces)
        return block, arguments


class MessageAnswer:
    """The blocks of one answer, as they are completed."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall | None = None) -> None:
        self._naming = naming
        self._on_tool_call = on_tool_call
        self._blocks: list[JsonObject] = []
        self._calls: list[ToolCall] = []
        self._reported: set[str] = set()  # ids
        self._counts: JsonObject = {}
        self._details: JsonObject = {}
        self.stop: str | None = None
        self.model = ""  # the server's name for the model

    def add(self, block: JsonObject, arguments: str) -> None:
        kind = block.get("type")
        if kind == "tool_use":
            call = self._naming.call(fit(string_of(block.get("id"))), string_of(block.get("name")), arguments)
            block = {**block, "id": call.id}
            self._calls.append(call)
            # A call cut by the token limit also has its block closed: report it now only if it is a whole JSON object.
            if json_of(arguments.encode("utf-8", "surrogatepass")) is not None:
                self._report(call)
        if "input" in block:
            block = {**block, "input": echoed_object(arguments)}
        self._blocks.append(block)

    def stopped(self, told: Mapping[str, JsonValue]) -> None:
        self.stop = string_of(told.get("stop_reason")) or self.stop
        self._details = mapping(told.get("stop_details")) or self._details

    def use(self, counts: JsonValue) -> None:
        """Apply a usage report. A later report includes the earlier ones."""
        self._counts |= {name: count for name, count in mapping(counts).items() if count is not None}

    def reply(self, first_token: float | None = None) -> Reply:
        stop = self._good_stop()
        for call in self._calls:
            self._report(call)
        sealed = None
        if stop == PAUSED or any(block.get("type") not in _PLAIN or block.get("citations") for block in self._blocks):
            sealed = Sealed(WIRE, [_said(block) for block in self._blocks if not is_empty(block)])
        return Reply(
            self._joined("text"),
            tuple(self._calls),
            self._usage(),
            self._joined("thinking"),
            first_token,
            stop,
            sealed=sealed,
            model=self.model,
        )

    def _report(self, call: ToolCall) -> None:
        if self._on_tool_call is not None and call.id not in self._reported:
            self._reported.add(call.id)
            self._on_tool_call(call)

    def _good_stop(self) -> str:
        stop = self.stop
        faults = self._naming.faults
        text = self._joined("text")
        usage = self._usage()
        if stop is None:
            raise faults.bad("the answer has no stop_reason, so it may be incomplete", text=text)
        if stop == "max_tokens":
            count = f" after {usage.completion_tokens} tokens" if usage.completion_tokens else ""
            message = f"{faults.where}: the answer was cut{count} (stop_reason {stop}); give a larger max_tokens"
            raise Truncated(message, text=text, usage=usage, in_call=bool(self._calls))
        if stop == "model_context_window_exceeded":
            message = f"{faults.where}: the answer filled the model's context and was cut (stop_reason {stop})"
            raise ContextOverflow(message, text=text, usage=usage)
        if stop == "refusal":
            why = [string_of(self._details.get(name)) for name in ("category", "explanation")]
            told = faults.clean(": ".join(filter(None, why)))
            message = f"{faults.where}: the model refused to answer (stop_reason {stop}){told and f', {told}'}"
            raise Rejected(message, text=text, usage=usage)
        if stop not in _GOOD:
            raise faults.bad(f"the answer ended with an unknown stop_reason: {faults.clean(stop)}", text=text)
        if stop == "tool_use" and not self._calls:
            raise faults.bad("the stop_reason is tool_use, but the answer has no tool call", text=text)
        return stop

    def _joined(self, kind: str) -> str:
        return "".join(string_of(block.get(kind)) for block in self._blocks if block.get("type") == kind)

    def _usage(self) -> Usage:
        counts = self._counts
        cached = counted(counts, "cache_read_input_tokens")
        written = counted(counts, "cache_creation_input_tokens")
        # Cached tokens are counted apart from the rest of the prompt.
        return Usage(
            counted(counts, "input_tokens") + cached + written,
            cached,
            counted(counts, "output_tokens"),
            counted(counts.get("output_tokens_details"), "thinking_tokens"),
            written,
        )


def _said(block: JsonObject) -> JsonObject:
    """Return the block without empty fields: the API does not accept all of them back."""
    return {name: part for name, part in block.items() if part is not None}


def arguments_of(block: JsonObject) -> str:
    given = block.get("input")
    return given if isinstance(given, str) else orjson.dumps(given or {}).decode()
