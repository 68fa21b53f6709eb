"""Turns a spec into everything that a run needs, without sending anything. A dry run shows the result."""

from __future__ import annotations

import asyncio
import html
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.agent.cascade import (
    PEOPLE,
    Cascade,
    Entry,
    EntryOptions,
    check_rule,
    entries_of,
    first_of,
    label_of,
    rule_given,
    specs_of_later,
    union_of_tools,
)
from batch_agent.agent.shapes import Shapes, build_shapes
from batch_agent.backends.base import Backend
from batch_agent.backends.registry import BACKEND_VARIABLE, at_backend, open_backend, resolved
from batch_agent.backends.schemes import PROVIDERS
from batch_agent.compiler.attachments import Look, Read
from batch_agent.compiler.plan import Plan, compile_plan
from batch_agent.compiler.prices import FORMS as PRICE_FORMS
from batch_agent.compiler.prices import Prices, find_prices
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.documents.content import read_document
from batch_agent.errors import BackendError, InputError, RunRejected, RunUnreachable, SpecError, Timeout, about
from batch_agent.files.examples import Examples, examples_of
from batch_agent.files.gold import TakenGold, take_gold
from batch_agent.files.inputs import refuse_uncountable
from batch_agent.files.pictures import read_image
from batch_agent.foreign import boundary, is_async
from batch_agent.messages import Image, JsonObject
from batch_agent.observe.text import rows
from batch_agent.record.address import directory_of
from batch_agent.record.people import given_gold
from batch_agent.record.reader import open_run
from batch_agent.record.rundir import read_run, recorded_options
from batch_agent.runtimes.base import LoginBackend
from batch_agent.runtimes.named import runtime_of
from batch_agent.scheduler.capacity import FLEET_START, START, TOOLS_START
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.retry import retry_delay
from batch_agent.scheduler.server_state import Terms
from batch_agent.spec import BatchSpec
from batch_agent.tools.base import Tool, resolve_tools
from batch_agent.tools.threads import THREADS
from batch_agent.trust.doubt import Doubted
from batch_agent.trust.promise import Promise, promised_fields, read_promise
from batch_agent.trust.votes import Function, Voting, leaves, rules_of

if TYPE_CHECKING:
    from batch_agent.agent.comparison import Comparison

logger = logging.getLogger("batch_agent")

PROBE = 5.0  # seconds for an optional request about what a server serves
PAUSE = 1.0  # longest pause between two requests for the model's name
AGENTS_PER_SLOT, MIN_AGENTS = 32, 256  # live agents, if the user sets no number
SOUGHT = 256  # slots to assume for that while their number is unknown
SHARED = ("lease", "keep", "feed_only")  # options of a run that several processes share
OTHER_FILES = 128  # files that a process may have open besides its connections
HIDDEN = "hidden"  # in place of a stored backend: only its name is stored
IN_PROCESS = ("local:", "simulated:")  # the URL names the model


