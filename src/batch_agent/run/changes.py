"""Compares a resumed run, its options and its rows, with its record, and reports what would be dropped, sent and paid.

The record has the resolved options of the run (``options_of``). A recorded answer belongs to a question, which the
fingerprint identifies. An option that is not a part of the question, such as max_tokens, can change without dropping an
answer.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Literal, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.agent.cascade import PEOPLE
from batch_agent.agent.dryrun import DryRun
from batch_agent.agent.fingerprint import AnyWorker, matched
from batch_agent.agent.prepare import HIDDEN, Prepared, entries_with_models, stored_place
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import LimitExceeded, OutputError
from batch_agent.files.read import LazyRows
from batch_agent.files.results import from_json, to_json
from batch_agent.foreign import name_of
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, counted, dollars, harmless, rows
from batch_agent.option import Compared, kinds, notes
from batch_agent.record.people import answered_failures
from batch_agent.record.reader import RunReader, open_run
from batch_agent.record.rundir import OPTIONS, recorded_options
from batch_agent.record.steps import Past
from batch_agent.record.store import Adoption
from batch_agent.run.cascade import edited_entries, with_recorded_models
from batch_agent.run.matching import NAMED, Matched, Matching, readable_again
from batch_agent.run.worker import starts_afresh
from batch_agent.spec import BatchSpec

OnChange: TypeAlias = Literal["keep", "resend"] | None
logger = logging.getLogger("batch_agent")

# Options that say nothing about the answers, or only about one session.
UNRECORDED = {
    *(
        "inputs",
        "on_result",
        "sinks",
        "events",
        "api_key",
        "cluster",
        "run_dir",
        "resume",
        "retry_failed",
        "retry_from",
    ),
    *("on_change", "metrics_port", "telemetry", "feed_only"),
    *("gold", "gold_sample", "gold_sealed", "tolerance", "score", "by", "groups", "require"),
    *("pilot", "pilot_key", "pilot_only"),
}
MOST_WORDS = 4000  # longest text that is compared word by word
SHOWN_CHARACTERS = 60  # of the first words that differ
VALUE_CHARACTERS = 60
UNREAD = (
    "the inputs can be read only once, so they are not compared with the record before they are sent: rows that have "
    "a recorded answer to the same question, with the same id, keep it, and all others are sent"
)
FROM_STAGES = (
    "the rows come from other stages, so they are not compared with the record before: rows that have a recorded "
    "answer to the same question keep it, and all others are sent"
)


def options_of(prepared: Prepared) -> JsonObject:
    """Return the resolved options of a run, for its record. Values that may hold a secret are hashed."""
    spec, compared = prepared.spec, notes(BatchSpec, Compared)
    resolved: dict[str, object] = {
        "model": prepared.model,
        "output_schema": prepared.schema.json_schema if prepared.schema else None,
        "backend": stored_place(prepared.where, prepared.backend.name),
        "tools": {tool.name: _hash([tool.spec, tool.version]) for tool in prepared.tools},
    }
    if prepared.cascade is not None:
        resolved |= {"cascade": _entries(prepared), "escalate": prepared.cascade.rule.text}
    options: JsonObject = {}
    for name in BatchSpec.model_fields:
        if name in UNRECORDED or not (name in compared or name in resolved or spec.given(name)):
            continue
        value = resolved.get(name, getattr(spec, name))
        if compared.get(name) is Compared.HASH or name in ("runtime", "compaction_backend"):
            options[name] = None if value is None else _hash(value if isinstance(value, str) else _named(value))
        else:
            options[name] = _named(value)
    return options


def _entries(prepared: Prepared) -> list[JsonValue]:
    """Return the entries of a cascade without values that may be secret."""
    found: list[JsonValue] = []
    for given in entries_with_models(prepared):
        if isinstance(given, str):
            found.append(given)
            continue
        entry, each = given
        shown = {name: _named(value) for name, value in entry.items() if name not in ("api_key", "tools", "extra_body")}
        shown |= {"model": each.model, "backend": stored_place(each.where, each.backend.name)}
        hashed = {name: entry[name] for name in ("tools", "extra_body") if name in entry}
        if "tools" in hashed:
            hashed["tools"] = {tool.name: _hash([tool.spec, tool.version]) for tool in each.tools}
        found.append({**shown, **{name: _hash(value) for name, value in hashed.items()}})
    return found


def _named(value: object) -> JsonValue:
    """Return a value as JSON; a function or an object by its name."""
    if callable(value):
        return name_of(value)
    if isinstance(value, Mapping) and any(map(callable, value.values())):
        return {str(name): _named(each) for name, each in value.items()}
    try:
        return cast(JsonValue, from_json(to_json(value)))
    except Exception:  # an object of the user's own  # noqa: BLE001
        return type(value).__name__


def _hash(value: object) -> str:
    return blake2b(to_json(value), digest_size=8).hexdigest()


def differences(facts: JsonObject, now: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield a line for each change: ``task: 1 word: 'Say' → 'Tell'``, ``model: a → b``, ``tools: + look_up``. ``facts``
    are those of the record; earlier versions did not record all options."""
    before, hashed = recorded_options(facts), notes(BatchSpec, Compared)
    names = {**now, **before} if OPTIONS in facts else [name for name in now if name in before]
    for name in names:
        old, value = before.get(name), now.get(name)
        if old == value or (name == "model" and old is None):
            continue
        if name == "tools" and isinstance(old, dict) and isinstance(value, dict):
            yield f"tools: {', '.join(_tools_changed(old, value))}"
        elif name == "cascade" and isinstance(old, list) and isinstance(value, list):
            yield f"cascade: {', '.join(_entries_changed(old, value))}"
        elif hashed.get(name) is Compared.HASH or name in ("runtime", "compaction_backend"):
            yield f"{name}: changed"
        elif name in BatchSpec.model_fields and kinds(BatchSpec, name) == {str} and isinstance(old, str):
            yield f"{name}: {_words_changed(old, value if isinstance(value, str) else '')}"
        else:
            more = "; a row is asked for more samples if this vote needs them" if name == "vote" else ""
            yield f"{name}: {_value(old)} → {_value(value)}{more}"


