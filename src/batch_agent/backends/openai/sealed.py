"""What a chat server sends with an answer and wants back: call signatures (Gemini), reasoning (DeepSeek).

It is sealed under this wire's name; a server gets back only what it sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batch_agent.messages import JsonObject, Sealed

WIRE = "chat"
SIGNATURES = "extra_content"  # field of a call


@dataclass(frozen=True, slots=True)
class Opened:
    fields: JsonObject = field(default_factory=dict)  # of the message
    signatures: JsonObject = field(default_factory=dict)  # of its calls, by id

    def of_call(self, call_id: str) -> JsonObject:
        return {SIGNATURES: self.signatures[call_id]} if call_id in self.signatures else {}


NOTHING = Opened()


def sealed_calls(signatures: Mapping[str, object]) -> Sealed | None:
    """Return the sealed signatures of an answer's calls, by call id."""
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