@dataclass(frozen=True, slots=True, repr=False)
class Prepared:
    """A run that has not begun. It prints what would be sent."""

    spec: BatchSpec
    backend: Backend
    model: str | None  # None: the backend is asked when the run starts
    tools: tuple[Tool, ...]
    schema: OutputSchema[object] | None
    shapes: Shapes
    plan: Plan
    max_inflight: int | None
    sought: bool  # max_inflight was not given: the right number is searched, up to this one
    max_agents: int | None
    prices: Prices | None  # None: the price of a token is unknown
    summaries: tuple[Backend, str | None] | None = None  # backend and model that write summaries, if a model does
    context: int | None = None  # the model's context in tokens, from the user or the server
    where: object = None  # the backend as it was given, in the options, the environment or the record
    voting: Voting | None = None  # set if each row has several samples
    doubted: tuple[Doubted, ...] | None = None  # the fields whose doubts are wanted
    carry: tuple[str, ...] = ()  # fields of its rows that the rows of later stages have too
    examples: Examples | None = None  # in the system prompt
    gold: TakenGold | None = None  # the right answers of some rows, which are not in the inputs
    promise: Promise | None = None  # about the finished table
    cascade: Cascade | None = None  # the entries after this one, if the run has several

    @property
    def terms(self) -> Terms:
        """What is known about each server before the first request."""
        spec, one = self.spec, len(self.backend.servers) == 1
        start = (FLEET_START if not one else TOOLS_START if self.tools else START) if self.sought else None
        given, limit = spec.given("max_inflight"), self.turn_limit_seconds
        return Terms(self.max_inflight, start, spec.rpm, spec.tpm, by_clock=one, given=given, timeout=limit)

    @property
    def turn_limit_seconds(self) -> float | None:
        """Time limit of a turn; None for no limit. If answers take hours, there is only the limit that the user set."""
        spec, patient = self.spec, self.backend.capabilities.patient
        return None if patient and not spec.given("timeout_per_turn") else spec.timeout_per_turn

    def __str__(self) -> str:
        from batch_agent.agent.dryrun import DryRun

        return DryRun.untouched(self).to_text()

    def compare(
        self, *, only: str = "", gpu_price: float | None = None, tokens_per_second: float | None = None
    ) -> Comparison:
        """Return the estimated cost of this batch at each provider and model with a known price; print it. ``only``
        keeps those whose name contains it. ``gpu_price`` is $ per hour of a GPU that computes ``tokens_per_second``."""
        from batch_agent.agent.dryrun import DryRun

        plan = DryRun.untouched(self)
        return plan.compare(only=only, gpu_price=gpu_price, tokens_per_second=tokens_per_second)

    def __repr__(self) -> str:
        total = "rows" if self.plan.total is None else rows(self.plan.total)
        model = self.model or "its model"
        return f"<Prepared: {total} for {model} at {self.backend.name}; print it for what would be sent>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def prepare(spec: BatchSpec, *, sends: bool = True, confined: bool = False) -> Prepared:
    """Resolve and check all options. Raises SpecError; sends nothing. ``sends=False`` needs no API key. ``confined``:
    rows may name files below ``image_root`` only."""
    one = _prepare if spec.cascade is None else _prepare_cascade
    return one(spec, sends=sends, confined=confined)


def _prepare_cascade(spec: BatchSpec, *, sends: bool, confined: bool) -> Prepared:
    rule = rule_given(spec, partial(_imported, "escalate"))
    entries = entries_of(spec.cascade)
    if entries[-1] == PEOPLE and spec.keep == "results":
        raise SpecError('keep="results" keeps too little for people to review: leave it out')
    first_entry = cast("Mapping[str, object]", entries[0])
    first = _prepare(first_of(spec, rule), sends=sends, confined=confined)
    promised = spec.promise is not None and spec.truth != "last"  # else a later doubt decides nothing
    later = tuple(
        Entry(
            label_of(entry),
            _prepare_later(place, own, promised=promised, sends=sends, confined=confined),
            str(entry.get("name") or ""),
        )
        for place, (entry, own) in enumerate(specs_of_later(spec, first, rule), start=2)
    )
    own = str(first_entry.get("name") or "")
    people = entries[-1] == PEOPLE
    cascade = Cascade(own, label_of(first_entry), later, people, rule, spec)
    prepared = _with_shared_backends(replace(first, cascade=cascade))
    if spec.truth == "last":
        _check_learnt(prepared, cascade)
    followed = list(zip(cascade.names(prepared), models_of(prepared), strict=True))[: None if people else -1]
    for name, each in followed:
        check_rule(rule, name, each)
    union_of_tools(prepared)  # raises SpecError
    return prepared


def _check_learnt(prepared: Prepared, cascade: Cascade) -> None:
    """Raise SpecError for a cascade in which no threshold can be learned from the answers of its last model."""
    if cascade.people:
        raise SpecError(
            'truth="last" takes the answers of the last model to be right, and the cascade ends with "people": leave '
            "truth out, so that they are the truth, or leave them out"
        )
    if len(cascade.later) != 1:
        count = len(cascade.later) + 1
        raise SpecError(
            f'truth="last" learns one threshold, between two models, and the cascade has {count}: give the two that '
            "matter"
        )
    if prepared.doubted is None:
        raise SpecError(
            f'truth="last" needs the doubt of answers of {prepared.backend.name}, which reports no log-probabilities: '
            "give that entry samples=3"
        )


def models_of(prepared: Prepared) -> list[Prepared]:
    """Return a run and the later entries of its cascade."""
    return [prepared, *(() if prepared.cascade is None else (entry.prepared for entry in prepared.cascade.later))]