def _words_changed(old: str, new: str) -> str:
    before, after = old.split(), new.split()
    if before == after:
        return "only spaces and line ends"
    if len(before) + len(after) > MOST_WORDS:
        return "changed"
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    edits = [(before[a:b], after[c:d]) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal"]
    gone, come = (shorten(" ".join(words), SHOWN_CHARACTERS, placeholder=" …") for words in edits[0])
    count = counted(sum(max(len(gone), len(come)) for gone, come in edits), "word")
    return f"{count}: {gone!r} → {come!r}" + (", …" if len(edits) > 1 else "")


def _tools_changed(old: JsonObject, new: JsonObject) -> Iterator[str]:
    yield from (f"+ {name}" for name in new if name not in old)
    yield from (f"- {name}" for name in old if name not in new)
    yield from (f"{name} changed" for name in new if name in old and old[name] != new[name])


def _entries_changed(old: list[JsonValue], new: list[JsonValue]) -> Iterator[str]:
    """Yield the differences between the entries of two cascades, by their places."""
    for place, (one, other) in enumerate(zip_longest(old, new), start=1):
        if isinstance(one, dict) and isinstance(other, dict):
            differ = [f"{name}: {_value(one.get(name))} → {_value(other.get(name))}"
                      for name in {**one, **other} if one.get(name) != other.get(name)]  # fmt: skip
            if differ:
                yield f"entry {place}: {', '.join(differ)}"
        elif one != other:
            yield f"entry {place}: {_value(one)} → {_value(other)}"


def _value(value: JsonValue) -> str:
    if isinstance(value, dict) and HIDDEN in value:
        value = value[HIDDEN]
    return "not given" if value is None else harmless(value if isinstance(value, str) else str(value), VALUE_CHARACTERS)


@dataclass(slots=True)
class Changes:
    """The differences between a resumed run and its record. ``edits`` has a line for each changed option. ``dropped``:
    number of recorded answers that do not fit the present options or rows. ``cut``: number of answers that are asked
    again because max_tokens is higher now. ``matched``: the rows of each part that reads inputs, by its name; None if
    inputs can be read only once. ``again``: the cost of sending the dropped rows; ``rest``: that of sending the rows
    without an answer. ``answered``: the failed rows of each part that people have answered, so that they are not
    retried (``answered_failures``)."""

    run: str
    edits: Sequence[str] = ()
    dropped: int = 0
    cut: int = 0
    matched: Mapping[str, Matched | None] = field(default_factory=dict)
    matchings: Mapping[str, Matching] = field(default_factory=dict)
    again: str = ""
    rest: str = ""
    rest_kept: str = ""  # the same with on_change="keep"
    paid: float | None = None
    resend: bool = False
    recorded: bool = False  # there is a record
    forced: bool = False  # an earlier session kept answers by force
    told: bool = False  # the user has been shown it
    answered: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)

    def refusal(self, *, flags: bool) -> str:
        """Return the error message of a resume that would drop recorded answers. ``flags``: written for the command
        line."""
        keep, resend = ("--keep-answers", "--resend") if flags else ('on_change="keep"', 'on_change="resend"')
        paid = "" if self.paid is None else f" The run has cost {dollars(self.paid)} so far."
        rows_again = (
            f"{_answers(self.dropped)} would be dropped, and {'its row' if self.dropped == 1 else 'their rows'}"
        )
        rows_differ = [*self._rows_changed()]
        what = "with other rows" if rows_differ and not self.edits else "with other options"
        differs = [*self.edits, *rows_differ] or ["the requests; the record does not say why"]
        return "\n".join(
            [
                f"{self.run} was recorded {what}. Nothing was sent. What differs:",
                *(f"  {edit}" for edit in differs),
                f"{rows_again} sent again{': ' if self.again else ''}{self.again}.{paid}",
                *self._counts(keeps=False),
                f"  {keep:<18} keeps the recorded answers and continues",
                f"  {resend:<18} drops them and sends the rows again",
            ]
        )

    def _rows_changed(self) -> Iterator[str]:
        for name, each in self.matched.items():
            if each is not None and each.names:
                shown = ", ".join(map(str, each.names[:NAMED])) + (", …" if len(each.names) > NAMED else "")
                yield f"{f'{name}: ' if name else ''}rows that have a recorded answer and changed, by index: {shown}"

    def forecast(self, *, keeps: bool) -> str:
        """Return text that says what changed, how many answers stay, and what the rest costs. ``keeps``: recorded
        answers are kept."""
        lines = [f"changed since {self.run} was recorded:", *(f"  {edit}" for edit in self.edits)] if self.edits else []
        if self.cut:
            lines.append(f"asked again, because they were cut at a lower max_tokens: {_answers(self.cut)}")
        return "\n".join([*lines, *self._counts(keeps=keeps)])

    def _counts(self, *, keeps: bool) -> Iterator[str]:
        """Yield a line with the rows of each part that are kept, sent and no longer asked for."""
        if self.recorded and not self.matched:
            yield FROM_STAGES
        for name, each in self.matched.items():
            head = f"{name}: " if name else ""
            if each is None:
                yield f"{head}{UNREAD}"
                continue
            now = each.with_answers_kept() if keeps else each
            cost = "" if not now.to_send else self.rest_kept if keeps else self.rest
            yield f"{head}{now}{f', {cost}' if cost and len(self.matched) == 1 else ''}"
            if now.renamed:
                yield f"{head}{now.says_renamed}"

    @property
    def is_silent(self) -> bool:
        """Whether every row is kept or was not begun before, and no option changed."""
        return not self.edits and not any(
            each is not None and (each.changed or each.renamed or each.gone or each.lost)
            for each in self.matched.values()
        )

    def to_json(self, *, keeps: bool) -> JsonObject:
        """Return the changes as JSON, for ``--dry-run --json``. The rows of a pipeline are listed by stage."""
        shown: JsonObject = {}
        for name, each in self.matched.items():
            now = each.with_answers_kept() if each is not None and keeps else each
            shown[name] = None if now is None else now.to_json()
        rows = shown.get("") if set(shown) <= {""} else shown
        return {"changed_options": [*self.edits], "dropped_answers": 0 if keeps else self.dropped, "rows": rows}

    def tell(self, on_change: OnChange) -> None:
        """Log the changes, unless the user has seen them. A change that the caller did not expect is a warning."""
        if words := "" if self.told else self.forecast(keeps=on_change == "keep"):
            level = logging.INFO if self.is_silent or on_change is not None else logging.WARNING
            logger.log(level, "resuming %s: %s", self.run, words)

    def adoptions(self, part: str, *, keeps: bool) -> Callable[[], Iterator[Adoption]] | None:
        """Return the function that yields which recorded rows a part of the run takes over; None if there are none."""
        matching = self.matchings.get(part)
        return None if matching is None else partial(matching.adoptions, keeps=keeps)

    def close(self) -> None:
        for matching in self.matchings.values():
            matching.close()


