"""The certificate of a promise that is kept: what was promised, how it was proved, and digests of the record.

``check`` computes all of it again from the record: it reads each result line once, with the journal beside it, keeps
sums and counts in place of rows, and imports no code of the run. All sums are of digests, so that the order of lines
does not matter. It returns the first difference in words.
"""

from __future__ import annotations

import os
import sqlite3
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from struct import pack
from typing import NamedTuple, cast

import orjson
from pydantic import JsonValue

from batch_agent.errors import SpecError, StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.files.tables import Record, record_of
from batch_agent.messages import JsonObject
from batch_agent.record.codec import ASKED, ENDED, decode
from batch_agent.record.doubts import FinishedDoubts, doubt_of, input_digest
from batch_agent.record.keys import derived, entry_mark, row_of, sample_mark
from batch_agent.record.people import PeopleReview
from batch_agent.record.promise import (
    PROMISE,
    SUMS,
    PromiseStanding,
    RunPromise,
    audit_key,
    row_digest,
)
from batch_agent.record.reader import RunReader, as_result, open_run, parsed
from batch_agent.record.rundir import FAILURES, JOURNAL, RESULTS, recorded_options
from batch_agent.record.score_reader import records_of
from batch_agent.record.sqlite import open_to_read
from batch_agent.record.steps import Asked, Ended
from batch_agent.trust.anytime import ERROR, PRIOR_A
from batch_agent.trust.gold import GoldField, same_json
from batch_agent.trust.order import KeyedOrder
from batch_agent.trust.promise import Promise
from batch_agent.trust.review import AUDIT, Event
from batch_agent.version import __version__

FORMAT = 1
BUCKETS = 256  # sums of answers, by the first byte of the digest of a row
ROWS_AT_ONCE = 20_000  # rows that are compared one by one with one reading of the journal
MOST_SAMPLES = 16  # of an entry of a cascade
PART = 32 * 2**20  # bytes of result lines that a process reads at once
BLOCK = 2**18  # bytes of them that are in memory at once
TEXTS = 10_000  # answers whose bytes are kept: most tables have few different ones
SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
from_bytes = int.from_bytes
JUDGED = ("answer", "none", "skip")
MARK = 4  # bytes of the digest of a line of the log
METHOD = (
    "rows in the order of a keyed hash, judged by people who do not see the answers; thresholds tested from 'all rows "
    "to people' down, each at the full level, by the ratio of prior and posterior for sampling without replacement"
)
METHOD_OF_LAST = (
    "a fixed number of rows in the order of a keyed hash, answered by both models; thresholds tested from 'all rows to "
    "the last model' down, each at the full level, by the exact bound for sampling without replacement, at one look"
)


class _Wanted(NamedTuple):
    """What a pass over the rows must find. ``last``: the rank of the last row of the audit. ``rows``: positions of the
    rows whose doubt is needed."""

    key: str
    thresholds: tuple[float, ...]
    rows: frozenset[int]
    last: bytes
    doubt: bool
    model: str = ""  # the last one, if its answers are the truth


@dataclass(slots=True)
class _Counts:
    """What a pass over the rows has found. ``before``: number of rows whose rank is at most that of the audit's last
    row."""

    rows: int = 0
    ok: int = 0
    digest: int = 0
    doubted: int = 0
    before: int = 0
    answers: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    bands: list[int] = field(default_factory=list)
    doubts: dict[int, float] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, str] = field(default_factory=dict)
    both: dict[int, Record] = field(default_factory=dict)  # audited rows with the answers of two models

    def __iadd__(self, more: _Counts) -> _Counts:
        self.rows += more.rows
        self.ok += more.ok
        self.before += more.before
        self.digest = (self.digest + more.digest) % SUMS
        self.doubted = (self.doubted + more.doubted) % SUMS
        self.answers = [(one + other) % SUMS for one, other in zip(self.answers, more.answers, strict=True)]
        self.bands = [one + other for one, other in zip(self.bands, more.bands, strict=True)]
        self.doubts |= more.doubts
        self.names |= more.names
        self.inputs |= more.inputs
        self.both |= more.both
        return self