def entries_with_models(prepared: Prepared) -> Iterator[tuple[EntryOptions, Prepared] | str]:
    """Yield the entries of a cascade as they were given, each with its model, and "people"."""
    assert prepared.cascade is not None, "only a run with a cascade has entries"
    models = iter(models_of(prepared))
    for entry in entries_of(prepared.cascade.whole.cascade):
        yield entry if isinstance(entry, str) else (entry, next(models))


def place_of_backend(prepared: Prepared) -> tuple[object, ...]:
    """Return a key that is equal for runs that can share their backend."""
    spec = prepared.spec
    where = spec.runtime if spec.backend is None else spec.backend
    return prepared.backend.name, where if isinstance(where, str | None) else id(where), spec.api_key, spec.cache


def _with_shared_backends(prepared: Prepared) -> Prepared:
    """Return a run with a cascade in which entries with the same address share a backend, and so its connections or its
    weights."""
    known: dict[tuple[object, ...], Backend] = {}

    def shared(each: Prepared) -> Prepared:
        return replace(each, backend=known.setdefault(place_of_backend(each), each.backend))

    assert prepared.cascade is not None
    return replace(shared(prepared), cascade=prepared.cascade.with_each(shared))


def _prepare_later(place: int, spec: BatchSpec, *, promised: bool, sends: bool, confined: bool) -> Prepared:
    with about(f"cascade: entry {place}: "):
        return _prepare(spec, promised=promised, sends=sends, confined=confined)


def _is_in_redis(spec: BatchSpec) -> bool:
    """Return whether the record is in Redis. Raises SpecError for worker processes that could not reach it there."""
    in_redis = spec.run_dir is not None and directory_of(spec.run_dir) is None
    if in_redis and spec.processes is not None:
        raise SpecError(
            "processes: its workers share a record of this process, and this one is in Redis: leave processes out, and "
            "start workers with: batch-agent work URL"
        )
    return in_redis


def _prepare(spec: BatchSpec, *, promised: bool = False, sends: bool, confined: bool) -> Prepared:
    """Prepare a run. ``promised``: the run has a promise, which uses the doubt of answers if there is one."""
    # A worker does not see all rows, so it cannot know what they share.
    fed = spec.feed_only and spec.run_dir is not None  # without a record, no other process can reach the rows
    in_redis = _is_in_redis(spec)
    if in_redis or spec.cluster is not None or spec.processes is not None or fed:
        spec = spec.model_copy(update={"no_hoist": True})
    elif alone := next(filter(spec.given, SHARED), None):
        raise SpecError(
            f"{alone} is for a run that several processes share: give processes=N, or run_dir as "
            "redis://host:6379/0/NAME"
        )
    _refuse_uncountable(spec)
    runtime = runtime_of(spec.runtime)
    where = spec.runtime if spec.backend is None else spec.backend
    if runtime is not None:
        runtime = runtime.resolved(_given_backend(spec, runtime.name))
        if sends:
            runtime.check()
        where = runtime.own_backend() if spec.backend is None else spec.backend
        spec = spec.model_copy(update={"worker": runtime, "runtime": None})
    where, model = resolved(*_as_recorded(spec, where))
    backend, model = open_backend(where, model=model, api_key=spec.api_key, sends=sends)
    tools = resolve_tools(spec.tools)
    if not isinstance(spec.predictive_prewarm, bool):
        read_run(Path(spec.predictive_prewarm))  # raises SpecError if there is no run
    specs = tuple(tool.spec for tool in tools)
    schema = OutputSchema.of(spec.output_schema)
    if not backend.capabilities.reports_context:
        _check_context(spec, spec.model_max_context)
    spec, promise = _with_promise(spec, schema, backend)
    spec = _with_doubt(spec, backend) if promised else spec
    asked_for = None if spec.worker is not None else schema  # a user's worker sends its own schemas
    shapes = build_shapes(spec, model or "", specs, asked_for, backend.capabilities)
    shapes = _checked(spec, backend, shapes)
    spec, examples = _with_examples(spec, schema)
    spec, taken = _without_gold(spec, schema, examples)
    look = _look(spec, backend, confined=confined)
    plan = compile_plan(
        spec,
        schema=asked_for,
        inject_schema=shapes.schema_in_prompt,
        tools=specs,
        look=look,
        read=_reader(spec, backend, look, confined=confined),
        examples="" if examples is None else examples.text,
    )
    inflight = spec.max_inflight if spec.given("max_inflight") else backend.capabilities.default_inflight
    sought = inflight is None and not spec.given("max_inflight")
    if sought:
        inflight = most_connections()
    agents = spec.max_agents if spec.given("max_agents") else _enough_agents(spec, SOUGHT if sought else inflight)
    if runtime is not None and not spec.given("max_agents"):
        agents = runtime.most_at_once()
    prices = find_prices(spec.prices, model=model, backend=backend.name)
    if prices is not None and spec.prices is None and backend.capabilities.price != 1.0:
        prices = prices.times(backend.capabilities.price)
    _check_budget(spec, prices, model, backend)
    answering = _cached(spec, backend)
    summaries = _summaries(spec, answering, sends=sends)
    known = spec.model_max_context
    return Prepared(
        *(spec, answering, model, tools, schema, shapes, plan, inflight, sought, agents, prices, summaries, known),
        where=where,
        voting=None if spec.samples == 1 else _voting(spec, tools, schema, backend, shapes),
        examples=examples,
        gold=taken,
        promise=promise,
        doubted=_doubted(spec, schema, backend) if spec.doubt else None,
    )


