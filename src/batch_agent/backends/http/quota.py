"""Reads a provider's rate-limit headers: requests and tokens per minute, what remains, and when it resets.

Two families of names are in use: OpenAI's with durations (``6m0s``, ``20ms``; Azure sends plain seconds, Groq
fractions), and Anthropic's with timestamps (RFC 3339). Unreadable values are ignored; nothing here raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from batch_agent.messages import Allowance, Quota

_Names = tuple[str, tuple[str, str, str]]  # Quota's field, and the headers for limit, remaining and reset


def _names(form: str, kinds: Mapping[str, str]) -> tuple[_Names, ...]:
    return tuple(
        (field, (form.format("limit", kind), form.format("remaining", kind), form.format("reset", kind)))
        for kind, field in kinds.items()
    )


_BOTH = {"requests": "requests", "tokens": "tokens"}
_FAMILIES = (
    _names("x-ratelimit-{}-{}", _BOTH),
    _names(
        "anthropic-ratelimit-{1}-{0}",
        _BOTH | {"input-tokens": "prompt_tokens", "output-tokens": "completion_tokens"},
    ),
)
_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|d|h|m|s)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_SECONDS = re.compile(r"\d+(?:\.\d+)?")
_MOMENTS = 1e9  # a number of seconds above this is a Unix timestamp


def read_quota(headers: Mapping[str, str], now: float | None = None) -> Quota | None:
    """Return the quota in the headers, or None. ``now`` is Unix time, for headers with timestamps."""
    found: dict[str, Allowance] = {}
    for family in _FAMILIES:
        for field, (limit, remaining, reset) in family:
            # Every answer passes here, and most have no such headers: two look-ups decide.
            if remaining in headers or limit in headers:
                allowance = Allowance(
                    _count(headers.get(limit)), _count(headers.get(remaining)), _seconds(headers.get(reset), now)
                )
                if allowance.limit is not None or allowance.remaining is not None:
                    found[field] = allowance
    return Quota(**found) if found else None


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    text = text.strip()
    # Longer than any limit; Python refuses to parse much longer ones.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _seconds(text: str | None, now: float | None) -> float | None:
    if text is None:
        return None
    text = text.strip()[:64]
    if _SECONDS.fullmatch(text):
        number = float(text)
        return number if number < _MOMENTS else _until(number, now)
    if _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return _until((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp(), now)


def _until(moment: float, now: float | None) -> float:
    return max(0.0, moment - (time.time() if now is None else now))
