"""Files and batches as the APIs of OpenAI and Anthropic write them, and what their requests may contain. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pydantic import JsonValue

from batch_agent.door import RequestRefused
from batch_agent.messages import JsonObject
from batch_agent.serve.catalog import ServedBatch, StoredFile, label_of
from batch_agent.serve.logs import log_event

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Limits of metadata.
MOST_PAIRS = 16
MOST_NAME = 64
MOST_VALUE = 512
EXPIRY = (3600, 2_592_000)  # seconds that an ``expires_after`` may have
EVENTS = {"completed", "failed", "expired", "cancelled"}


def seconds_in(text: str) -> float | None:
    """Return the seconds of a text such as "30s", "5m", "2h" or "7d"; None for another text."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd])", text)
    return None if found is None or not float(found[1]) else float(found[1]) * UNITS[found[2]]


# OpenAI


def file_object(file: StoredFile) -> JsonObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created),
        "expires_at": None if file.expires is None else int(file.expires),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: ServedBatch, estimate: float | None) -> JsonObject:
    known = batch.usage
    usage: JsonObject = {
        "input_tokens": known.get("input_tokens", 0),
        "input_tokens_details": {"cached_tokens": known.get("cached_tokens", 0)},
        "output_tokens": known.get("output_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": known.get("reasoning_tokens", 0)},
        "total_tokens": known.get("input_tokens", 0) + known.get("output_tokens", 0),
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": [*batch.errors]} if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file or None,
        "error_file_id": batch.error_file or None,
        "created_at": int(batch.created),
        "expires_at": int(batch.deadline),
        **{f"{name}_at": _whole(batch.times.get(name)) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": usage,
        "metadata": None if batch.metadata is None else dict(batch.metadata),
        "x_estimated_completion_at": _whole(estimate),
    }


def summary_of(batch: ServedBatch) -> str:
    """Return the progress of a batch as text for people: '36 of 80 done, 44 cancelled'."""
    failed = batch.failed - batch.cancelled - batch.expired
    rest = {"failed": failed, "cancelled": batch.cancelled, "expired": batch.expired}
    parts = [f"{count} {name}" for name, count in rest.items() if count > 0]
    return ", ".join([f"{batch.completed} of {batch.total} done", *parts])


def log_batch(batch: ServedBatch) -> None:
    """Log the state of a batch."""
    fields: JsonObject = {"batch": batch.id, "tenant": label_of(batch.tenant), "batch_status": batch.status}
    log_event("batch", f"{batch.id} {batch.status}: {summary_of(batch)}", fields)


def shown_beside(batch: ServedBatch) -> JsonObject:
    """Return the fields that people see of a batch in addition to those of OpenAI's API."""
    counts = {"cancelled": batch.cancelled, "expired": batch.expired}
    return {"tenant": label_of(batch.tenant), "api": batch.wire, "summary": summary_of(batch), **counts}


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)


def read_metadata(value: JsonValue) -> dict[str, str] | None:
    """Return the metadata of a batch. Raises RequestRefused."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestRefused(400, "metadata must be an object", param="metadata")
    if len(value) > MOST_PAIRS:
        told = f"metadata has {len(value)} pairs: at most {MOST_PAIRS} are allowed"
        raise RequestRefused(400, told, param="metadata")
    for name, text in value.items():
        if not isinstance(text, str):
            raise RequestRefused(400, f"metadata.{name} must be a string", param=f"metadata.{name}")
        if len(name) > MOST_NAME or len(text) > MOST_VALUE:
            told = f"metadata: names have at most {MOST_NAME} characters, and values {MOST_VALUE}"
            raise RequestRefused(400, told, param=f"metadata.{name[:MOST_NAME]}")
    return {name: str(text) for name, text in value.items()}


def read_expiry(value: JsonValue, param: str) -> float | None:
    """Return the seconds of an ``expires_after``. Raises RequestRefused."""
    if value is None:
        return None
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("anchor") != "created_at" or type(seconds) is not int:
        told = f'{param} must have an anchor "created_at" and a whole number of seconds'
        raise RequestRefused(400, told, param=param)
    if not EXPIRY[0] <= seconds <= EXPIRY[1]:
        raise RequestRefused(400, f"{param}.seconds must be from {EXPIRY[0]} to {EXPIRY[1]}", param=f"{param}.seconds")
    return float(seconds)


def read_limit(query: Mapping[str, str], most: int, default: int) -> int:
    text = query.get("limit", str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise RequestRefused(400, f"limit must be a whole number from 1 to {most}", param="limit")
    return int(text)


def page_object(items: Sequence[JsonObject], *, more: bool) -> JsonObject:
    ends: JsonObject = {"first_id": None, "last_id": None}
    if items:
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return {"object": "list", "data": [*items], **ends, "has_more": more}


def notice_of(batch: ServedBatch, now: float) -> JsonObject | None:
    """Return the document that a webhook receives about a batch that has ended; None if there is no such document."""
    if batch.status not in EVENTS:
        return None
    return {
        "id": f"evt_{batch.id.rpartition('_')[2]}",
        "object": "event",
        "created_at": int(now),
        "type": f"batch.{batch.status}",
        "data": {"id": batch.id},
    }


# Anthropic


def message_batch_object(batch: ServedBatch, address: str) -> JsonObject:
    over = batch.is_over
    status = "ended" if over else "canceling" if batch.status == "cancelling" or batch.stop == "cancelled" else None
    counts: JsonObject = {
        "processing": 0 if over else batch.total - batch.completed - batch.failed,
        "succeeded": batch.completed,
        "errored": batch.failed - batch.cancelled - batch.expired,
        "canceled": batch.cancelled,
        "expired": batch.expired,
    }
    if not over:  # as the real API: the numbers are there when the batch has ended
        counts = {**counts, "succeeded": 0, "errored": 0, "processing": batch.total}
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status or "in_progress",
        "request_counts": counts,
        "created_at": _date(batch.created),
        "expires_at": _date(batch.deadline),
        "ended_at": _date(batch.ended),
        "cancel_initiated_at": _date(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"{address}/v1/messages/batches/{batch.id}/results" if over else None,
    }


def _date(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
