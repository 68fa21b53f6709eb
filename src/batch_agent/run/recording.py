"""What a run writes about itself into its record, and how it opens that record."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from batch_agent.agent.prepare import Prepared
from batch_agent.errors import InputError, StoreError
from batch_agent.job import AgentResult, UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.observe.metrics import Metrics
from batch_agent.record.address import StoreAddress, is_store_url
from batch_agent.record.base import Account
from batch_agent.record.codec import FORMAT
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.journal import Journal, to_its_end
from batch_agent.record.memory import MemoryStore
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.row_json import encode_result, encode_row
from batch_agent.record.rundir import State
from batch_agent.record.store import Resuming, RunStore, WorkStore
from batch_agent.run.spec_json import pieces, spec_json
from batch_agent.spec import BatchSpec
from batch_agent.version import __version__

R = TypeVar("R")
logger = logging.getLogger("batch_agent")
# How a run ends, as its record calls it.
RECORDED_STATES: Mapping[str, State] = {
    "complete": "complete",
    "drained": "interrupted",
    "cancelled": "interrupted",
    "failed": "failed",
    "out of budget": "out of budget",
    "unreachable": "unreachable",
}
ROWS = "row_schema"  # the fact that names the class of the rows


def open_record(spec: BatchSpec) -> RunStore:
    """Return the record of a run: in memory, in its directory, or in Redis. Connects to Redis, so it may block."""
    if spec.run_dir is None:
        return MemoryStore()
    if not is_store_url(spec.run_dir):
        return DirectoryStore(Path(spec.run_dir))
    address = StoreAddress.parse(str(spec.run_dir))
    address.refuse_stage()
    store = RedisRunStore.at(address)
    for danger in store.dangers():
        logger.warning("%s: %s. See docs/cluster.md", address, danger)
    return store


async def open_to_feed(
    spec: BatchSpec, open_record: Callable[[BatchSpec], RunStore], outer: RunStore | None, stage: str
) -> RunStore:
    """Return the opened record of a run: its own, or that of a stage of the outer run."""
    if outer is not None and stage:
        store = outer.stage(stage)
    elif spec.run_dir is None:
        store = open_record(spec)
    else:
        store = await in_thread(lambda: open_record(spec))
    if type(store) is MemoryStore:
        return store
    try:
        await in_thread(partial(store.open, resuming_of(spec)))
    except BaseException:
        await in_thread(store.close)
        raise
    return store


async def in_thread(function: Callable[[], R]) -> R:
    """Run a call of the store that may block in a thread. A cancellation waits for its end."""
    calling = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await to_its_end(calling)
        raise


def joining_command(spec: BatchSpec) -> str:
    """Return the command that starts a worker of a run that works on nothing itself; "" for another run."""
    if not spec.feed_only:
        return ""
    place = StoreAddress.parse(str(spec.run_dir)) if is_store_url(spec.run_dir) else spec.run_dir
    return f"batch-agent work {place} --import-from DIR"


def resuming_of(spec: BatchSpec) -> Resuming:
    retry = spec.retry_failed
    kinds = retry if isinstance(retry, bool) else (retry,) if isinstance(retry, str) else tuple(retry)
    return Resuming(resume=spec.resume or spec.force_resume, force=spec.force_resume, retry=kinds)


def facts_of(
    prepared: Prepared, fingerprint: bytes, command: Mapping[str, JsonValue] | None, stages: Sequence[str]
) -> JsonObject:
    """Return what ``run.json`` says when a session begins."""
    began = now_text()
    facts: JsonObject = {
        "state": "running",
        "why": None,
        "fingerprint": fingerprint.hex(),
        "started": began,
        "session_started": began,
        "ended": None,
        "versions": versions(),
        "model": prepared.model,
        "backend": prepared.backend.name,
        "total": prepared.plan.total,
    }
    if stages:
        facts["stages"] = list(stages)
    if prepared.carry:
        facts["carry"] = list(prepared.carry)
    if command is not None:
        facts["command"] = dict(command)
    return facts


def facts_for_workers(prepared: Prepared, first: object) -> JsonObject:
    """Return what a worker in another process needs to prepare the same run. ``first`` is its first input. Raises
    SpecError for an option that other processes cannot use."""
    try:
        shown = "null" if isinstance(first, UnreadableRow) else encode_row(first).decode()
    except InputError:  # this row fails alone
        shown = "null"
    model: JsonObject = {} if prepared.model is None else {"model": prepared.spec.model or prepared.model}
    spec = {**spec_json(prepared), **model}
    return {"spec": spec, "first": shown, "pieces": {**pieces(prepared)}, "asked": asked_json(prepared)}


def asked_json(prepared: Prepared) -> dict[str, JsonValue]:
    """Return what all rows have in common, so that viewers can compute a row's prompt from its input."""
    plan, spec = prepared.plan, prepared.spec
    schema = None if prepared.schema is None else prepared.schema.json_schema
    return {
        "system": plan.system,
        "task": spec.task,
        "template": spec.template,
        "hoisted": [*plan.hoisted],
        "schema": schema,
        "tools": [tool.name for tool in prepared.tools],
    }


class StageAccount(Account):
    """Reports what an inner run spends, for its own record. The outer run has the ledger. Its ``journal`` records the
    ledger each time this run records something."""

    def __init__(self, metrics: Metrics, journal: Journal | None) -> None:
        self._metrics, self._journal = metrics, journal

    def so_far(self) -> tuple[int, float | None]:
        return self._metrics.spent()

    def leased(self, error: StoreError | None = None) -> None:
        if self._journal is not None:
            self._journal.touch()


def encoder(store: WorkStore, prepared: Prepared, worker: int) -> Callable[[AgentResult[object]], object]:
    """Return the function that makes of a result what the store takes: JSON, if it is outside this process."""
    if store.instant:
        return lambda result: result
    messages = prepared.spec.keep != "results"
    return lambda result: encode_result(result, prepared.schema, worker=worker, messages=messages)


def now_text() -> str:
    """Return the current time in the format of ``run.json``."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> JsonObject:
    """Return the versions of the software that records a run."""
    return {
        "batch-agent": __version__,
        "python": platform.python_version(),
        "journal": FORMAT,
    }
