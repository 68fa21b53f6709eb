"""Checks of options against each other: what a BatchSpec refuses although each of its values is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from batch_agent.errors import BackendError, JobError, ToolError, error_types

# Texts that must not be blank, and what to do instead.
NOT_BLANK = {
    "run_dir": "name a directory, or leave it out to record nothing",
    "predictive_prewarm": "name the directory of an earlier run",
    "model": "name one, or leave it out for the one model the server has",
    "id_column": "name a field of the rows, or leave it out",
}


def disagreements(options: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with these options, which are those of a whole BatchSpec."""
    yield from _of_workers(options)
    yield from _of_the_record(options)
    for name, instead in NOT_BLANK.items():
        value = options[name]
        if isinstance(value, str) and not value.strip():
            yield f"{name} is empty: {instead}"
    context, answer = options["model_max_context"], options["min_response_tokens"]
    if isinstance(context, int) and isinstance(answer, int) and context <= answer:
        yield "model_max_context must be larger than min_response_tokens, which is kept for the answer"
    given = [name for name in ("compaction_backend", "compaction_model") if options[name] is not None]
    if given and options["compaction"] != "auto":
        yield f"{given[0]} names a model to write what compaction, which is not auto, does without"


def _of_workers(options: Mapping[str, object]) -> Iterator[str]:
    task, worker, runtime = options["task"], options["worker"], options["runtime"]
    works = isinstance(runtime, str | Mapping) or callable(runtime)  # else it is a backend
    if options["backend"] is not None and runtime is not None and not works:
        yield "backend and a runtime that is a backend mean the same: give one of them"
    if worker is not None and runtime is not None and works:
        yield "worker and runtime both work on rows: give one of them"
    if isinstance(task, str) and not task.strip() and (worker is None or task):
        yield "task is empty: it is the message each agent gets"
    if worker is not None and options["oversized"] != "fail":
        yield f"oversized={options['oversized']!r} is for the tool loop: a worker reads its rows itself"


def _of_the_record(options: Mapping[str, object]) -> Iterator[str]:
    for name in ("resume", "on_change"):
        if options[name] and options["run_dir"] is None:
            yield f"{name} needs run_dir, the directory to resume from"
    if options["predictive_prewarm"] is True and options["run_dir"] is None:
        yield "predictive_prewarm needs an earlier run: give its directory in place of True, or run_dir"
    shared = isinstance(options["run_dir"], str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", options["run_dir"])
    if options["predictive_prewarm"] is True and shared:
        yield "predictive_prewarm needs the directory of an earlier run: this one is not kept in a directory"
    retry = options["retry_failed"]
    named = (retry,) if isinstance(retry, str) else retry if isinstance(retry, Iterable) else ()
    known = error_types(JobError)
    for name in named:
        if name not in known:
            of_rows = (
                known - error_types(ToolError) - {JobError.type, BackendError.type}
            )  # without a worker of the user's
            yield f"retry_failed: there is no error type {name!r}; rows fail with {', '.join(sorted(of_rows))}"