def _answers(count: int) -> str:
    return "1 recorded answer" if count == 1 else f"{count:,} recorded answers"


def compare(
    run_dir: str | Path,
    parts: Mapping[str, Prepared],
    worker: AnyWorker | None = None,
    *,
    resend: bool = False,
    known: Changes | None = None,
) -> Changes:
    """Compare the options and the rows of a run with its record. Without a record nothing has changed. It reads files
    or Redis, and all inputs, so it may block.

    ``parts`` are its stages by name; a plain run is its only part, with the name "". ``worker`` is a built-in one.
    ``resend``: answers that an earlier session kept after a change are dropped too. ``known`` is the result of an
    earlier comparison: it is returned if it was made in the same way, else closed. The caller closes the result.
    """
    if known is not None:
        if known.resend == resend or not known.forced:
            return known
        known.close()
    found: dict[str, Changes] = {}
    forced = False
    with ExitStack() as undone, open_run(str(run_dir)) as whole:
        for name, prepared in parts.items():
            with whole.stage(name) if name else nullcontext(whole) as reader:
                if facts := reader.kept_facts():  # else there is no record yet
                    forced = forced or bool(facts.get("forced"))
                    found[name] = _compare(reader, whole, facts, prepared, worker, name, resend=resend)
                    undone.callback(found[name].close)
        dropped = sum(each.dropped for each in found.values())
        paid = whole.view().progress.cost if dropped else None
        undone.pop_all()
    again = [each.again for each in found.values() if each.again]
    rest = [each for each in found.values() if each.rest or each.rest_kept]
    return Changes(
        whole.name,
        [f"{name}: {edit}" if name else edit for name, each in found.items() for edit in each.edits],
        dropped,
        sum(each.cut for each in found.values()),
        {name: matched for each in found.values() for name, matched in each.matched.items()},
        {name: matching for each in found.values() for name, matching in each.matchings.items()},
        again[0] if len(again) == 1 else "",
        rest[0].rest if len(rest) == 1 else "",
        rest[0].rest_kept if len(rest) == 1 else "",
        paid,
        resend=resend,
        recorded=bool(found),
        forced=forced,
        answered={name: rows for each in found.values() for name, rows in each.answered.items()},
    )