class _Recounted(FinishedDoubts):
    """The counts of a pass, used in place of the doubts of all rows."""

    def __init__(self, run: RunReader, counts: _Counts, wanted: _Wanted) -> None:
        super().__init__(run, doubt=wanted.doubt)
        self.done = counts.rows
        self.ok = counts.ok
        self._counts = counts

    def catch_up(self) -> None:
        """Do nothing: the rows have been read."""

    def bands(self, thresholds: Sequence[float]) -> list[int]:
        return [*self._counts.bands]

    def doubt(self, index: int) -> float:
        return self._counts.doubts[index]

    def is_done(self, index: int) -> bool:
        return index in self._counts.doubts

    def digests(self, indexes: Collection[int]) -> Mapping[int, str]:
        return self._counts.inputs

    def records(self, indexes: Sequence[int]) -> list[Record | None]:
        wanted = set(indexes)
        rows = self._run.rows if wanted else ()
        found = {index: each for each in rows if isinstance(index := each["index"], int) and index in wanted}
        return [found.get(index) for index in indexes]


def _written(output: object) -> bytes:
    try:
        return orjson.dumps(output, option=SORTED)
    except TypeError:
        return to_json(output)


def _count(lines: Iterable[bytes | Record], wanted: _Wanted, *, exact: bool = False) -> _Counts:
    """Return the counts of rows. ``exact``: integers beyond 64 bits are read too, which takes twice the time."""
    found = _Counts(bands=[0] * (len(wanted.thresholds) + 1))
    rank = KeyedOrder(wanted.key).rank
    last = wanted.last
    digest = 0
    doubted = 0
    answers = found.answers
    bands = found.bands
    thresholds = wanted.thresholds
    for line in lines:
        record = (_read_exactly(line) if exact else _read(line)) if isinstance(line, bytes) else line
        if record is None:
            continue
        index = cast(int, record["index"])
        name = str(record.get("job_id"))
        given = record.get("input")
        content = row_of(given, "")
        digest += row_digest(name, content)
        found.rows += 1
        doubt = doubt_of(record, doubt=wanted.doubt, last=wanted.model)
        if record.get("ok"):
            found.ok += 1
            answers[content[0]] += from_bytes(
                blake2b(content + _written(record.get("output")), digest_size=16).digest()
            )
            doubted += from_bytes(blake2b(content + pack("<d", doubt), digest_size=16).digest())
        bands[bisect_left(thresholds, doubt)] += 1
        if last and rank(name) <= last:
            found.before += 1
        if index in wanted.rows:
            found.doubts[index], found.names[index] = doubt, name
            shown = _read(line) if exact and isinstance(line, bytes) else record  # what people were shown is rounded
            found.inputs[index] = input_digest(None if shown is None else shown.get("input"))
            if wanted.model:
                found.both[index] = {part: record.get(part) for part in ("output", "answered_by", "earlier")}
    found.digest = digest % SUMS
    found.doubted = doubted % SUMS
    found.answers = [each % SUMS for each in answers]
    return found


def _read(line: bytes) -> Record | None:
    """Return the record in a line of a result or a failure; None if it is neither."""
    try:
        record = orjson.loads(line)
        if record["ok"] is True and isinstance(record["index"], int):
            return cast(Record, record)
    except (ValueError, LookupError, TypeError):
        pass
    return parsed(line)


def _read_exactly(line: bytes) -> Record | None:
    record = record_of(line)
    return as_result(record) if isinstance(record, dict) and isinstance(record.get("index"), int) else None


def _count_part(path: str, start: int, end: int, wanted: _Wanted, *, exact: bool) -> _Counts:
    return _count(_lines_of(Path(path), start, end), wanted, exact=exact)