def _refuse_uncountable(spec: BatchSpec) -> None:
    for name in ("pilot", "promise"):
        if getattr(spec, name) is not None and not isinstance(spec.inputs, RowChannel):
            refuse_uncountable(spec.inputs, name)


def _with_promise(
    spec: BatchSpec, schema: OutputSchema[object] | None, backend: Backend
) -> tuple[BatchSpec, Promise | None]:
    """Return the spec with what its promise needs, and the promise or None. Raises SpecError for a promise that cannot
    be measured."""
    if spec.promise is None:
        return spec, None
    written = None if schema is None else schema.written_schema
    promise, fields = promised_fields(read_promise(spec.promise), written, spec.tolerance)
    if unmeasured := [*(spec.tolerance or {}).keys() - fields.keys()] if spec.gold is None else []:
        raise SpecError(f"tolerance: {min(unmeasured)!r} is in no promise, and there is no gold")
    return _with_doubt(spec, backend), promise


def _with_doubt(spec: BatchSpec, backend: Backend) -> BatchSpec:
    """Return the spec with doubts, by which a promise decides what people repair. Without doubts, the promise is kept
    by the whole table or not at all."""
    able = spec.worker is None and (backend.capabilities.logprobs or spec.samples > 1) and spec.oversized != "chunk"
    if spec.given("doubt") and not spec.doubt and able:
        raise SpecError("doubt=False and promise exclude each other: a promise needs the doubt of each answer")
    return spec.model_copy(update={"doubt": True}) if able else spec


def _doubted(spec: BatchSpec, schema: OutputSchema[object] | None, backend: Backend) -> tuple[Doubted, ...]:
    """Return the fields whose doubts are wanted. Raises SpecError if no doubt could be computed."""
    if not backend.capabilities.logprobs and spec.samples == 1:
        raise SpecError(f"doubt: {backend.name} reports no log-probabilities; give samples=3, and votes tell the doubt")
    if schema is None:
        return tuple((field, field.name) for field in leaves(None))
    asked, written = [*leaves(schema.json_schema)], [*leaves(schema.written_schema)]
    return tuple((one, other.name) for one, other in zip(asked, written, strict=False))


def _with_examples(spec: BatchSpec, schema: OutputSchema[object] | None) -> tuple[BatchSpec, Examples | None]:
    """Return the spec with its examples as pairs, in which form workers in other processes get them; and the
    examples."""
    if spec.examples is None:
        return spec, None
    examples = examples_of(spec.examples, spec.task, spec.template, schema)
    return spec.model_copy(update={"examples": [[*pair] for pair in examples.pairs]}), examples


