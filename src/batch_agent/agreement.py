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
    "gold": "name a column or a file, or leave it out",
    "by": "name a field of the rows, or leave it out",
    "groups": "name a field of the rows, or leave it out",
    "pilot_key": "give any text, or leave it out for the usual order",
    "promise": "say what the table must keep, such as label.accuracy >= 0.96",
    "beacon": "give a text that was unknown before, or leave it out",
    "id_column": "name a field of the rows, or leave it out",
}
# Options that mean nothing without gold.
OF_GOLD = ("gold_sample", "gold_sealed", "tolerance", "score", "by", "groups", "require")

# Options that say what a promise decides itself, if the last model of a cascade is its truth.
OF_LAST = {
    "escalate": "the audit learns which answers go to the last model, so leave escalate out",
    "pilot": "the rows of the audit go first, so leave pilot out",
    "max_people": "no person is asked, so leave max_people out",
}


def disagreements(options: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with these options, which are those of a whole BatchSpec."""
    yield from _of_workers(options)
    yield from _of_the_record(options)
    yield from _of_samples(options)
    yield from _of_a_promise(options)
    yield from _of_cascades(options)
    for name in OF_GOLD:
        if options[name] and options["gold"] is None and not (name == "tolerance" and options["promise"]):
            yield f"{name} is about a score, and there is no gold: give gold, the right answers of some rows"
    for name in ("pilot_key", "pilot_only"):
        if options[name] and options["pilot"] is None:
            yield f"{name} needs pilot, the number of rows that go first"
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


def _of_a_promise(options: Mapping[str, object]) -> Iterator[str]:
    if options["promise"] is None:
        for name in ("max_people", "truth", "beacon"):
            if options[name] is not None:
                yield f"{name} is about a promise, and there is none: give promise='label.accuracy >= 0.96'"
        return
    if options["pilot_key"] is not None:
        yield "pilot_key and promise exclude each other: the pilot is the head of the audit, whose key is not chosen"
    if options["keep"] == "results":
        yield 'keep="results" and promise exclude each other: the certificate needs the answers of the journal'
    if options["gold_sealed"]:
        yield "gold_sealed and promise exclude each other: leave gold_sealed out"
    if options["truth"] == "last":
        if options["cascade"] is None:
            yield 'truth="last" needs a cascade, whose last model is taken to be right'
        for name, why in OF_LAST.items():
            if options[name] is not None:
                yield f'truth="last" and {name} exclude each other: {why}'
    if options["truth"] == "gold" and (options["gold"] is None or options["pilot"] is None):
        yield (
            'truth="gold" needs gold and pilot: only the gold of a random sample that the run draws itself proves '
            "anything about the table"
        )


def _of_workers(options: Mapping[str, object]) -> Iterator[str]:
    task = options["task"]
    worker = options["worker"]
    runtime = options["runtime"]
    works = _works(runtime)  # else it is a backend
    if options["backend"] is not None and runtime is not None and not works:
        yield "backend and a runtime that is a backend mean the same: give one of them"
    if worker is not None and runtime is not None and works:
        yield "worker and runtime both work on rows: give one of them"
    if isinstance(task, str) and not task.strip() and (worker is None or task):
        yield "task is empty: it is the message each agent gets"
    if options["examples"] is not None and (worker is not None or works):
        yield "examples are for the tool loop: a worker writes its own prompts"
    if worker is not None and options["oversized"] != "fail":
        yield f"oversized={options['oversized']!r} is for the tool loop: a worker reads its rows itself"


def _works(runtime: object) -> bool:
    return isinstance(runtime, str | Mapping) or callable(runtime)


# Fields of ``extra_body`` with which all samples of a row are equal, and the value that makes them so; None: any.
ALIKE: Mapping[str, object] = {
    **dict.fromkeys(("seed", "random_seed", "rng_seed", "sampling_seed"), None),
    **{"temperature": 0, "top_k": 1, "do_sample": False, "use_beam_search": True},
}
LEAST_TOP_P = 0.01  # at and below this only the likeliest token is left


# Options that each entry of a cascade has itself.
OF_ENTRIES = ("backend", "model", "api_key")


def _of_cascades(options: Mapping[str, object]) -> Iterator[str]:
    if options["cascade"] is None:
        if options["escalate"] is not None:
            yield "escalate says which answers of a cascade go to its next entry, and there is no cascade"
        return
    for name in OF_ENTRIES:
        if options[name] is not None:
            yield f"{name} and cascade exclude each other: give the {name} in the entries of the cascade"
    if options["worker"] is not None or options["runtime"] is not None:
        yield "cascade is for the tool loop: a worker or a runtime decides itself what it asks"
    if options["oversized"] == "chunk":
        yield "cascade and oversized='chunk' exclude each other: an answer made of many answers has no doubt"


def _of_samples(options: Mapping[str, object]) -> Iterator[str]:
    if options["cascade"] is not None:  # each entry has its own, which are checked with it
        return
    samples = options["samples"]
    top_p = options["top_p"]
    body = options["extra_body"]
    given = [name for name in ("samples", "doubt") if options[name] not in (1, False)]
    for name in given:
        if options["worker"] is not None or _works(options["runtime"]):
            yield f"{name} is for the tool loop: a worker decides itself what it asks"
        if options["oversized"] == "chunk":
            yield f"{name} and oversized='chunk' exclude each other: an answer made of many answers is not voted"
    if samples == 1:
        if options["vote"] is not None:
            yield "vote needs samples of the answers: give samples=3"
        return
    if options["temperature"] == 0:
        yield f"samples={samples} needs a temperature above 0: at 0 all samples are equal"
    if isinstance(top_p, int | float) and top_p <= LEAST_TOP_P:
        yield f"samples={samples} needs a larger top_p: at {top_p:g} all samples are equal"
    for name, value in _alike(body):
        yield f"samples={samples}: extra_body has {name}={value!r}, with which all samples are equal; leave it out"


def _alike(body: object) -> Iterator[tuple[str, object]]:
    """Yield the fields of a body that would make all samples equal, with their values; fields within fields are
    searched too."""
    for name, value in body.items() if isinstance(body, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _alike(value)
        elif name in ALIKE and value is not None and ALIKE[name] in (None, value):
            yield name, value


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
