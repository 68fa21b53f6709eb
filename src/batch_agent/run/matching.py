"""Matches the rows of a resumed run with those of its record: which answers still fit, which rows are sent, and which
recorded answers no row would use.

Only digests are compared, in a temporary database on disk, so that a million rows take little memory. A row is matched
by its key (its question and its id), then by its question alone, because an id may change while the question does not.
A recorded result without a match belongs to a row that changed: to the row with the same input, the same id, or the
same place between unchanged rows.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import AsyncIterable, Iterable, Iterator, Sized
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import cast

from batch_agent.agent.fingerprint import AnyWorker, fingerprint_of, rows_under
from batch_agent.agent.prepare import Prepared
from batch_agent.errors import JobError
from batch_agent.files.gold import in_keys
from batch_agent.files.read import LazyRows
from batch_agent.job import Placed
from batch_agent.messages import JsonObject
from batch_agent.observe.text import counted
from batch_agent.record.keys import KEY_BYTES, NAME_BYTES, Keys, row_of
from batch_agent.record.reader import RunReader
from batch_agent.record.store import Adoption, Identity
from batch_agent.run.cascade import further_identities

AT_ONCE = 1000  # lines inserted together
NAMED = 3  # changed rows that are named
# How a row was matched with a recorded one, or why its recorded answer does not fit.
SAME, RENAMED, BY_INPUT, IN_PARTS, LOST, QUESTION, EDITED, MOVED = range(8)
FITS, CHANGED = (SAME, RENAMED, BY_INPUT), (QUESTION, EDITED, MOVED)
DONE, FAILED = 0, 2  # ranks of recorded rows; 1 is one that has begun and is not done

TABLES = f"""
CREATE TABLE now (idx INTEGER PRIMARY KEY, key BLOB, row BLOB, was INTEGER, how INTEGER);
CREATE TABLE was (id INTEGER PRIMARY KEY, name UNIQUE, key BLOB, row BLOB, rank INTEGER, idx INTEGER, taken INTEGER);
CREATE TABLE line (id INTEGER PRIMARY KEY, idx INTEGER, row BLOB, ok INTEGER, name BLOB, own INTEGER, was INTEGER,
                   now INTEGER);
CREATE TABLE pair (one INTEGER PRIMARY KEY, other INTEGER);
CREATE INDEX pair_other ON pair (other);
CREATE TABLE side (sought, nth INTEGER, one INTEGER, PRIMARY KEY (sought, nth)) WITHOUT ROWID;
CREATE VIEW left_lines AS SELECT line.id, line.idx, line.row, line.was,
    CASE WHEN length(was.key) > {KEY_BYTES} THEN substr(was.key, {KEY_BYTES + 1}) ELSE line.name END AS name
    FROM line LEFT JOIN was ON was.id = line.was WHERE line.now IS NULL;
CREATE VIEW own AS SELECT idx, substr(key, {KEY_BYTES + 1}) AS name FROM now
    WHERE was IS NULL AND how IS NULL AND length(key) > {KEY_BYTES};
