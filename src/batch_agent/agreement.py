"""Options that contradict one another: what a single option's check cannot see."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from batch_agent.errors import JobError, error_types


class Checked(Protocol):
    """The options that are looked at; ``BatchSpec`` has them."""

    @property
    def task(self) -> str: ...
    @property
    def model(self) -> str | None: ...
    @property
    def backend(self) -> Any: ...
    @property
    def runtime(self) -> Any: ...
    @property
    def worker(self) -> Callable[..., Any] | None: ...
    @property
    def run_dir(self) -> str | Path | None: ...
    @property
    def resume(self) -> bool: ...
    @property
    def force_resume(self) -> bool: ...
    @property
    def retry_failed(self) -> bool | str | Sequence[str]: ...
    @property
    def predictive_prewarm(self) -> bool | str | Path: ...
    @property
    def oversized(self) -> str: ...
    @property
    def model_max_context(self) -> int | None: ...
    @property
    def min_response_tokens(self) -> int: ...
    @property
    def compaction(self) -> Any: ...


def disagreement(spec: Checked) -> str | None:
    """What is wrong with options that do not go together, or None."""
    works = isinstance(spec.runtime, str | Mapping) or callable(spec.runtime)  # else it is a backend
    if spec.backend is not None and spec.runtime is not None and not works:
        return "backend and a runtime that is a backend mean the same: give one of them"
    if spec.worker is not None and spec.runtime is not None and works:
        return "worker and runtime both work on rows: give one of them"
    if not spec.task.strip() and (spec.worker is None or spec.task):
        return "task is empty: it is the message each agent gets"
    if spec.worker is not None and spec.oversized != "fail":
        return f"oversized={spec.oversized!r} is for the tool loop: a worker reads its rows itself"
    if spec.model is not None and not spec.model.strip():
        return "model is empty: name one, or leave it out for the one model the server has"
    if spec.model_max_context is not None and spec.model_max_context <= spec.min_response_tokens:
        return "model_max_context must be larger than min_response_tokens, which is kept for the answer"
    names = ("compaction_backend", "compaction_model")
    given = [name for name in names if getattr(spec, name) is not None]
    if given and spec.compaction != "auto":
        return f"{given[0]} names a model to write what compaction, which is not auto, does without"
    return _about_the_record(spec)


def _about_the_record(spec: Checked) -> str | None:
    for name in ("resume", "force_resume"):
        if getattr(spec, name) and spec.run_dir is None:
            return f"{name} needs run_dir, the directory to resume from"
    if isinstance(spec.run_dir, str) and not spec.run_dir.strip():
        return "run_dir is empty: name a directory, or leave it out to record nothing"
    shared = isinstance(spec.run_dir, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", spec.run_dir)
    if spec.predictive_prewarm is True and spec.run_dir is None:
        return "predictive_prewarm needs an earlier run: give its directory in place of True, or run_dir"
    if isinstance(spec.predictive_prewarm, str) and not spec.predictive_prewarm.strip():
        return "predictive_prewarm is empty: name the directory of an earlier run"
    if spec.predictive_prewarm is True and shared:
        return "predictive_prewarm needs the directory of an earlier run: this one is not kept in a directory"
    retry = (spec.retry_failed,) if isinstance(spec.retry_failed, str) else spec.retry_failed
    known = error_types(JobError)
    for name in () if isinstance(retry, bool) else retry:
        if name not in known:
            return f"retry_failed: there is no error type {name!r}; there are {', '.join(sorted(known))}"
    return None