def _compare(
    reader: RunReader,
    whole: RunReader,
    facts: JsonObject,
    prepared: Prepared,
    worker: AnyWorker | None,
    name: str,
    *,
    resend: bool,
) -> Changes:
    prepared, same = matched(prepared, facts, worker)
    prepared = with_recorded_models(prepared, facts)
    same = same and not (resend and facts.get("forced"))
    edits = list(differences(facts, options_of(prepared)))
    edited = edited_entries(prepared, facts)
    theirs, held = _answers_of(reader, edited) if edited else (0, 0)
    cut = 0
    if prepared.shapes.raised_from is not None:
        cut = sum(1 for record in reader.rows if record.get("ok") and record.get("truncated"))
    inputs = prepared.spec.inputs
    decided = {} if prepared.spec.given("retry_failed") else answered_failures(reader)
    answered = {name: decided}
    if isinstance(inputs, RowChannel):  # the rows come from another stage
        return Changes(reader.name, edits, theirs if same else reader.rows.counts()[0], cut, answered=answered)
    again = readable_again(inputs)
    if again is None:
        dropped = theirs if same else reader.rows.counts()[0]
        return Changes(reader.name, edits, dropped, cut, {name: None}, answered=answered)
    at_people = 0 if edited or prepared.spec.given("retry_failed") else _at_people(reader, facts, prepared, decided)
    matching = Matching(reader, facts, prepared, worker, same=same, answered=len(decided) + at_people)
    try:
        with closing(again) if isinstance(again, LazyRows) else nullcontext():
            found = matching.match(again)
        if cut:
            found = replace(found, kept=max(0, found.kept - cut))
        if same and theirs:
            now, more = found.kept - theirs, found.changed + theirs
            found = replace(found, kept=max(0, now), changed=more, held=found.held + held)
        kept = found.with_answers_kept()
        each_row = _row_cost(reader, whole) if same and found.to_send else None
        rest, rest_kept = (_rest_of(reader, prepared, each, each_row) for each in (found, kept))
    except BaseException:
        matching.close()
        raise
    drops = cost_of(prepared, found.changed) if found.changed else ""
    if found.changed and each_row is not None:
        drops = f"{drops.partition(', ')[0]}, {dollars(each_row * found.changed)}".removeprefix(", ")
    costs = drops, rest, rest_kept
    return Changes(reader.name, edits, found.changed, cut, {name: found}, {name: matching}, *costs, answered=answered)