def _without_gold(
    spec: BatchSpec, schema: OutputSchema[object] | None, examples: Examples | None
) -> tuple[BatchSpec, TakenGold | None]:
    """Return the spec with inputs without their gold, and the gold."""
    if spec.gold is None:
        return spec, None
    typed = schema is not None or spec.worker is None
    taken = take_gold(given_gold(spec.gold), spec.inputs, schema, dict(spec), known=typed)
    taken = replace(taken, examples=None if examples is None else examples.rows)
    return spec.model_copy(update={"inputs": taken.inputs}), taken


def _checked(spec: BatchSpec, backend: Backend, shapes: Shapes) -> Shapes:
    """Return the shapes after checking that the backend can send them. If the model accepts no temperature, the one
    that samples get by default is left out."""
    every = {shapes.first, shapes.later, shapes.repair}
    try:
        for shape in every:
            backend.check(shape)
    except SpecError:
        if spec.samples == 1 or spec.temperature is not None:
            raise
    else:
        return shapes
    bare = {shape: replace(shape, temperature=None) for shape in every}
    for shape in bare.values():
        backend.check(shape)
    return replace(shapes, first=bare[shapes.first], later=bare[shapes.later], repair=bare[shapes.repair])


def _voting(
    spec: BatchSpec, tools: tuple[Tool, ...], schema: OutputSchema[object] | None, backend: Backend, shapes: Shapes
) -> Voting:
    """Return how the samples of a row vote. Raises SpecError for tools that write: each sample would write."""
    if writing := [tool.name for tool in tools if tool.effect == "write"]:
        raise SpecError(
            f"samples={spec.samples}: each sample would call {', '.join(writing)}, which may write; leave the tool "
            "out, or declare that it only reads (docs/tools.md)"
        )
    rules = rules_of(spec.vote, None if schema is None else schema.written_schema, partial(_imported, "vote"))
    try:
        backend.check(replace(shapes.first, seed=0))
        takes_seed = True
    except SpecError:
        takes_seed = False
    return Voting(spec.samples, rules, stops=not backend.capabilities.patient, seed=spec.seed, takes_seed=takes_seed)


def _imported(option: str, name: str) -> Function:
    """Return the function that ``module:function`` names. Raises SpecError."""
    with boundary(lambda raised: SpecError(f"{option}: {name} cannot be imported: {raised}")):
        import_module(name.partition(":")[0])
        found: object = resolve_name(name)
    if not callable(found):
        raise SpecError(f"{option}: {name} is no function")
    return cast(Function, found)


def _given_backend(spec: BatchSpec, agent: str) -> object:
    """Return the backend that the options, the model's name or the record of a resumed run name. None if the agent uses
    its own login, or if there is none."""
    provider = (spec.model or "").partition("/")[0]
    if spec.backend is not None or provider in PROVIDERS:
        return provider if spec.backend is None else spec.backend
    facts = recorded_facts(spec.run_dir) if spec.resume or spec.on_change == "keep" else {}
    before = recorded_options(facts).get("backend")
    return None if before == {HIDDEN: LoginBackend(agent).name} else before


def _as_recorded(spec: BatchSpec, where: object) -> tuple[object, str | None]:
    """Return the backend and the model. A resumed run that names none uses those of its record, not those of the
    environment. Raises SpecError if the record could not store the backend."""
    facts = recorded_facts(spec.run_dir) if spec.resume or spec.on_change == "keep" else {}
    before, model = recorded_options(facts).get("backend"), spec.model
    named = (model or "").partition("/")[0]
    if where is None and before is not None and (named not in PROVIDERS or PROVIDERS[named] == before):
        here = os.environ.get(BACKEND_VARIABLE) or None
        if isinstance(before, dict) and HIDDEN in before:
            if here is None:
                raise SpecError(
                    f"{spec.run_dir} was recorded at {before[HIDDEN]}, given as an object or with a password, which is "
                    "not stored: give the backend again"
                )
        else:
            if here is not None and here != before:
                logger.warning(
                    "%s continues at its recorded backend, %s; %s is not used. Give a backend to change it",
                    spec.run_dir,
                    before,
                    BACKEND_VARIABLE,
                )
            where = before
            model = None if model is None else at_backend(model, before)
    known = facts.get("model")
    if model is None and isinstance(known, str) and not str(where or before or "local:").startswith(IN_PROCESS):
        model = known
    return where, model


