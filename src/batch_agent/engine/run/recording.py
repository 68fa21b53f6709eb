"""Connects a prepared run to its session: which parts of the run decide whether recorded answers are valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from pydantic import JsonValue

from batch_agent.engine.agent.loop_context import InnerWorker
from batch_agent.engine.run.prepare import Prepared
from batch_agent.errors import StoreError
from batch_agent.foreign import name_of
from batch_agent.observe.metrics import Metrics
from batch_agent.spec import BatchSpec
from batch_agent.store.base import Account, OpenStore
from batch_agent.store.keys import KEY_BYTES, fingerprint
from batch_agent.store.rundir import State
from batch_agent.store.session import Resuming, RunSession, Session

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


def fingerprint_of(prepared: Prepared, worker: InnerWorker | None = None) -> bytes:
    """Return the fingerprint of a run. ``worker`` is a built-in one; the user's is in the spec. As with tools, a change
    of the worker's code is not detected, but a change of its name is."""
    function = prepared.spec.worker if worker is None else worker
    return fingerprint(
        task=prepared.spec.task,
        template=prepared.spec.template,
        system=prepared.plan.own_system,
        shapes=prepared.shapes.asked,
        tool_versions={tool.name: tool.version for tool in prepared.tools},
        worker=None if function is None else name_of(function),
    )


def rows_under(prepared: Prepared, worker: InnerWorker | None = None, *, part: bool = False) -> bytes:
    """Return the digest that a run's row keys start from: its fingerprint. Rows of a user's worker are found even after
    changes, because its requests and calls are found by content, and none may be paid for or written twice. As a
    ``part`` of another run, the digest includes the worker's name, because other workers may have the same rows."""
    if prepared.spec.worker is None:
        return fingerprint_of(prepared, worker)
    name = name_of(prepared.spec.worker) if part else ""
    return blake2b(f"worker {name}".encode(), digest_size=KEY_BYTES).digest()
