"""What a chat server gives with an answer and wants back: signatures of calls (Gemini's), reasoning (DeepSeek's).

It is sealed under this wire's name, and only what a server gave is returned to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batch_agent.messages import JsonObject, Sealed

WIRE = "chat"
SIGNATURES = "extra_content"  # of a call


@dataclass(frozen=True, slots=True)
class Opened:
    fields: JsonObject = field(default_factory=dict)  # of the message
    signatures: JsonObject = field(default_factory=dict)  # of its calls, by their ids

    def of_call(self, call_id: str) -> JsonObject:
        return {SIGNATURES: self.signatures[call_id]} if call_id in self.signatures else {}


NOTHING = Opened()


def sealed_calls(signatures: Mapping[str, object]) -> Sealed | None:
    """Of an answer whose calls, by their ids, came with these."""
    kept: JsonObject = {call_id: value for call_id, value in signatures.items() if isinstance(value, dict)}
    return Sealed(WIRE, {"signatures": kept}) if kept else None


def sealed_with(sealed: Sealed | None, reasoning: str) -> Sealed:
    before = sealed.value if sealed is not None and isinstance(sealed.value, dict) else {}
    return Sealed(WIRE, before | {"fields": {"reasoning_content": reasoning}})


def opened(sealed: Sealed | None) -> Opened:
    if sealed is None or sealed.wire != WIRE or not isinstance(sealed.value, dict):
        return NOTHING
    fields, signatures = sealed.value.get("fields"), sealed.value.get("signatures")
    return Opened(
        fields if isinstance(fields, dict) else {},
        signatures if isinstance(signatures, dict) else {},
    )
