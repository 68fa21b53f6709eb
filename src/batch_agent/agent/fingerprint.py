"""Fingerprints of a run: which of its parts decide whether recorded answers are still valid.

Options that only bound an answer (max_tokens, max_turns, retries, time limits) are not among them: a complete answer
stays valid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from batch_agent.agent.prepare import Prepared, with_model
from batch_agent.foreign import name_of
from batch_agent.messages import JsonObject
from batch_agent.record.keys import KEY_BYTES, fingerprint
from batch_agent.record.rundir import recorded_options

AnyWorker = Callable[..., Awaitable[Any]]
RAISED = "raised_from"  # fact of a run: the max_tokens of earlier sessions, if it is higher now


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
        samples=None if prepared.voting is None else [prepared.spec.samples, prepared.spec.seed],
    )


def rows_under(prepared: Prepared, worker: AnyWorker | None = None, *, part: bool = False) -> bytes:
    """Return the digest from which the keys of a run's rows start: its fingerprint.

    Rows of a user's worker are found even after changes, because its requests and calls are found by content, and none
    may be paid or written twice. As a ``part`` of another run, the digest includes the worker's name, because other
    workers may have the same rows.
    """
    if prepared.spec.worker is None:
        return fingerprint_of(prepared, worker)
    name = name_of(prepared.spec.worker) if part else ""
    return blake2b(f"worker {name}".encode(), digest_size=KEY_BYTES).digest()


def under_record(prepared: Prepared, facts: JsonObject) -> Prepared:
    """Return a resumed run with the max_tokens in the ``facts`` of its record, if the option was raised since."""
    before, now = recorded_options(facts).get("max_tokens"), prepared.spec.max_tokens
    raised = facts.get(RAISED) if facts.get("state") != "complete" else None
    bounds = [bound for bound in (raised, before) if isinstance(bound, int) and (now is None or bound < now)]
    return replace(prepared, shapes=replace(prepared.shapes, raised_from=max(bounds, default=None)))


def matched(prepared: Prepared, facts: JsonObject, worker: AnyWorker | None = None) -> tuple[Prepared, bool]:
    """Return a resumed run as its record has it, with the recorded model if it names none; and whether it asks what is
    recorded."""
    if prepared.model is None:
        prepared = with_model(prepared, str(facts.get("model")))
    prepared = under_record(prepared, facts)
    return prepared, fingerprint_of(prepared, worker).hex() == facts.get("fingerprint")