def _lines_of(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the lines that begin in a part of a file."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # it begins before the part, unless the byte before is its end
        while (left := end - file.tell()) > 0:
            # readlines ends after the first line that makes more bytes than its argument; 0 would be no limit
            lines = file.readlines(min(left, BLOCK) - 1) if left > 1 else [file.readline()]
            if not lines or not lines[0]:
                return
            yield from lines


def _recount(run: RunReader, wanted: _Wanted, digest: str) -> tuple[_Counts, list[int]]:
    """Return the counts of all rows, and the sums of the answers in the journal; [] if these must be compared row by
    row. If the rows do not have this ``digest``, they are read again, because the quick reader rounds integers beyond
    64 bits."""
    counts, journal = _recounted(run, wanted)
    if journal and f"{counts.digest:032x}" != digest:
        counts, _ = _recounted(run, wanted, exact=True)
    return counts, journal


def _recounted(run: RunReader, wanted: _Wanted, *, exact: bool = False) -> tuple[_Counts, list[int]]:
    found = _Counts(bands=[0] * (len(wanted.thresholds) + 1))
    if not isinstance(run.place, Path):
        found += _count(run.rows, wanted)
        return found, []
    files = [path for name in (RESULTS, FAILURES) if (path := run.place / name).exists()]
    if any(path.with_name(f"{path.name}.new").exists() for path in files):
        raise SpecError(f"a session of {run.name} was interrupted: batch-agent resume {run.name} completes its results")
    sizes = {path: path.stat().st_size for path in files}
    journal = run.place / JOURNAL
    if not journal.exists():
        raise SpecError(f"{run.name} has no {JOURNAL}, so its answers cannot be compared with it")
    if sum(sizes.values()) <= PART:
        for path, size in sizes.items():
            found += _count(_lines_of(path, 0, size), wanted, exact=exact)
        return found, _journal_sums(str(journal))
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        sums = pool.submit(_journal_sums, str(journal))
        parts = [
            pool.submit(_count_part, str(path), start, min(size, start + PART), wanted, exact=exact)
            for path, size in sizes.items()
            for start in range(0, size, PART)
        ]
        for part in parts:
            found += part.result()
        return found, sums.result()


def _journal_sums(path: str) -> list[int]:
    """Return sums over the answers with which agents ended, as far as the journal has them in the last step of the
    agent."""
    sums, known = [0] * BUCKETS, dict[str, bytes]()
    with closing(open_to_read(Path(path))) as db:
        for row, body in db.execute("SELECT row, body FROM record WHERE kind = ?", (ENDED,)):
            try:
                text = orjson.loads(body)[3][0]
                if (written := known.get(text)) is None:
                    written = _written(orjson.loads(text))
                    if len(known) < TEXTS:
                        known[text] = written
            except (ValueError, LookupError, TypeError):
                continue  # its answer is in another step, or had to be mended
            sums[row[0]] += from_bytes(blake2b(row + written, digest_size=16).digest())
    return [each % SUMS for each in sums]


def _differing_row(run: RunReader, buckets: frozenset[int]) -> str:
    """Return the name of the first row whose answer is not in the journal, or "". A voted or a repaired answer is in no
    single step. So each field is searched in all answers of the row: in those of its samples, and of the entries of a
    cascade."""
    if not isinstance(run.place, Path):
        for place, record in run.rows.placed():
            if record.get("ok") and not _is_said(cast(JsonValue, record.get("output")), _said_by(run, place, record)):
                return str(record.get("job_id"))
        return ""
    marks = _marks(run.facts())
    doubtful = _doubtful(run.rows, buckets)
    while some := [*islice(doubtful, ROWS_AT_ONCE)]:
        agents = {content: [content, *_further(content, marks)] for _, content, _ in some}
        with closing(open_to_read(run.place / JOURNAL)) as db:
            said = _said_in(db, {digest for each in agents.values() for digest in each})
        for name, content, output in some:
            if not _is_said(output, [answer for digest in agents[content] for answer in said.get(digest, ())]):
                return name
    return ""


def _doubtful(rows: Iterable[Record], buckets: frozenset[int]) -> Iterator[tuple[str, bytes, JsonValue]]:
    """Yield the rows whose answers must be compared one by one: id, digest of the input, and answer."""
    for record in rows:
        content = row_of(record.get("input"), "")
        if record.get("ok") and content[0] in buckets:
            yield str(record.get("job_id")), content, cast(JsonValue, record.get("output"))


def _marks(facts: JsonObject) -> tuple[int, list[str]]:
    """Return how many samples a row may have, and the labels of a cascade's entries after the first."""
    samples, cascade = recorded_options(facts).get("samples"), facts.get("cascade")
    entries = cascade.get("entries") if isinstance(cascade, dict) else None
    labels = [str(each["label"]) for each in entries[1:] if isinstance(each, dict)] if isinstance(entries, list) else []
    asked = samples if isinstance(samples, int) else 1
    return max(asked, MOST_SAMPLES) if labels else asked, labels


def _further(content: bytes, marks: tuple[int, list[str]]) -> Iterator[bytes]:
    """Yield the digests under which the journal has the other agents of a row: its samples, and later entries of a
    cascade."""
    samples, labels = marks
    for digest in (content, *(derived(content, entry_mark(label, b"")) for label in labels)):
        if digest != content:
            yield digest
        yield from (derived(digest, sample_mark(number)) for number in range(1, samples))


def _said_in(db: sqlite3.Connection, wanted: set[bytes]) -> dict[bytes, list[JsonValue]]:
    found: dict[bytes, list[JsonValue]] = {}
    for row, kind, body in db.execute("SELECT row, kind, body FROM record WHERE kind IN (?, ?)", (ENDED, ASKED)):
        digest = bytes(row)
        if digest in wanted:
            found.setdefault(digest, []).extend(_answers(kind, bytes(body)))
    return found


def _said_by(run: RunReader, place: int, record: Record) -> list[JsonValue]:
    return [each for step in run.steps(place, record) for each in _answers(step.kind, step.body)]


def _answers(kind: int, body: bytes) -> Iterator[JsonValue]:
    """Yield the answers in a step, as JSON values; as text if an answer is not JSON."""
    try:
        step = decode(kind, body) if kind in (ENDED, ASKED) else None
    except ValueError:
        return
    texts: list[str | None] = []
    if isinstance(step, Ended):
        texts = [step.output, None if step.reply is None else step.reply.text]
    elif isinstance(step, Asked):
        texts = [step.reply.text]
    for text in texts:
        if text is not None:
            try:
                yield cast(JsonValue, from_json(text.encode("utf-8", "surrogatepass")))
            except ValueError:
                yield text


def _is_said(output: JsonValue, answers: Sequence[JsonValue]) -> bool:
    if any(same_json(output, each) for each in answers):
        return True
    if isinstance(output, dict) and output:
        return all(any(_has(each, name, value) for each in answers) for name, value in output.items())
    return any(isinstance(each, str) and _text(output) in each for each in answers)


def _has(answer: JsonValue, name: str, value: JsonValue) -> bool:
    if isinstance(answer, dict):
        return same_json(answer.get(name), value) or (name not in answer and value is None)
    return isinstance(answer, str) and _text(value) in answer


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


# The certificate


class _Recomputed(NamedTuple):
    certificate: JsonObject
    counts: _Counts
    wanted: _Wanted
    journal: list[int]
    log: list[bytes]  # lines of the review
    standing: PromiseStanding
    frozen: frozenset[int]  # rows of the audit
    promise: Promise
    unlike: str  # the first audited row whose answers in the log are not those of the results


def certificate_of(run: str, *, names: bool = False) -> tuple[JsonObject | None, PromiseStanding]:
    """Return the certificate of a run, or None if its promise is not kept; and how the promise stands. Raises SpecError
    for a run without a promise, and for one whose record contradicts itself."""
    with open_run(run) as reader, PeopleReview(reader) as review:
        found = _recomputed(reader, review, names=names)
        if not found.standing.kept:
            return None, found.standing
        if why := _disagrees(reader, found):
            raise StoreError(f"{reader.name} cannot be certified: {why}")
        return found.certificate, found.standing


def check(certificate: object, run: str) -> str:
    """Return the first difference between a certificate and the record of its run in words; "" if they agree."""
    if not isinstance(certificate, dict) or certificate.get("format") != FORMAT:
        return "this is no certificate of a form that this version knows"
    given = cast(JsonObject, certificate)
    with open_run(run) as reader, PeopleReview(reader) as review:
        facts = reader.facts()
        if not isinstance(facts.get(PROMISE), dict):
            return "the run has no promise"
        if given.get("promise") != facts[PROMISE]:
            return "the promise in the certificate is not that of the run"
        found = _recomputed(reader, review, names=_has_names(given))
        return _disagrees(reader, found) or _differs(given, found)


def _has_names(given: JsonObject) -> bool:
    audit = given.get("audit")
    return isinstance(audit, list) and any(isinstance(each, dict) and "who" in each for each in audit)


def _recomputed(run: RunReader, review: PeopleReview, *, names: bool) -> _Recomputed:
    promise = review.promise
    if promise is None:
        raise SpecError(f"{run.name} has no promise, so there is nothing to certify")
    review.log.catch_up(review.review)
    log = promise.log.lines()
    known, order = promise.known, KeyedOrder(promise.known.key)
    audit = sorted(promise.audit_events(), key=lambda event: (order.rank(event.id), event.row))
    rows = frozenset(row for row, _ in promise.review.judged_rows()) | {event.row for event in audit}
    head = promise.order_before()
    last = order.rank(audit[-1].id) if audit else b""
    wanted = _Wanted(known.key, promise.thresholds, rows | {*head}, last, known.doubt, promise.last)
    counts, journal = _recount(run, wanted, known.digest)
    promise.recounted(_Recounted(run, counts, wanted), [*head, *(event.row for event in audit)])
    standing = promise.standing()
    digests: JsonObject = {
        "rows": counts.rows,
        "ok": counts.ok,
        "input": f"{counts.digest:032x}",
        "answers": [f"{each:032x}" for each in counts.answers],
        "doubts": f"{counts.doubted:032x}",
        "people": _people_digest(promise),
        "log": _log_digest(log),
    }
    certificate: JsonObject = {
        "format": FORMAT,
        "version": __version__,
        "says": _says(promise, standing),
        "promise": run.facts()[PROMISE],
        "method": {
            "name": METHOD_OF_LAST if promise.last else METHOD,
            "confidence": 1 - ERROR,
            "prior": None if promise.last else [PRIOR_A, promise.promise.prior_b],
            "thresholds": [*promise.thresholds],
            "before": promise.before,
            "first": known.audit if promise.last else known.first,
            "people_error": standing.error,
            "judged_twice": standing.twice,
        },
        "audit": [*_audit(promise, names=names)],
        "digests": digests,
        "standing": standing.to_json(),
        "run": {"model": run.facts().get("model"), "fingerprint": run.facts().get("fingerprint")},
    }
    whole = cast(JsonObject, from_json(to_json(certificate)))
    return _Recomputed(
        *(whole, counts, wanted, journal, log, standing, frozenset(event.row for event in audit), promise.promise),
        unlike=_unlike(promise, audit, counts.both),
    )


def _unlike(promise: RunPromise, audit: Iterable[Event], both: Mapping[int, Record]) -> str:
    """Return the first row of an audit by the last model whose answers in the log differ from those in the results, or
    ""."""
    fields = [*promise.fields.values()]
    for event in audit if promise.last else ():
        answer, record = cast(JsonObject, event.output), both.get(event.row, {})
        if not answer.get("answered"):
            continue  # it may have been answered since
        earlier = cast("list[JsonObject]", record.get("earlier") or [{}])[0]
        if record.get("answered_by") != promise.last or not _same_values(
            fields, answer.get("right"), record.get("output")
        ):
            return event.id
        if answer.get("ok") and not _same_values(fields, answer.get("output"), earlier.get("output")):
            return event.id
    return ""


def _says(promise: RunPromise, standing: PromiseStanding) -> str:
    bound = f"at most {standing.bound:.2%}" if standing.bound is not None else "an unknown share"
    what = f"{bound} of the {standing.rows:,} rows of the delivered table are wrong, with 95 % confidence, if "
    if promise.last:
        return f"{what}the answers of {promise.last} are right. No person has judged a row"
    verb = "are" if standing.truth.endswith("answers") else "is"
    return (
        f"{what}{standing.truth} {verb} right. Rows that people repaired count as wrong with {standing.error:.3g}, "
        "which is outside the 95 %"
    )


def _audit(promise: RunPromise, *, names: bool) -> Iterator[JsonObject]:
    """Yield the audited rows, each with both answers."""
    for event, wrong, right in promise.audited():
        answer = cast(JsonObject, event.output)
        output = answer.get("output")
        fields = promise.fields.values()
        entry: JsonObject = {
            "row": event.row,
            "id": event.id,
            "input": event.input,
            "ok": answer.get("ok"),
            "doubt": answer.get("doubt"),
            "model": {each.name: each.take(output) for each in fields} if answer.get("ok") else None,
            "right": right,
            "wrong": wrong,
        }
        if names:
            entry["who"] = [*promise.review.judges(event.row, AUDIT)]
        yield entry


def _log_digest(lines: Sequence[bytes]) -> JsonObject:
    """Return the digest of the log of the review, and four bytes of the digest of each line, by which the first line
    that differs is found. Lines that people add later are ignored."""
    whole, each = blake2b(digest_size=16), []
    for line in lines:
        digest = blake2b(_canonical(line), digest_size=16).digest()
        whole.update(digest)
        each.append(digest[:MARK].hex())
    return {"events": len(lines), "digest": whole.hexdigest(), "lines": "".join(each)}


def _canonical(line: bytes) -> bytes:
    try:
        return to_json(from_json(line))
    except ValueError:
        return line


def _out_of_order(found: _Recomputed) -> str:
    """Return how the order of the review's log is impossible, or "": the answer of an audited row must be frozen before
    a person says anything about the row."""
    frozen: set[JsonValue] = set()
    for number, line in enumerate(found.log, 1):
        event = _event(line)
        if event.get("n", number) != number:
            return f"the log of the review is not in its order: its line {number} has the number {event['n']}"
        kind, row = event.get("kind"), event.get("row")
        if kind == AUDIT:
            return ""  # an audit without a promise came before; it freezes nothing
        if kind == "frozen":
            frozen.add(row)
        elif kind in JUDGED and event.get("queue") == AUDIT and row in found.frozen - frozen:
            return (
                f"the audited row {event.get('id')} was judged (line {number} of the log of the review) before its "
                "answer was recorded for the audit"
            )
    return ""


def _event(line: bytes) -> JsonObject:
    try:
        read = from_json(line)
    except ValueError:
        return {}
    return cast(JsonObject, read) if isinstance(read, dict) else {}


def _people_digest(promise: RunPromise) -> str:
    """Return the digest of all that people have decided."""
    total = 0
    for row, queue in promise.review.judged_rows():
        verdict = promise.review.verdict(row, queue)
        made = to_json([row, queue, verdict.kind, verdict.output])
        total += int.from_bytes(blake2b(made, digest_size=16).digest())
    return f"{total % SUMS:032x}"


def _disagrees(run: RunReader, found: _Recomputed) -> str:
    """Return how the record contradicts itself, or ""."""
    facts = cast(JsonObject, found.certificate["promise"])
    counts = found.counts
    if counts.rows != facts["rows"]:
        what = "left out" if counts.rows < cast(int, facts["rows"]) else "added"
        named = _missing(run, cast(int, facts["rows"])) if counts.rows < cast(int, facts["rows"]) else ""
        return f"{abs(counts.rows - cast(int, facts['rows'])):,} rows were {what}{named}"
    if f"{counts.digest:032x}" != facts["digest"]:
        return f"the rows are not those that the run began with{_missing(run, counts.rows)}"
    beacon = facts.get("beacon")
    key = audit_key(found.promise, counts.rows, str(facts["digest"]), None if beacon is None else str(beacon))
    if key != facts["key"]:
        return "the key of the audit is not the one that the rows and the promise give"
    audit = cast("list[JsonObject]", found.certificate["audit"])
    for entry in audit:
        name = counts.names.get(cast(int, entry["row"]))
        if name != entry["id"]:
            return f"the audited row {entry['id']} is not in the table"
    if why := _out_of_order(found):
        return why
    before = cast(int, cast(JsonObject, found.certificate["method"])["before"])
    if found.wanted.last and counts.before != before + len(found.frozen):
        return f"the audit has rows that the key did not draw{_not_drawn(run, found)}"
    if found.unlike:
        return f"the audited row {found.unlike} has other answers in the log than in the results"
    differing = frozenset(
        place for place, (one, other) in enumerate(zip(counts.answers, found.journal, strict=False)) if one != other
    )
    if differing or not found.journal:
        name = _differing_row(run, differing)
        if name:
            return f"the answer of row {name} in the results is not the one in the journal"
    return ""


def _missing(run: RunReader, rows: int) -> str:
    """Return the name of the first row that does not have exactly one line, or ""."""
    seen = bytearray(rows)
    for record in run.rows:
        index = cast(int, record["index"])
        if index < rows:
            seen[index] = 1
    place = seen.find(0)
    return f": row {place} (counted from 0) is the first without a result" if place >= 0 else ""


def _not_drawn(run: RunReader, found: _Recomputed) -> str:
    order = KeyedOrder(found.wanted.key)
    for record in run.rows:
        name = str(record.get("job_id"))
        if order.rank(name) <= found.wanted.last and cast(int, record["index"]) not in found.frozen:
            return f": row {name} comes before others of the audit, and is not in it"
    return ""


def _differs(given: JsonObject, found: _Recomputed) -> str:
    """Return the first difference between a certificate and the record, in words; "" if there is none."""
    own = found.certificate
    mine, theirs = cast(JsonObject, own["digests"]), given.get("digests")
    if not isinstance(theirs, dict):
        return "the certificate has no digests"
    for part, words in (("rows", "number of rows"), ("ok", "number of rows with an answer"), ("input", "rows")):
        if theirs.get(part) != mine[part]:
            return f"the {words} of the record are not those of the certificate"
    if theirs.get("answers") != mine["answers"]:
        return "answers of the record are not those of the certificate: some were changed after it was made"
    if theirs.get("doubts") != mine["doubts"]:
        return "doubts of the record are not those of the certificate: some were changed after it was made"
    if why := _log_differs(theirs.get("log"), found.log) or _audit_differs(given.get("audit"), own["audit"]):
        return why
    if theirs.get("people") != mine["people"]:
        return "the answers of people of the record are not those of the certificate: people have judged since"
    for part in ("method", "standing", "says", "run"):
        if given.get(part) != own[part]:
            return f"{part} of the certificate is not what the record gives: {_first_of(given.get(part), own[part])}"
    for said, known in ((given, own), (theirs, mine)):
        if more := said.keys() - known.keys():
            return f"the certificate has {min(more)}, which the record does not give"
    return ""


def _log_differs(given: object, lines: Sequence[bytes]) -> str:
    """Return the first line of the review's log that differs from the certificate, in words; "" if there is none."""
    marks = given.get("lines") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(marks, str):
        return "the certificate has no digest of the log of the review"
    known = len(marks) // (2 * MARK)
    own = _log_digest(lines[:known])
    if given == own:
        return ""
    for place, line in enumerate(lines[:known]):
        here = slice(2 * MARK * place, 2 * MARK * (place + 1))
        if marks[here] != cast(str, own["lines"])[here]:
            event = _event(line)
            what = f"{event.get('kind')} of row {event['id']}" if event.get("row") is not None else event.get("kind")
            return (
                f"line {place + 1} of the log of the review ({what}) is not that of the certificate: it was changed, "
                "or a line before it was removed or moved"
            )
    if len(lines) < known:
        return f"the log of the review had {known:,} lines when it was certified, and has {len(lines):,}"
    return "the digest of the log of the review is not that of the certificate"


def _audit_differs(listed: object, own: JsonValue) -> str:
    audit = cast("list[JsonObject]", own)
    if not isinstance(listed, list) or len(listed) != len(audit):
        count = len(listed) if isinstance(listed, list) else 0
        return f"the certificate lists {count} audited rows, the record has {len(audit)}"
    for one, other in zip(audit, listed, strict=True):
        if one != other:
            name = other.get("id") if isinstance(other, dict) else other
            if not isinstance(other, dict) or other.get("id") != one["id"]:
                return f"the audited row {name} is not the one that the key drew, which is {one['id']}"
            field_name = next((each for each in one if one[each] != other.get(each)), "an unknown field")
            return f"the audited row {name} differs in {field_name}"
    return ""


def _first_of(given: object, own: JsonValue) -> str:
    if isinstance(given, dict) and isinstance(own, dict):
        for name in own:
            if given.get(name) != own[name]:
                return f"{name} is {given.get(name)!r}, and should be {own[name]!r}"
    return "it differs"


# An exported table


def check_table(path: Path, run: str) -> str:
    """Return the first difference between a table and what a run delivers; "" if its promised fields agree."""
    with PeopleReview.open(run) as review:
        promise = review.promise
        if promise is None:
            raise SpecError(f"{run} has no promise")
        fields, table = [*promise.fields.values()], dict[str, Record]()
        for record in records_of(path):
            if (name := str(record.get("job_id"))) in table:
                return f"row {name} is in {path} twice"
            table[name] = record
        for record in review.run.rows:
            name, delivered = str(record.get("job_id")), review.delivered(record)
            row = table.pop(name, None)
            if row is None:
                return f"row {name} is not in {path}"
            if bool(row.get("ok")) != bool(delivered.get("ok")):
                return f"row {name} of {path} is {'ok' if row.get('ok') else 'failed'}, and should be the other"
            if delivered.get("ok") and not _same_values(fields, row.get("output"), delivered.get("output")):
                return f"row {name} of {path} has another answer than the run delivers"
        if table:
            return f"row {next(iter(table))} of {path} is not in the run"
    return ""


def _same_values(fields: Sequence[GoldField], one: object, other: object) -> bool:
    return all(_text(each.take(cast(JsonValue, one))) == _text(each.take(cast(JsonValue, other))) for each in fields)
