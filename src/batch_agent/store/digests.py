"""What a request asked, as digests: how a resumed agent's request is compared with the recorded one.

A conversation only grows, so its digest is a chain: each message is hashed together with the digest of all messages
before it. Reasoning and what only a wire can read are left out: they come from recorded answers.

The tool loop asks in a fixed order, and its request is compared with the one recorded at the same place. A user's
worker may ask in any order, and its request is looked up by digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakKeyDictionary

import orjson

from batch_agent.backends.base import RequestShape
from batch_agent.files.results import to_json
from batch_agent.messages import Message
from batch_agent.store.keys import shape_fields

BYTES = 16
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
        self._known: WeakKeyDictionary[RequestShape, ShapeDigest] = WeakKeyDictionary()

    def of(self, shape: RequestShape) -> ShapeDigest:
        digest = self._known.get(shape)
        if digest is None:
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
    content = message.content
    shown = (
        content if isinstance(content, str) else [part if isinstance(part, str) else [part.mark] for part in content]
    )
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    return _hash(before, _dump((message.role, shown, calls, message.tool_call_id)))


def request_digest(conversation: bytes, shape: ShapeDigest) -> str:
    """What a worker's request is found by."""
    return _hash(conversation, shape.whole).hex()


def call_digest(name: str, arguments: str) -> str:
    """What a worker's tool call is found by. The order of the arguments does not matter."""
    with suppress(ValueError):  # the tool will refuse what is not JSON
        arguments = json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    return _hash(name.encode("utf-8", "surrogatepass"), b"\0", arguments.encode("utf-8", "surrogatepass")).hex()


def asked_text(conversation: bytes, shape: ShapeDigest, new: Sequence[bytes]) -> str:
    """What is recorded of a request of the tool loop. ``new`` are the digests of the messages since the last one."""
    whole = _hash(conversation, shape.whole).hex()[:WHOLE]
    return f"{whole}{shape.parts}{''.join(digest.hex()[:SHORT] for digest in new)}"


def is_same(then: str, now: str) -> bool:
    """Whether two requests, as ``asked_text`` tells them, are the same. One without a digest was recorded by an older
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
            break  # the digest of each message depends on those before it
    return ", ".join(found) or "the task, the system prompt or an earlier message differs"


def _pieces(asked: str) -> list[str]:
    return [asked[start : start + SHORT] for start in range(WHOLE, len(asked), SHORT)]


def _hash(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=BYTES).digest()


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, which a model can write
        return json.dumps(value).encode("ascii")
