"""The entries of a cascade: which models answer, and which of their answers escalate to the next entry.

The first model is the run's own: its options are those of the run. Each later one is prepared like a run of its own,
with the same rows, task and schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from batch_agent.agreement import OF_ENTRIES
from batch_agent.errors import SpecError, about
from batch_agent.files.results import from_json
from batch_agent.spec import BatchSpec
from batch_agent.trust.escalate import INVALID, Escalation, is_reference, rule_of
from batch_agent.trust.gold import OUTPUT
from batch_agent.trust.votes import leaves

if TYPE_CHECKING:
    from batch_agent.agent.prepare import Prepared
    from batch_agent.tools.base import Tool

PEOPLE = "people"
GPU_HOUR = "gpu_hour"  # in prices
OWN = ("name", "label")  # a label is written by a run, for its workers, as doubt is
SAMPLING = ("temperature", "top_p", "seed", "stop", "max_tokens", "extra_body", "tool_choice")
# Options of the run that an entry may have itself.
OVERRIDES = (*OF_ENTRIES, *SAMPLING, "samples", "tools", "max_turns", "system_prompt", "prices", "model_max_context")
# Options that say nothing about an entry: those of the run as a whole.
OF_THE_RUN = (
    *("cascade", "escalate", "run_dir", "resume", "retry_failed", "retry_from", "on_change", "on_result"),
    *("sinks", "events", "metrics_port", "telemetry", "processes", "cluster", "feed_only", "lease", "keep"),
    *("gold", "gold_sample", "gold_sealed", "tolerance", "score", "by", "groups", "require"),
    *("pilot", "pilot_key", "pilot_only", "predictive_prewarm", "prewarm_max_age"),
    *("promise", "max_people", "people_error", "truth", "beacon", "overlap", "review_lease"),
)
EntryOptions: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of a cascade after the first. ``label`` identifies it in the record."""

    label: str
    prepared: Prepared
    name: str  # given, or that of its model

    def named(self, model: str | None) -> str:
        return self.name or model or self.prepared.backend.name


@dataclass(frozen=True, slots=True)
class Cascade:
    """``first`` is the name that the first entry was given, or "", ``label`` is its label; ``later`` are the models
    after it."""

    first: str
    label: str
    later: tuple[Entry, ...]
    people: bool
    rule: Escalation
    whole: BatchSpec  # as the user gave it

    def names(self, prepared: Prepared) -> list[str]:
        """Return the names of the models. ``prepared`` is the run of the first. Raises SpecError for equal names."""
        names = [self.first or prepared.model or prepared.backend.name]
        names += [entry.named(entry.prepared.model) for entry in self.later]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise SpecError(f"cascade: two entries are called {name!r}: give each a name of its own, with name")
        return names

    def with_each(self, change: Callable[[Prepared], Prepared]) -> Cascade:
        """Return the cascade with each later model changed."""
        return replace(self, later=tuple(replace(entry, prepared=change(entry.prepared)) for entry in self.later))