"""


@dataclass(frozen=True, slots=True)
class Matched:
    """The numbers of a comparison of rows. ``total``: rows that can be asked. ``kept``: rows with an answer that fits.
    ``changed``: rows with a recorded answer to something else; ``held`` of them keep it with on_change="keep".
    ``gone``: recorded answers without a row. ``renamed``: rows that are kept or continue, and have another id than
    before. ``names``: indexes of a few changed rows, if rows changed and not options."""

    total: int = 0
    kept: int = 0
    changed: int = 0
    held: int = 0
    new: int | None = None
    failed: int = 0
    begun: int = 0
    lost: int = 0
    gone: int = 0
    renamed: int = 0
    names: tuple[int, ...] = ()

    @property
    def to_send(self) -> int:
        return self.total - self.kept

    def with_answers_kept(self) -> Matched:
        """Return the numbers for on_change="keep"."""
        kept, changed = self.kept + self.held, self.changed - self.held
        return Matched(
            self.total, kept, changed, 0, self.new, self.failed, self.begun, self.lost, self.gone, self.renamed
        )

    def __str__(self) -> str:
        parts = (
            (self.changed, "changed"),
            (self.new or 0, "new"),
            (self.failed, "failed"),
            (self.begun, "begun"),
            (self.lost, "not in the journal"),
        )
        which = ", ".join(f"{count:,} {what}" for count, what in parts if count)
        words = f"kept {self.kept:,}, to send {self.to_send:,}{f' ({which})' if which else ''}"
        return words + (f", no longer asked for {self.gone:,}" if self.gone else "")

    def to_json(self) -> JsonObject:
        """Return the numbers as JSON."""
        return {
            "kept": self.kept,
            "to_send": self.to_send,
            "changed": self.changed,
            "new": self.new,
            "failed": self.failed,
            "begun": self.begun,
            "no_longer_asked_for": self.gone,
            "matched_by_content": self.renamed,
        }

    @property
    def says_renamed(self) -> str:
        """Return text that says how many rows with other ids keep their answers; "" if there are none."""
        if not self.renamed:
            return ""
        count = counted(self.renamed, "row")
        return f"{count} with another id than before {'is' if self.renamed == 1 else 'are'} matched by content"


def readable_again(inputs: object) -> Iterable[object] | None:
    """Return inputs that can be read before the run reads them; None if they may be readable only once: reading an
    iterable without a length may use it up."""
    if isinstance(inputs, LazyRows):
        return inputs.again()
    if isinstance(inputs, AsyncIterable | Iterator) or not (isinstance(inputs, Iterable) and isinstance(inputs, Sized)):
        return None
    return cast("Iterable[object]", inputs)


def _until_an_error(inputs: Iterable[object]) -> Iterator[object]:
    """Yield the inputs before the first that cannot be read. The run reports the error when it reads that input
    itself."""
    rows = iter(inputs)
    while True:
        try:
            value = next(rows)
        except Exception:  # StopIteration, or any error of the user's code  # noqa: BLE001
            return
        yield value


class Matching:
    """Compares the rows of one run or stage with those of its record. Close it. It may be used from any thread, one at
    a time. ``same``: the options ask what is recorded. ``forced``: answers were kept by force. ``answered``: failed
    rows that people have answered, which are not sent."""

    def __init__(
        self,
        reader: RunReader,
        facts: JsonObject,
        prepared: Prepared,
        worker: AnyWorker | None,
        *,
        same: bool,
        answered: int = 0,
    ) -> None:
        self._answered = answered
        self._reader = reader
        self._facts = facts
        self._prepared = prepared
        self._worker = worker
        self._same = same
        self._forced = same and bool(facts.get("forced"))
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # a file without a name
        self._db.executescript(TABLES)
        self._total = 0
        gold = prepared.gold
        self._whole = gold.whole if gold is not None and in_keys(gold.taken, facts) else None

    def close(self) -> None:
        self._db.close()

    def match(self, inputs: Iterable[object]) -> Matched:
        """Compare the rows, and return the numbers."""
        recorded = self._reader.recorded(self._fingerprint, forced=self._forced)
        if recorded is None:  # the journal is gone, and no answer can be used
            total = sum(1 for _ in self._identified(inputs))
            return Matched(total, lost=min(total, self._reader.rows.counts()[0]))
        self._db.execute("BEGIN")
        self._insert("INSERT INTO now (idx, key, row) VALUES (?, ?, ?)", self._identified(inputs))
        was = ((each.name, each.key, each.row, each.rank, each.index) for each in recorded)
        self._insert("INSERT OR IGNORE INTO was (name, key, row, rank, idx) VALUES (?, ?, ?, ?, ?)", was)
        self._match("key", "length(key) > 0", SAME)
        self._match(f"substr(key, 1, {KEY_BYTES})", "length(key) > 0", RENAMED)
        if self._forced:
            self._match("row", "row IS NOT NULL", BY_INPUT, newest=True)
        if self._prepared.spec.samples > 1 or self._prepared.cascade is not None:
            self._db.execute("CREATE INDEX was_row ON was (row)")
        ok, _ = self._reader.rows.counts()
        if ok > self._one("SELECT count(*) FROM was WHERE taken AND rank = ?", DONE):
            self._match_results()
        return self._counted()

    @property
    def _fingerprint(self) -> str | None:
        """The fingerprint of a user's worker; None without one. Its answers are recorded under keys that do not contain
        it."""
        return None if self._prepared.spec.worker is None else fingerprint_of(self._prepared, self._worker).hex()

    def adoptions(self, *, keeps: bool) -> Iterator[Adoption]:
        """Yield the rows that take over the record of another key or input. ``keeps``: changed rows are among them."""
        changed = f"n.how IN ({EDITED}, {MOVED})" if keeps and self._same else "0"
        found = self._db.execute(
            f"SELECT w.name, n.key, n.row, w.row, {changed} FROM now n JOIN was w ON w.id = n.was "
            f"WHERE n.how = {RENAMED} OR (n.how = {SAME} AND w.row IS NOT n.row AND w.row IS NOT NULL) OR {changed} "
            "ORDER BY n.idx"
        )
        for name, key, row, before, forced in found:
            yield Adoption(name, key, row, bool(forced))
            if before is not None and before != row:
                yield from self._samples(Identity(key, before), Identity(key, row), forced=bool(forced))

    def _samples(self, before: Identity, now: Identity, *, forced: bool) -> Iterator[Adoption]:
        """Yield the other agents of a row whose input changed. Answers that were kept by force are found by this
        input."""
        pairs = zip(*(further_identities(each, self._prepared) for each in (before, now)), strict=True)
        for sought, sample in ((was.row, one) for was, one in pairs):
            for (name,) in self._db.execute("SELECT name FROM was WHERE row = ?", (sought,)).fetchall():
                yield Adoption(name, sample.key, sample.row, forced)

    # Rows of now, by their keys

    def _identified(self, inputs: Iterable[object]) -> Iterator[tuple[int, bytes, bytes]]:
        plan, keys = self._prepared.plan, Keys(rows_under(self._prepared, self._worker))
        for place, value in enumerate(_until_an_error(inputs)):
            if not place:
                plan.check_first(value)
            index, name = place, None
            if isinstance(value, Placed):
                index = value.index
                name = value.name
                value = value.value
            try:
                identity = self._identity(keys, index, value, name)
            except JobError:  # the row fails before a request is sent
                continue
            self._total += 1
            yield index, identity.key, identity.row

    def _identity(self, keys: Keys, index: int, value: object, name: str | None) -> Identity:
        plan = self._prepared.plan
        if self._whole is not None:  # the record knows the row with its gold
            value = self._whole.of(value, index)
        if not plan.shows(value):
            return keys.identify(value, *plan.asks(value))
        job = plan.job(index, value, name)  # its input has the text of a document
        return keys.identity(job, plan.question(job))

    def _insert(self, statement: str, values: Iterable[tuple[object, ...]]) -> None:
        lines = iter(values)
        while some := list(islice(lines, AT_ONCE)):
            self._db.executemany(statement, some)

    def _one(self, query: str, *values: object) -> int:
        return int(self._db.execute(query, values).fetchone()[0])

    def _match(self, by: str, where: str, how: int, *, newest: bool = False) -> None:
        """Match the remaining rows with recorded rows. Rows that are equal are matched in order."""
        order = "id DESC" if newest else "rank, id"
        self._pair(
            _numbered("idx AS one", by, "idx", f"now WHERE was IS NULL AND {where}"),
            _numbered("id AS other", by, order, f"was WHERE taken IS NULL AND {where}"),
        )
        self._db.execute(
            "UPDATE now SET how = ?, was = (SELECT other FROM pair WHERE one = idx) "
            "WHERE idx IN (SELECT one FROM pair)",
            (how,),
        )
        self._db.execute("UPDATE was SET taken = 1 WHERE id IN (SELECT other FROM pair)")

    def _pair(self, ones: str, others: str) -> None:
        """Fill the table of pairs: the nth row of each value with the nth recorded row of that value."""
        self._db.execute("DELETE FROM pair")
        self._db.execute("DELETE FROM side")
        self._db.execute(f"INSERT INTO side SELECT sought, nth, one FROM ({ones})")
        # CROSS JOIN: the table with the index is the inner one.
        self._db.execute(
            f"INSERT INTO pair SELECT side.one, each.other FROM ({others}) AS each "
            "CROSS JOIN side ON side.sought = each.sought AND side.nth = each.nth"
        )

    # Recorded results that no row uses so far

    def _match_results(self) -> None:
        self._insert("INSERT INTO line (idx, row, ok, name, own) VALUES (?, ?, ?, ?, ?)", self._results())
        self._link_results()
        if self._same and self._prepared.spec.oversized == "chunk":  # a row in parts is recorded under their keys
            self._match_lines("row", "1", IN_PARTS)
        self._match_lines("row", "was IS NULL", LOST if self._same else QUESTION)
        self._match_lines("row", "was IS NOT NULL", QUESTION)
        self._match_lines("name", "1", EDITED, "SELECT idx, name FROM own")
        self._match_places()

    def _results(self) -> Iterator[tuple[int, bytes, bool, bytes, bool]]:
        for record in self._reader.rows:
            index, name = cast(int, record["index"]), str(record.get("job_id"))
            own = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()
            yield index, row_of(record.get("input"), ""), bool(record.get("ok")), own, name != str(index)

    def _link_results(self) -> None:
        """Find the recorded row of each result. A run directory finds it by its input, and Redis by its index."""
        several = self._prepared.cascade is not None
        votes = several or (self._prepared.spec.samples or 1) > 1  # a row with a failed first sample may have a result
        rank = "0" if votes else f"CASE ok WHEN 1 THEN {DONE} ELSE {FAILED} END"
        by_index = self._one("SELECT count(*) FROM was WHERE idx IS NOT NULL") > 0
        line, was = ("idx * 4 + " + rank, "idx * 4 + rank") if by_index else (f"hex(row) || {rank}", "hex(row) || rank")
        if votes:
            was = "idx * 4" if by_index else "hex(row) || 0"
        self._pair(
            _numbered("id AS one", line, "idx", "line"),
            _numbered("id AS other", was, "taken IS NULL, id DESC", "was WHERE rank <> 1"),
        )
        self._db.execute(
            "UPDATE line SET was = (SELECT other FROM pair WHERE one = id) WHERE id IN (SELECT one FROM pair)"
        )
        if votes:
            self._db.execute("UPDATE was SET rank = ? WHERE id IN (SELECT was FROM line WHERE ok)", (DONE,))
        self._db.execute("CREATE INDEX now_was ON now (was)")
        self._db.execute("UPDATE line SET now = (SELECT idx FROM now WHERE now.was = line.was) WHERE was IS NOT NULL")

    def _match_lines(
        self,
        by: str,
        where: str,
        how: int,
        ones: str = "SELECT idx, row FROM now WHERE was IS NULL AND how IS NULL",
    ) -> None:
        self._pair(
            _numbered("idx AS one", by, "idx", f"({ones})"),
            _numbered("id AS other", by, "idx", f"left_lines WHERE {where}"),
        )
        self._take_pairs(how)

    def _take_pairs(self, how: int) -> None:
        self._db.execute(
            "UPDATE now SET how = ?, was = (SELECT was FROM line JOIN pair ON other = id WHERE one = now.idx) "
            "WHERE idx IN (SELECT one FROM pair)",
            (how,),
        )
        self._db.execute(
            "UPDATE line SET now = (SELECT one FROM pair WHERE other = id) WHERE id IN (SELECT other FROM pair)"
        )

    def _match_places(self) -> None:
        """Match results with rows by their places between matched rows. Rows with ids are matched in this way only if
        every id changed."""
        known = self._one(
            f"SELECT count(*) FROM (SELECT 1 FROM now WHERE how IN ({SAME}, {QUESTION}, {EDITED}) "
            f"AND length(key) > {KEY_BYTES} LIMIT 1)"
        )
        self._db.execute("DELETE FROM pair")
        if not self._one("SELECT count(*) FROM (SELECT 1 FROM line WHERE now IS NOT NULL LIMIT 1)") and self._one(
            "SELECT (SELECT count(*) FROM now) < (SELECT count(*) FROM line)"
        ):
            return  # a shorter list with nothing in common: other rows, not changed ones
        query = "SELECT id, idx, now, own FROM line ORDER BY idx, id"
        lines, places = array("q"), array("q")
        before = (-1, -1)  # a result and its row
        for number, place, now, own in self._db.execute(query):
            if now is None:
                if not (known and own):
                    lines.append(number)
                    places.append(place)
            elif now > before[1]:
                self._pair_places(lines, places, before, now, known=known > 0)
                lines = array("q")
                places = array("q")
                before = place, now
        self._pair_places(lines, places, before, None, known=known > 0)
        self._take_pairs(MOVED)

    def _pair_places(
        self, lines: array[int], places: array[int], before: tuple[int, int], end: int | None, *, known: bool
    ) -> None:
        """Pair results with the remaining rows between two matched rows, first those at the same distance from the
        first of the two."""
        if not lines:
            return
        end = self._one("SELECT coalesce(max(idx), 0) + 1 FROM now") if end is None else end
        free = "was IS NULL AND how IS NULL AND NOT EXISTS (SELECT 1 FROM pair WHERE one = idx)"
        free += f" AND length(key) = {KEY_BYTES}" if known else ""
        db, late = self._db, array("q")
        for number, place in zip(lines, places, strict=True):
            there = before[1] + place - before[0]
            found = there < end and db.execute(f"SELECT 1 FROM now WHERE idx = ? AND {free}", (there,)).fetchone()
            if found:
                db.execute("INSERT INTO pair VALUES (?, ?)", (there, number))
            else:
                late.append(number)
        if late:
            query = f"SELECT idx FROM now WHERE idx > ? AND idx < ? AND {free} ORDER BY idx LIMIT ?"
            rows = db.execute(query, (before[1], end, len(late))).fetchall()
            db.executemany(
                "INSERT INTO pair VALUES (?, ?)", ((row, number) for (row,), number in zip(rows, late, strict=False))
            )

    # Numbers

    def _counted(self) -> Matched:
        counts = {
            (how, rank): count
            for how, rank, count in self._db.execute(
                "SELECT now.how, was.rank, count(*) FROM now LEFT JOIN was ON was.id = now.was GROUP BY 1, 2"
            )
        }
        fits = [sum(counts.get((how, rank), 0) for how in FITS) for rank in range(3)]
        stays = fits[FAILED] if self._prepared.spec.retry_failed is False else min(fits[FAILED], self._answered)
        parts = sum(count for (how, _), count in counts.items() if how == IN_PARTS)
        dropped = "n.how = ? AND l.ok"
        query = f"SELECT count(*) FROM now n JOIN line l ON l.now = n.idx WHERE {dropped}"
        changed = {how: self._one(query, how) for how in CHANGED}
        keeps = CHANGED if self._same else (QUESTION,)
        held = sum(self._one(f"{query} AND l.was IS NOT NULL", how) for how in keeps)
        names = self._db.execute(
            f"SELECT idx FROM now WHERE how IN {CHANGED} ORDER BY idx LIMIT {NAMED + 1}"
        ).fetchall()
        rest = sum(count for (how, _), count in counts.items() if how is None)
        ok, failed = self._reader.rows.counts()
        unmatched = [count for (how, _), count in counts.items() if how in CHANGED]
        failed_changed = sum(unmatched) - sum(changed.values())
        return Matched(
            total=self._total,
            kept=fits[DONE] + parts + stays,
            changed=sum(changed.values()),
            held=held,
            new=self._new(rest, ok + failed + fits[1]),
            failed=fits[FAILED] - stays + failed_changed,
            begun=fits[1],
            lost=sum(count for (how, _), count in counts.items() if how == LOST),
            gone=self._one("SELECT count(*) FROM line WHERE ok AND now IS NULL"),
            renamed=sum(count for (how, _), count in counts.items() if how == RENAMED),
            names=tuple(index for (index,) in names) if self._same else (),
        )

    def _new(self, rest: int, recorded: int) -> int | None:
        """Return how many of the rows without a record are new, and were not in the recorded run; None if unknown."""
        before, rows = self._facts.get("total"), self._facts.get("rows")
        if self._facts.get("state") == "complete" and isinstance(rows, dict):
            before = rows.get("read", before)
        return max(0, rest - max(0, before - recorded)) if isinstance(before, int) else None


def _numbered(name: str, by: str, order: str, source: str) -> str:
    """Return a query for lines with the value to match by, and a number that counts equal values."""
    return f"SELECT {name}, {by} AS sought, row_number() OVER (PARTITION BY {by} ORDER BY {order}) AS nth FROM {source}"