def _at_people(reader: RunReader, facts: JsonObject, prepared: Prepared, decided: Mapping[int, bytes]) -> int:
    """Return how many failed rows wait for people, without those that people have ``decided``. 0 if the cascade has a
    new entry, which is then asked about all of them."""
    cascade = prepared.cascade
    known = cast(JsonObject, facts.get("cascade") or {})
    labels = [each.get("label") for each in cast("list[JsonObject]", known.get("entries") or [])]
    if cascade is None or not cascade.people or labels != [cascade.label, *(each.label for each in cascade.later)]:
        return 0
    waits = (each["index"] for each in reader.rows if not each.get("ok") and each.get("waits_for") == PEOPLE)
    return sum(index not in decided for index in waits)


def _answers_of(reader: RunReader, edited: Mapping[str, bool]) -> tuple[int, int]:
    """Return how many rows have an answer of these entries of a cascade, and how many of these rows could keep it."""
    theirs = held = 0
    for record in reader.rows:
        earlier = cast("list[JsonObject]", record.get("earlier") or [])
        names = [record.get("answered_by"), *(each.get("name") for each in earlier)]
        found = [edited[name] for name in names if isinstance(name, str) and name in edited]
        theirs = theirs + bool(found)
        held = held + (bool(found) and all(found))
    return theirs, held


def _row_cost(reader: RunReader, whole: RunReader) -> float | None:
    """Return what a row of this part has cost so far, with its cost in later stages; None if unknown."""
    done, cost = sum(reader.rows.counts()), whole.view().progress.cost
    return cost / done if done and cost else None


def _rest_of(reader: RunReader, prepared: Prepared, found: Matched, each_row: float | None) -> str:
    """Return text that says what sending the rows without an answer costs. ``each_row`` is what a row has cost so
    far."""
    if not found.to_send:
        return ""
    if each_row is not None:
        return f"about {dollars(each_row * found.to_send)}"
    going_on = _conversations(reader, prepared.spec) if found.failed else []
    going_on += [_length(row.past) for row in reader.unfinished() if row.past is not None] if found.begun else []
    cost = cost_of(prepared, max(0, found.to_send - len(going_on)), sum(going_on))
    tokens, _, price = cost.partition(", ")
    return f"about {price}" if price else tokens


