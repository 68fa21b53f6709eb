"""From a prepared run to its session at a run directory: which of its parts decide whether recorded answers count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue

from batch_agent.engine.prepare import Prepared
from batch_agent.spec import BatchSpec
from batch_agent.store.keys import fingerprint
from batch_agent.store.rundir import State
from batch_agent.store.session import Resuming, Session

# How a run ends, in the words of its directory.
RECORDED_STATES: Mapping[str, State] = {
    "complete": "complete",
    "drained": "interrupted",
    "cancelled": "interrupted",
    "failed": "failed",
    "out of budget": "out of budget",
    "unreachable": "unreachable",
}


async def open_session(spec: BatchSpec) -> Session | None:
    """None without a run directory."""
    if spec.run_dir is None:
        return None
    retry = (spec.retry_failed,) if isinstance(spec.retry_failed, str) else spec.retry_failed
    resuming = Resuming(
        resume=spec.resume or spec.force_resume,
        force=spec.force_resume,
        retry=retry,
    )
    return await Session.open(Path(spec.run_dir), resuming)


async def begin_session(
    session: Session,
    prepared: Prepared,
    command: Mapping[str, JsonValue] | None,
    *,
    spent: Callable[[], tuple[int, float | None]],
    on_backlog: Callable[[bool], None],
) -> None:
    facts: dict[str, JsonValue] = {
        "model": prepared.model,
        "backend": prepared.backend.name,
        "total": prepared.plan.total,
    }
    if command is not None:
        facts["command"] = dict(command)
    await session.begin(fingerprint_of(prepared), facts, spent=spent, on_backlog=on_backlog)


def fingerprint_of(prepared: Prepared) -> bytes:
    shapes = prepared.shapes
    return fingerprint(
        task=prepared.spec.task,
        system=prepared.plan.own_system,
        shapes=(shapes.first, shapes.later, shapes.repair),
        tool_versions={tool.name: tool.version for tool in prepared.tools},
    )
