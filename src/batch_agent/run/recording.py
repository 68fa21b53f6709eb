"""Connects a prepared run to its session: which parts of the run decide whether recorded answers are valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from batch_agent.agent.fingerprint import fingerprint_of, rows_under
from batch_agent.agent.loop import InnerWorker
from batch_agent.agent.prepare import Prepared
from batch_agent.errors import StoreError
from batch_agent.observe.metrics import Metrics
from batch_agent.record.base import Account, OpenStore
from batch_agent.record.rundir import State
from batch_agent.record.session import Resuming, RunSession, Session
from batch_agent.spec import BatchSpec

# How a run ends, as its directory calls it.
RECORDED_STATES: Mapping[str, State] = {
    "complete": "complete",
    "drained": "interrupted",
    "cancelled": "interrupted",
    "failed": "failed",
    "out of budget": "out of budget",
    "unreachable": "unreachable",
}


async def open_session(spec: BatchSpec, open_store: OpenStore) -> Session | None:
    """Return the session of a run; None without a run directory."""
    if spec.run_dir is None:
        return None
    retry = (spec.retry_failed,) if isinstance(spec.retry_failed, str) else spec.retry_failed
    resuming = Resuming(resume=spec.resume or spec.force_resume, force=spec.force_resume, retry=retry)
    return await Session.open(Path(spec.run_dir), resuming, open_store)


async def begin_session(
    session: RunSession,
    prepared: Prepared,
    command: Mapping[str, JsonValue] | None,
    worker: InnerWorker | None,
    *,
    account: Account,
    stages: Sequence[str],
    on_backlog: Callable[[bool], None],
    on_overdue: Callable[[bool], None],
) -> None:
    facts: dict[str, JsonValue] = {
        "model": prepared.model,
        "backend": prepared.backend.name,
        "total": prepared.plan.total,
    }
    if stages:
        facts["stages"] = list(stages)
    if command is not None:
        facts["command"] = dict(command)
    await session.begin(
        fingerprint_of(prepared, worker),
        facts,
        rows_under=rows_under(prepared, worker),
        schema=prepared.schema,
        account=account,
        on_backlog=on_backlog,
        on_overdue=on_overdue,
    )


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
    """Reports what an inner run spends, for its own directory. The outer run has the ledger. Its ``session`` records
    the ledger each time this run records something."""

    def __init__(self, metrics: Metrics, session: RunSession | None) -> None:
        self._metrics, self._session = metrics, session

    def so_far(self) -> tuple[int, float | None]:
        return self._metrics.spent()

    def leased(self, error: StoreError | None = None) -> None:
        if self._session is not None:
            self._session.touch()