def retries(run_dir: str | Path, parts: Mapping[str, Prepared]) -> tuple[int, str]:
    """Return how many failed rows are retried, and text that says so with the cost. ``parts`` as in ``compare``."""
    counts: dict[str, int] = {}
    others: Counter[str] = Counter()
    going_on = tokens = used_up = 0
    with open_run(str(run_dir)) as whole:
        for name in whole.view().parts:
            if (prepared := parts.get(name)) is None:  # a stage that the pipeline no longer has
                continue
            with whole.stage(name) if name else nullcontext(whole) as part:
                found, wanted = part.failures(), _retried(prepared.spec)
                counts[name] = sum(count for kind, count in found.items() if wanted is None or kind in wanted)
                others += found
                conversations = [] if not counts[name] else _conversations(part, prepared.spec)
                going_on += len(conversations)
                used_up += conversations.count(0)
                tokens += sum(conversations)
        total, named = sum(counts.values()), _retried(next(iter(parts.values())).spec)
        which = "" if named is None else f" with {' or '.join(sorted(named))}"
        if not total:
            failed = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common())
            return 0, f"no row of {whole.name} failed{which}{f'; those that failed: {failed}' if failed else ''}"
    stages = ", ".join(f"{count:,} of {name}" for name, count in counts.items() if name and count)
    costs = [cost_of(prepared, total - going_on, tokens) for name, prepared in parts.items() if counts.get(name)]
    cost = f", {costs[0]}" if len(costs) == 1 and costs[0] else ""
    start = total - going_on
    how = "in a new conversation" if start == total else "where they failed" if not start else ""
    how = how or f"{start:,} in a new conversation, {going_on:,} where they failed"
    head = f"retrying {rows(total)} that failed{which}{': ' if stages else ''}{stages}, {how}{cost}"
    if used_up:
        head += f". Of {rows(used_up)} max_turns or max_retries is used up: give a higher limit, or --from-start"
    return total, f"{head}. Later stages get the new answers" if stages else head


def _retried(spec: BatchSpec) -> set[str] | None:
    """Return the types of the failures that are retried; None for all."""
    retry = spec.retry_failed
    return (None if retry else set()) if isinstance(retry, bool) else {retry} if isinstance(retry, str) else set(retry)


def _conversations(reader: RunReader, spec: BatchSpec) -> list[int]:
    """Return the prompt tokens of each failed row that continues its recorded conversation. 0: the row has used up its
    limits, so that nothing is sent."""
    found, wanted = [], _retried(spec)
    for place, record in reader.rows.placed():
        past = None if record.get("ok") else reader.past(place, record)
        if past is None or past.failed is None or (wanted is not None and past.failed.error.type not in wanted):
            continue
        if (tokens := _length(past)) and not starts_afresh(past.failed.error, spec.retry_from):
            found.append(0 if _used_up(past, spec) else tokens)
    return found


def _used_up(past: Past, spec: BatchSpec) -> bool:
    """Return whether a failed row of the tool loop may neither repair its answer nor take another turn."""
    rejected = sum(1 for turn in past.turns if not turn.reply.tool_calls)
    if past.failed is not None and past.failed.error.type == LimitExceeded.type:
        return spec.turn_limit is not None and len(past.turns) - rejected >= spec.turn_limit
    return past.failed is not None and past.failed.error.stage == OutputError.stage and rejected > spec.max_retries


def _length(past: Past) -> int:
    """Return the tokens of the conversation that the next request of a row sends."""
    return max((reply.usage.prompt_tokens + reply.usage.completion_tokens for reply in past.replies), default=0)


def cost_of(prepared: Prepared, count: int, more_tokens: int = 0) -> str:
    """Return text with the cost of sending ``count`` rows: ``about 1.2k prompt tokens, $0.01``; "" if it is unknown.
    ``more_tokens`` are those of conversations that continue."""
    dry = DryRun.untouched(prepared)
    each = dry.row_tokens
    if not dry.sampled:
        return ""
    words = f"about {amount(each * count + more_tokens)} prompt tokens"
    if dry.cost is not None and dry.rows:
        factor = (each * count + more_tokens) / (each * dry.rows) if each else 0
        words += ", " + " to ".join(dict.fromkeys(dollars(cost * factor) for cost in dry.cost))
    return words
