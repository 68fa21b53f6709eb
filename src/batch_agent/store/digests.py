"""What a request asked, as digests: how a resumed agent's request is compared with the recorded one.

A conversation only grows, so digests are chains: what is new is hashed together with the digest of all that came
before. Reasoning and what only a wire can read are left out: they come from recorded answers.

The tool loop asks in a fixed order, and its request is compared with the one recorded at the same place: one hash for
each request, since it is on the hot path. A user's worker may ask in any order, and its request is looked up by digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import orjson

from batch_agent.backends.base import RequestShape
from batch_agent.files.results import to_json
from batch_agent.messages import Message, content_shown
from batch_agent.store.keys import shape_fields

BYTES = 16
SHAPES = 256  # whose digests are remembered
WHOLE, SHORT = 16, 4  # hexadecimal digits: of a whole request, and of a part that only explains a difference
PARTS = ("model", "tools", "output schema", "sampling")
PART_OF = {
    **{"model": "model", "tools": "tools", "tool_choice": "tools"},
    **{"schema": "output schema", "schema_name": "output schema"},
}


@dataclass(frozen=True, slots=True)
class ShapeDigest:
    """``whole`` is of all fields; ``parts`` is a short digest for each of PARTS, one after the other."""

    whole: bytes
    parts: str


class ShapeDigests:
    """The digests of the shapes that a run has asked with, each computed once."""

    def __init__(self) -> None:
        self._known: dict[RequestShape, ShapeDigest] = {}

    def of(self, shape: RequestShape) -> ShapeDigest:
        digest = self._known.get(shape)
        if digest is None:
            if len(self._known) >= SHAPES:  # a worker may ask with ever new ones
                self._known.clear()
            digest = self._known[shape] = _shape_digest(shape)
        return digest


def _shape_digest(shape: RequestShape) -> ShapeDigest:
    fields = shape_fields(shape)
    if shape.schema is not None and shape.tool_choice == "none":
        # Tools that are shown and must not be used are there for the server's cache: it is the same question without.
        fields = {**fields, "tools": (), "tool_choice": None}
    parts: dict[str, dict[str, object]] = {part: {} for part in PARTS}
    for name, value in fields.items():
        parts[PART_OF.get(name, "sampling")][name] = value
    written = [json.dumps(json.loads(to_json(parts[part])), sort_keys=True).encode() for part in PARTS]
    return ShapeDigest(_hash(*written), "".join(_hash(part).hex()[:SHORT] for part in written))


def message_digest(before: bytes, message: Message) -> bytes:
    """The digest of a conversation that goes on with ``message``; ``before`` is of all that comes before it."""
    return _hash(before, _written(message))


def request_digest(conversation: bytes, shape: ShapeDigest) -> str:
    """What a worker's request is found by."""
    return _hash(conversation, shape.whole).hex()


def call_digest(name: str, arguments: str) -> str:
    """What a worker's tool call is found by. The order of the arguments does not matter."""
    with suppress(ValueError):  # the tool will refuse what is not JSON
        arguments = json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    return _hash(name.encode("utf-8", "surrogatepass"), b"\0", arguments.encode("utf-8", "surrogatepass")).hex()


def next_asked(before: bytes, shape: ShapeDigest, new: Sequence[Message]) -> tuple[bytes, str]:
    """The digest of a request of the tool loop, and what is recorded of it. ``before`` is the digest of the request
    before it, ``new`` the messages since."""
    written = [_written(message) for message in new]
    digest = _hash(before, shape.whole, *written)
    return digest, digest.hex()[:WHOLE] + shape.parts + "".join([f"{crc32(text) & 0xFFFF:04x}" for text in written])


def is_same(then: str, now: str) -> bool:
    """Whether two requests, as ``next_asked`` tells them, are the same. One without a digest was recorded by an older
    version, and is accepted."""
    return not then or then[:WHOLE] == now[:WHOLE]


def difference(then: str, now: str, new: Sequence[Message], first: int) -> str:
    """What differs between two requests, in words. ``new`` are the messages of the present one that were added since
    the request before; the first of them is number ``first`` of the conversation, from 1."""
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
    """A message as it is hashed: as it is recorded, its pictures by their marks."""
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
