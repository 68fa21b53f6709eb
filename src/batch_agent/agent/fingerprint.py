"""Fingerprints of a run: which parts of it decide whether recorded answers are still valid."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

from batch_agent.agent.prepare import Prepared
from batch_agent.foreign import name_of
from batch_agent.record.keys import KEY_BYTES, fingerprint

AnyWorker = Callable[..., Awaitable[Any]]


def fingerprint_of(prepared: Prepared, worker: AnyWorker | None = None) -> bytes:
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


def rows_under(prepared: Prepared, worker: AnyWorker | None = None, *, part: bool = False) -> bytes:
    """Return the digest that a run's row keys start from: its fingerprint. Rows of a user's worker are found even after
    changes, because its requests and calls are found by content, and none may be paid for or written twice. As a
    ``part`` of another run, the digest includes the worker's name, because other workers may have the same rows."""
    if prepared.spec.worker is None:
        return fingerprint_of(prepared, worker)
    name = name_of(prepared.spec.worker) if part else ""
    return blake2b(f"worker {name}".encode(), digest_size=KEY_BYTES).digest()