def recorded_facts(run_dir: str | Path | None) -> JsonObject:
    """Return the facts of the run that is recorded there; {} if there is none, or if they cannot be read, which the run
    itself reports."""
    if run_dir is None:
        return {}
    with open_run(str(run_dir)) as reader:
        return reader.kept_facts()


def stored_place(where: object, name: str) -> JsonValue:
    """Return a backend in the form in which the record stores it: if it may contain a secret, only its name."""
    if where is None or (isinstance(where, str) and "@" not in where):
        return where
    if isinstance(where, Mapping) and not where.keys() & {"api_key", "headers"}:
        url = stored_place(where.get("url"), name)
        if isinstance(url, str):
            return {**cast(JsonObject, dict(where)), "url": url} if len(where) > 1 else url
    if isinstance(where, list | tuple):
        places = [stored_place(place, name) for place in where]
        if not any(isinstance(place, dict) and HIDDEN in place for place in places):
            return places
    return {HIDDEN: name}


def _look(spec: BatchSpec, backend: Backend, *, confined: bool) -> Look:
    """Return the function that prepares images for sending. It raises for a backend without image input."""
    blind = f"{backend.name} cannot be shown images"
    if backend.capabilities.images:
        return partial(read_image, root=_root(spec), confined=confined)
    if spec.images:
        raise SpecError(f"images: {blind}")

    def look(image: Image) -> Image:
        raise InputError(blind)

    return look


def _reader(spec: BatchSpec, backend: Backend, look: Look, *, confined: bool) -> Read:
    """Return the function that reads documents. Raises SpecError for a form that the backend does not accept."""
    how, able = spec.documents, backend.capabilities
    if how == "images" and not able.images:
        raise SpecError(f'documents="images": {backend.name} cannot be shown images; use documents="text"')
    if how == "native" and not able.documents:
        other = 'documents="text", or "images" if its model sees pictures' if able.images else 'documents="text"'
        raise SpecError(f'documents="native": {backend.name} does not take files; use {other}')
    if how != "text" and spec.oversized != "fail":
        raise SpecError(f'oversized={spec.oversized!r} cuts text: it needs documents="text", not {how!r}')
    root = _root(spec)
    return partial(read_document, how=how, root=root, confined=confined, native=able.documents, picture=look)


def _root(spec: BatchSpec) -> Path:
    """Return the directory of the files that rows name. It is fixed now, because a tool may change the working
    directory."""
    return Path(spec.image_root or "").absolute()


def _summaries(spec: BatchSpec, backend: Backend, *, sends: bool) -> tuple[Backend, str | None] | None:
    if spec.compaction_backend is not None:
        return open_backend(spec.compaction_backend, model=spec.compaction_model, api_key=None, sends=sends)
    return None if spec.compaction_model is None else (backend, spec.compaction_model)


