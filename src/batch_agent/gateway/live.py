"""A streamed answer in a client's dialect, written while its text arrives. Pure, except for the callback on each piece.

The text is written piece by piece. Everything else, tool calls above all, follows when the answer is complete, because
a client acts on a call. If the server breaks off and the request is sent again, the text of the new answer is written
from where the first one ended. If it begins differently, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import ModelRequest
from batch_agent.door import RequestRefused
from batch_agent.gateway.client_request import ClientRequest, Envelope
from batch_agent.messages import JsonObject, Reply

MARK = "\u2063mark of the text\u2063"
DIFFERENT = "the server broke off its answer, and its next answer begins with other words; send the request again"
MORE_THAN_TEXT = ("logprobs", "modalities")  # fields of requests whose answers have more than text and calls


def may_stream(asked: ClientRequest, *, own: bool) -> bool:
    """Return whether the answer can be written while it arrives. ``own``: the backend has the client's wire."""
    if not asked.stream or asked.lost:
        return False
    # Thoughts that a server signs come before the text and must keep their place: such an answer is passed on whole.
    return not own or (asked.dialect.wire == "chat" and not any(map(asked.body.get, MORE_THAN_TEXT)))


class LiveAnswer:
    """A streamed answer. ``put`` gets its events. ``own``: the backend has the client's wire, and gets the request
    unchanged."""

    def __init__(
        self, asked: ClientRequest, envelope: Envelope, put: Callable[[bytes], None], *, own: bool = False
    ) -> None:
        self._asked = asked
        self._envelope = envelope
        self._put = put
        self._own = own
        self._question: ModelRequest | None = None
        self._tries = self._first_try = 0
        self._read = 0  # pieces of the present attempt that were read
        self._written: list[str] = []
        self._piece = b""  # the event of a piece of text, with MARK in place of the text
        self._events = 0

    def follow(self, question: ModelRequest) -> None:
        """Write the text of the answer to this request as it arrives."""
        self._question = question
        self._tries = question.tries
        self._first_try = question.tries
        self._read = 0
        loop, before = asyncio.get_running_loop(), question.on_begin

        def heard(_: bytes = b"") -> None:  # called before the bytes are read
            if before is not None:
                before()
            loop.call_soon(self._advance)

        question.on_begin = heard
        if self._own and (client := question.client) is not None:
            question.relay, fields = heard, client.fields
            if client.wire == "chat":  # the server reports usage only if it is asked to
                question.client = replace(client, fields={**fields, "stream_options": {"include_usage": True}})

    def _advance(self) -> None:
        question = self._question
        assert question is not None
        said = question.said
        if question.tries == self._tries and len(said) >= self._read:
            new = "".join(said[self._read :])
        else:  # another attempt: continue when its text is longer than what was written
            text, written = "".join(said), "".join(self._written)
            new = text[len(written) :] if text.startswith(written) else ""
        if new:
            self._tries = question.tries
            self._read = len(said)
            self._say(new)

    def _say(self, text: str) -> None:
        if not self._piece:
            events = [*self._document_events(Reply(MARK))]
            place = _place(events)
            self._piece = events[place]
            for event in events[:place]:
                self._put(self._numbered(event))
        self._written.append(text)
        self._put(self._numbered(self._piece.replace(_quoted(MARK), _quoted(text))))

    def finish(self, reply: Reply) -> None:
        """Write the rest of the answer."""
        if self._question is not None:
            self._advance()
        if not self._written:
            for event in self._document_events(reply):
                self._put(event)
            return
        written = "".join(self._written)
        if reply.text.startswith(written):
            if len(reply.text) > len(written):
                self._say(reply.text[len(written) :])
        elif self._question is not None and self._question.tries > self._first_try + 1:
            self._put(self._asked.dialect.error_event(RequestRefused(502, DIFFERENT)))
            return
        events = [*self._document_events(replace(reply, text=MARK, sealed=None))]
        for event in events[_place(events) + 1 :]:
            self._put(self._numbered(event.replace(_quoted(MARK), _quoted(reply.text))))

    def _document_events(self, reply: Reply) -> Iterator[bytes]:
        asked = self._asked
        document = asked.dialect.document(reply, asked, self._envelope)
        return asked.dialect.events(document if reply.text != MARK else _text_first(document), asked)

    def _numbered(self, event: bytes) -> bytes:
        """Return the event with its own sequence number, on a wire that has them."""
        if b'"sequence_number":' not in event:
            return event
        head, data, rest = event.partition(b"data: ")
        document = orjson.loads(rest)
        document["sequence_number"] = self._events
        self._events += 1
        return head + data + orjson.dumps(document) + b"\n\n"


def _text_first(document: JsonObject) -> JsonObject:
    """Return the document with the model's text before its reasoning, because the text was already written."""

    def is_later(part: JsonValue) -> bool:
        return _quoted(MARK) not in orjson.dumps(part)

    return {
        name: sorted(value, key=is_later) if name in ("content", "output") and isinstance(value, list) else value
        for name, value in document.items()
    }


def _place(events: list[bytes]) -> int:
    return next(place for place, event in enumerate(events) if _quoted(MARK) in event)


def _quoted(text: str) -> bytes:
    return orjson.dumps(text)