def entries_of(given: object) -> list[EntryOptions | str]:
    """Return the entries that were given: as a list, as JSON, or as a file with them. Raises SpecError."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        given = _parsed(given.encode(), "its JSON")
        if isinstance(given, list) and any(isinstance(each, Mapping) and "api_key" in each for each in given):
            raise SpecError("cascade: an api_key in this text would be stored with the run; set it in the environment")
    elif isinstance(given, str | Path):
        try:
            data = Path(given).read_bytes()
        except OSError as error:
            raise SpecError(
                f"cascade: {given} is neither JSON nor a file that can be read ({error.strerror or error}); give a "
                """list such as '[{"backend": "local://"}, "people"]'"""
            ) from None
        given = _parsed(data, str(given))
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise SpecError("cascade is no list: give its entries in the order in which they are asked")
    entries = [_entry(place, each, len(given)) for place, each in enumerate(given)]
    models = sum(1 for each in entries if each != PEOPLE)
    if not models:
        raise SpecError("cascade has no model: give at least one entry with a backend")
    if len(entries) == 1:
        raise SpecError("cascade has one entry: give a second one, or backend in place of cascade")
    return entries


def _parsed(data: bytes, what: str) -> object:
    try:
        return from_json(data)
    except ValueError as error:
        raise SpecError(f"cascade: {what} cannot be read: {error}") from None


def _entry(place: int, given: object, count: int) -> EntryOptions | str:
    where = f"cascade: entry {place + 1}"
    if given == PEOPLE:
        if place < count - 1:
            raise SpecError(f'{where} is "people", which may be given once, as the last entry')
        return PEOPLE
    if not isinstance(given, Mapping):
        raise SpecError(f'{where} is neither a mapping such as {{"backend": "local://"}} nor "people"')
    for name in given:
        if name not in (*OWN, *OVERRIDES) and not (name == "doubt" and "label" in given):
            hint = "; it is an option of the whole run" if name in BatchSpec.model_fields else ""
            raise SpecError(f"{where} has no option {name!r}{hint}. An entry may have: name, {', '.join(OVERRIDES)}")
    if given.get("backend") is None and "/" not in str(given.get("model") or ""):
        raise SpecError(f"{where} needs a backend, such as local:// or vllm://host:8000")
    name = given.get("name")
    if name is not None and (not isinstance(name, str) or not name.strip() or name == PEOPLE):
        raise SpecError(f"{where}: its name must be text, and not people")
    return dict(given)


def label_of(entry: EntryOptions) -> str:
    """Return what identifies an entry in the record, without asking its server."""
    backend = entry.get("backend")
    known = (
        entry.get("label") or entry.get("name") or entry.get("model") or (backend if isinstance(backend, str) else None)
    )
    return str(known or type(backend).__name__).rpartition("@")[2]


def first_of(spec: BatchSpec, rule: Escalation) -> BatchSpec:
    """Return the spec of a run with a cascade, with the options of its first entry as its own."""
    entries = entries_of(spec.cascade)
    changed = _overrides(entries[0])
    _check_prices(spec, entries)
    if spec.prices is not None and "people" in spec.prices and changed.get("prices") is not None:
        changed["prices"] = {**changed["prices"], "people": spec.prices["people"]}
    _checked(spec, entries[0], 0)
    if rule.needs_doubt:
        if spec.given("doubt") and not spec.doubt:
            raise SpecError(f"doubt=False, and escalate={rule.text!r} needs the doubt: leave doubt out")
        changed["doubt"] = True
    return spec.model_copy(update=changed)


def _check_prices(spec: BatchSpec, entries: Sequence[EntryOptions | str]) -> None:
    """Raise SpecError for a price of time beside a price of tokens: the cost of a run is the one or the other."""
    given = [entry.get("prices") for entry in entries if not isinstance(entry, str)]
    by_time = any(isinstance(prices, Mapping) and GPU_HOUR in prices for prices in given)
    if by_time or (spec.prices is not None and GPU_HOUR in spec.prices and any(given)):
        raise SpecError(
            "cascade: a price per gpu_hour is one of the whole run: give it in prices of the run, and no prices in "
            "the entries; or give prices of tokens in each entry"
        )


def _overrides(entry: EntryOptions | str) -> dict[str, Any]:
    assert isinstance(entry, Mapping)
    return {name: value for name, value in entry.items() if name not in OWN}


def _checked(spec: BatchSpec, entry: EntryOptions | str, place: int, **changed: Any) -> BatchSpec:
    """Return the options of an entry, checked as those of a run. Raises SpecError."""
    given = {name: getattr(spec, name) for name in spec.model_fields_set if name not in OF_THE_RUN}
    options = {**given, **_overrides(entry), **changed}
    if options.get("samples", 1) == 1:
        options.pop("vote", None)
    with about(f"cascade: entry {place + 1}: "):
        return BatchSpec(**options)


def specs_of_later(whole: BatchSpec, run: Prepared, rule: Escalation) -> Iterator[tuple[EntryOptions, BatchSpec]]:
    """Yield the models after the first, with the options of each. ``whole`` is the spec as the user gave it, ``run``
    is that of the first entry, which has the inputs without their gold."""
    entries, first = entries_of(whole.cascade), run.spec
    tools = whole.tools if "tools" in entries[0] else run.tools
    models = [each for each in entries if not isinstance(each, str)]
    for place, entry in enumerate(models[1:], start=1):
        known = {"inputs": first.inputs, "examples": first.examples, "no_hoist": first.no_hoist}
        if rule.needs_doubt and place < len(entries) - 1:
            known["doubt"] = True
        if "tools" not in entry:
            known["tools"] = list(tools)  # resolved once: an MCP server is asked for its tools
        yield entry, _checked(whole, entry, place, **known)


def rule_given(spec: BatchSpec, imported: Callable[[str], Callable[..., Any]]) -> Escalation:
    """Return the rule of a spec. ``imported`` returns the function of a name. Raises SpecError."""
    given = INVALID if spec.escalate is None else spec.escalate
    return rule_of(imported(given) if isinstance(given, str) and is_reference(given) else given)


def check_rule(rule: Escalation, name: str, prepared: Prepared) -> None:
    """Raise SpecError for a rule that an entry can never satisfy or refute: it reads what the entry does not have."""
    schema = prepared.schema
    fields = {each.name for each in leaves(None if schema is None else schema.written_schema)}
    voted = set() if prepared.voting is None else {each.field.name for each in prepared.voting.rules}
    for field in sorted(rule.doubts - {""}):
        if field not in fields:
            raise SpecError(f"escalate: doubts.{field}: an answer has no field {field!r}, but {_named(fields)}")
    for field in sorted(rule.votes - voted):
        if prepared.voting is None:
            raise SpecError(
                f"escalate: votes.{field}.against needs votes, and the entry {name!r} asks each row once: give it "
                "samples=3"
            )
        raise SpecError(f"escalate: votes.{field}.against: the samples vote on {_named(voted)}")
    groups = {field[:at] for field in fields for at, sign in enumerate(field) if sign == "."}
    for field in sorted(rule.outputs - fields - groups):
        if schema is None and not field:
            continue
        given = "text" if schema is None else _named(fields)
        if field or fields != {OUTPUT}:
            raise SpecError(f"escalate: output{'.' if field else ''}{field}: an answer has no such field, but {given}")


def _named(fields: set[str]) -> str:
    return ", ".join(sorted(fields))


def union_of_tools(prepared: Prepared) -> tuple[Tool, ...]:
    """Return the tools of all entries. Raises SpecError for two different tools with one name."""
    tools = {tool.name: tool for tool in prepared.tools}
    for entry in () if prepared.cascade is None else prepared.cascade.later:
        for tool in entry.prepared.tools:
            known = tools.setdefault(tool.name, tool)
            same = known.function == tool.function or (known.resource is not None and known.resource == tool.resource)
            if not same or (known.spec, known.version) != (tool.spec, tool.version):
                raise SpecError(f"cascade: two different tools are called {tool.name!r}: give one another name")
    return tuple(tools.values())