def most_connections() -> int | None:
    """Return how many connections this process may have open, with room for files; None if unlimited or unknown."""
    try:
        import resource
    except ImportError:  # not on every system
        return None
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if allowed == resource.RLIM_INFINITY else max(allowed - OTHER_FILES, allowed // 2)


def _enough_agents(spec: BatchSpec, max_inflight: int | None) -> int | None:
    """Return the number of agents that keeps the slots busy while many wait for slow tools."""
    if spec.worker is not None and not is_async(spec.worker):
        return THREADS  # each has one thread
    return None if max_inflight is None else max(MIN_AGENTS, AGENTS_PER_SLOT * max_inflight)


def _cached(spec: BatchSpec, backend: Backend) -> Backend:
    if spec.cache is False:
        return backend
    from batch_agent.backends.cache import CachingBackend, repeatable
    from batch_agent.backends.cache_store import ResponseStore, cache_file

    if not repeatable(spec.temperature, spec.seed):
        raise SpecError("cache: only repeatable answers are cached; set temperature=0 or a seed")
    return CachingBackend(backend, ResponseStore(cache_file(spec.cache).absolute()))


def _check_budget(spec: BatchSpec, prices: Prices | None, model: str | None, backend: Backend) -> None:
    if prices is not None and prices.per_second and backend.standbys:
        raise SpecError("prices: gpu_hour counts time, but a standby is paid by the token; give prices per token")
    if spec.max_cost is None:
        return
    package = " (public providers' prices come with the package genai-prices)"
    if prices is None:
        what = f"{model} at {backend.name}" if model else f"the model at {backend.name}"
        raise SpecError(f"max_cost: no price of {what} is known; give prices={PRICE_FORMS}{package}")
    for name, standby in backend.standbys.items():
        if standby.prices is None:
            raise SpecError(
                f"max_cost: no price of the standby {standby.model} at {name} is known; "
                f'give "prices" in its entry of backend{package}'
            )


OnUnanswered: TypeAlias = Callable[[BackendError | None, float, float], None]


async def choose_model(prepared: Prepared, on_unanswered: OnUnanswered = lambda error, since, until: None) -> Prepared:
    """Return the run with the backend's only model, if the user named none. In a fleet, the servers with that model are
    located.

    ``on_unanswered`` is called when the server cannot be asked, with the error, when it first failed, and when it is
    asked again; and with None when the server has answered.
    """
    if prepared.model is not None:
        await prepared.backend.locate(prepared.model)
        return prepared
    return with_model(prepared, await only_model(prepared.backend, prepared.spec, "model", on_unanswered))


async def only_model(
    backend: Backend, spec: BatchSpec, option: str, on_unanswered: OnUnanswered = lambda error, since, until: None
) -> str:
    """Return the only model that the backend serves. Raises SpecError, which names ``option``, if there are several."""
    try:
        names = await _ask_for_models(backend, spec, on_unanswered)
    except BackendError as error:
        if error.retryable:
            raise RunUnreachable(f"the server never answered: {error}") from None
        raise RunRejected(f"no model is named, and {backend.name} did not list its models: {error}") from None
    if len(names) != 1:
        raise SpecError(f"{option}: {backend.name} serves {', '.join(names) or 'none'}; name one with {option}=")
    return names[0]


def with_model(prepared: Prepared, name: str) -> Prepared:
    shapes = prepared.shapes
    named = {shape: replace(shape, model=name) for shape in (shapes.first, shapes.later, shapes.repair)}
    return replace(
        prepared,
        model=name,
        shapes=replace(shapes, first=named[shapes.first], later=named[shapes.later], repair=named[shapes.repair]),
    )


async def learn_context(prepared: Prepared) -> Prepared:
    """Return the run with the context length that an entered backend reports, if the user gave none. The server still
    decides whether a row fits, because it counts tokens exactly. Only a row that is to be cut uses the length."""
    spec = prepared.spec
    backend = prepared.backend
    context = prepared.context
    if backend.capabilities.reports_context:
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(PROBE):
                facts = await backend.facts(prepared.model or "")
                context = context if spec.given("model_max_context") else facts.context
    if context == prepared.context or context is None or context <= spec.min_response_tokens:
        _check_context(spec, prepared.context)
        return prepared
    if spec.oversized != "fail":
        prepared.plan.fit(context)
    return replace(prepared, context=context)


def _check_context(spec: BatchSpec, context: int | None) -> None:
    if spec.oversized != "fail" and context is None:
        raise SpecError(f"oversized={spec.oversized!r} needs model_max_context: what fits is unknown without it")


async def _ask_for_models(backend: Backend, spec: BatchSpec, on_unanswered: OnUnanswered) -> list[str]:
    """Return the names of the models. A server that is just starting is asked again for a while."""
    failures = 0
    began = asyncio.get_running_loop().time()
    patience = N.never_reached if spec.max_outage is None else min(N.never_reached, spec.max_outage)
    while True:
        limit = asyncio.timeout(spec.timeout_per_turn)
        try:
            async with limit:
                names = await backend.models()
            if failures:
                on_unanswered(None, began, 0.0)
            return names
        except TimeoutError:
            if not limit.expired():
                raise
            error: BackendError = Timeout(f"no answer in timeout_per_turn, {spec.timeout_per_turn:g} s")
        except BackendError as failure:
            error = failure
        failures += 1
        if not error.retryable or asyncio.get_running_loop().time() - began >= patience:
            raise error
        if failures == 1:
            logger.warning("%s is asked for its model again, for %g s: %s", backend.name, patience, error)
        pause = min(PAUSE, retry_delay(failures, error.retry_after, random.random()))
        on_unanswered(error, began, asyncio.get_running_loop().time() + pause)
        await asyncio.sleep(pause)
