"""Reads a server's list of models, and explains a refused model name. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from batch_agent.backends.http.wire import json_of
from batch_agent.errors import Rejected
from batch_agent.messages import JsonObject

MOST_SHOWN = 12
# The words of DeepSeek, Mistral, OpenRouter and others, with status 400.
_UNKNOWN_MODEL = re.compile(
    r"model\b.{0,80}\b(not exist|not found)|\b(invalid|unknown|no such|not a valid) model\b", re.IGNORECASE | re.DOTALL
)


def read_models(body: bytes) -> list[str] | None:
    """Return the models' names; None if the body is not a list of models."""
    entries = read_entries(body)
    return None if entries is None else list(entries)


def read_entries(body: bytes) -> dict[str, JsonObject] | None:
    """Return the entries of a list of models by name; None if the body is not a list of models."""
    document = json_of(body)
    entries = document.get("data") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return None
    found = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    return {str(entry["id"]): entry for entry in found}


def may_be_unknown(refusal: Rejected) -> bool:
    """Return whether the model's name may be the reason for a refusal."""
    return refusal.status == 404 or (refusal.status == 400 and _UNKNOWN_MODEL.search(str(refusal)) is not None)


def no_such_model(model: str, names: Sequence[str], place: str) -> str | None:
    """Return the message for a refused model; None if the server has it."""
    known = {name: name.rpartition("models/")[2] for name in names}
    if not names or model in names or model in known.values():
        return None
    near = difflib.get_close_matches(model, names, n=MOST_SHOWN, cutoff=0.5)
    shown = near + [name for name in names if name not in near][: max(0, MOST_SHOWN - len(near))]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"there is no model {model!r} at {place}{hint}; it has {', '.join(shown)}{more}"
