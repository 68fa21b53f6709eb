"""The models that a server has: its list read, and what to tell who asked for another. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from batch_agent.backends.http.wire import json_of
from batch_agent.errors import Rejected
from batch_agent.messages import JsonObject

MOST_SHOWN = 12
# As DeepSeek, Mistral, OpenRouter and others say it, with a 400.
_UNKNOWN_MODEL = re.compile(
    r"model\b.{0,80}\b(not exist|not found)|\b(invalid|unknown|no such|not a valid) model\b", re.IGNORECASE | re.DOTALL
)


def read_models(body: bytes) -> list[str] | None:
    """Returns the models' names; None if the body is no list of models."""
    entries = read_entries(body)
    return None if entries is None else list(entries)


def read_entries(body: bytes) -> dict[str, JsonObject] | None:
    """Returns the entries of a list of models by name; None if the body is no list of models."""
    document = json_of(body)
    entries = document.get("data") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return None
    found = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    return {str(entry["id"]): entry for entry in found}


def may_be_unknown(refusal: Rejected) -> bool:
    """Whether a refusal may be for want of the model."""
    return refusal.status == 404 or (refusal.status == 400 and _UNKNOWN_MODEL.search(str(refusal)) is not None)


def no_such_model(model: str, names: Sequence[str], place: str) -> str | None:
    """What to say of a model that was refused; None where it is not for want of it."""
    known = {name: name.rpartition("models/")[2] for name in names}
    if not names or model in names or model in known.values():
        return None
    near = difflib.get_close_matches(model, names, n=MOST_SHOWN, cutoff=0.5)
    shown = near + [name for name in names if name not in near][: max(0, MOST_SHOWN - len(near))]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"there is no model {model!r} at {place}{hint}; it has {', '.join(shown)}{more}"
