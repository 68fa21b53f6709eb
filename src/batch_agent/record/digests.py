"""Digests of requests. They tell whether a resumed agent sends the same request that was recorded.

A conversation only grows, so digests are chained: new messages are hashed together with the digest of all earlier ones.
Reasoning, and data that only one provider's wire can read, are omitted: they come from recorded answers.

The tool loop sends the requests of its row one after the other. Its chain begins with the key of the row and costs one
hash per request, because it is on the hot path (``next_asked``). A user's worker has any number of conversations, so
its requests have the digest of their content alone (``request_digest``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from zlib import crc32

import orjson

from batch_agent.backends.base import RequestShape
from batch_agent.files.results import to_json
from batch_agent.messages import Message, content_shown
from batch_agent.record.keys import shape_fields

BYTES = 16
SHAPES = 256  # number of shapes whose digests are cached
WHOLE, SHORT = 16, 4  # hexadecimal digits of the digest of a request, and of a part that only explains a difference
PARTS = ("model", "tools", "output schema", "sampling")
PART_OF = {
    **{"model": "model", "tools": "tools", "tool_choice": "tools"},
    **{"schema": "output schema", "schema_name": "output schema"},
}


@dataclass(frozen=True, slots=True)
class ShapeDigest:
    """``whole`` is the digest of all fields. ``parts`` is a short digest for each of PARTS, concatenated."""

    whole: bytes
    parts: str


class ShapeDigests:
    """The digests of the request shapes that a run has used, each computed once. max_tokens only bounds an answer, so
    it is no part of them; records of earlier versions had it (``max_tokens``)."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._known: dict[RequestShape, ShapeDigest] = {}

    def of(self, shape: RequestShape) -> ShapeDigest:
        digest = self._known.get(shape)
        if digest is None:
            if len(self._known) >= SHAPES:  # a worker may use an unlimited number of shapes
                self._known.clear()
            digest = self._known[shape] = _shape_digest(replace(shape, max_tokens=self._max_tokens))
        return digest


def _shape_digest(shape: RequestShape) -> ShapeDigest:
    fields = shape_fields(shape)
    if shape.schema is not None and shape.tool_choice == "none":
        # Tools that are listed but must not be used only serve the server's prefix cache. Without them, the question is
        # the same.
        fields = {**fields, "tools": (), "tool_choice": None}
    parts: dict[str, dict[str, object]] = {part: {} for part in PARTS}
    for name, value in fields.items():
        parts[PART_OF.get(name, "sampling")][name] = value
    written = [json.dumps(json.loads(to_json(parts[part])), sort_keys=True).encode() for part in PARTS]
    return ShapeDigest(_hash(*written), "".join(_hash(part).hex()[:SHORT] for part in written))


def message_digest(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation that continues with ``message``. ``before`` is the digest of all earlier
    messages."""
    return _hash(before, _written(message))


def request_digest(conversation: bytes, shape: ShapeDigest) -> str:
    """Return the digest under which a worker's request is recorded. Format 4 recorded twice as many digits."""
    return _hash(conversation, shape.whole).hex()[:WHOLE]


def next_asked(before: bytes, shape: ShapeDigest, new: Sequence[Message]) -> tuple[bytes, str]:
    """Return the digest of a request of the tool loop, and the text to record for it. ``before`` is the digest of the
    previous request, ``new`` are the messages since."""
    written = [_written(message) for message in new]
    digest = _hash(before, shape.whole, *written)
    return digest, digest.hex()[:WHOLE] + shape.parts + "".join([f"{crc32(text) & 0xFFFF:04x}" for text in written])


def is_same(then: str, now: str) -> bool:
    """Return whether two requests, as ``next_asked`` records them, are the same. A request without a digest was
    recorded by an older version and counts as the same."""
    return not then or then[:WHOLE] == now[:WHOLE]


def difference(then: str, now: str, new: Sequence[Message], first: int) -> str:
    """Return a description of the differences between two requests. ``new`` are the messages of the present request
    that were added since the previous one. The first of them is number ``first`` of the conversation, counted from
    1."""
    before, after = _pieces(then), _pieces(now)
    found = [
        f"the {part} {'differ' if part == 'tools' else 'differs'}"
        for place, part in enumerate(PARTS)
        if before[place] != after[place]
    ]
    said, says = before[len(PARTS) :], after[len(PARTS) :]
    for place in range(max(len(said), len(says))):
        number = first + place
        if place >= len(says):
            found.append(f"message {number} is missing")
        elif place >= len(said):
            found.append(f"message {number} ({new[place].role}) is new")
        elif said[place] != says[place]:
            found.append(f"message {number} ({new[place].role}) differs")
    return ", ".join(found) or "the task, the system prompt or an earlier message differs"


def _pieces(asked: str) -> list[str]:
    return [asked[start : start + SHORT] for start in range(WHOLE, len(asked), SHORT)]


def _hash(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=BYTES).digest()


def _written(message: Message) -> bytes:
    """Return the bytes of a message that are hashed: the recorded form, with images as their placeholders."""
    content = message.content
    value = (
        message.role,
        content if isinstance(content, str) else content_shown(content),
        [(call.id, call.name, call.arguments) for call in message.tool_calls] if message.tool_calls else (),
        message.tool_call_id,
    )
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, which a model can write
        return json.dumps(value).encode("ascii")
