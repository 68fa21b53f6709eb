"""Rows of a review as a table for a spreadsheet, and back.

The rows of a table belong to its reviewer until it is imported or the rows are freed. A row of the audit has nothing of
the model's answer. Cells that a spreadsheet would run as formulas begin with an apostrophe. When a table comes back,
each row is checked by itself: a refused row stays with its reviewer, and the others are accepted.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.files.tables import as_text
from batch_agent.record.people import PeopleReview, Refusal, checked_name, event_of_row
from batch_agent.record.scoring import row_fields
from batch_agent.trust.gold import OUTPUT, shown_cell
from batch_agent.trust.review import Event, Queue, ReviewRow

ROW = "row"
ID = "id"
QUEUE = "queue"
NONE = "no_right_answer"
ANSWER = "answer"
MODEL = "model"
INPUT = "input"
RUN_BY_SPREADSHEETS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
NUMBER = re.compile(r"-?\d+(\.\d+)?")
YES = ("x", "yes", "true", "1")
DELIMITERS = (",", ";", "\t")


@dataclass(slots=True)
class Imported:
    """The outcome of an import, in numbers of rows. ``refused``: line, id and reason of each refused row."""

    taken: int = 0
    known: int = 0  # their answers were imported before
    freed: int = 0  # they were empty
    empty: int = 0  # the same, but their reviewer did not have them
    refused: list[tuple[int, str, str]] = field(default_factory=list)


def escaped(text: str) -> str:
    """Return the text of a cell, changed if a spreadsheet would run it as a formula."""
    return f"'{text}" if text.startswith(RUN_BY_SPREADSHEETS) and NUMBER.fullmatch(text) is None else text


def unescaped(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(RUN_BY_SPREADSHEETS) else cell


def take_rows(review: PeopleReview, who: str, limit: int | None, queue: Queue | None) -> list[ReviewRow]:
    """Give rows to a reviewer until they are imported or freed. A reviewer who has rows gets the same ones again; else
    the next ones."""
    name = checked_name(who)
    review.prepare()

    def decide(now: float) -> tuple[list[Event], list[ReviewRow]]:
        rows, core = review.queue(queue), review.review
        mine = {(each.row, each.queue) for each in core.held_by(name, now, for_good=True)}
        if again := [row for row in rows if (row.row, row.queue) in mine and core.may_judge(row, name, None)]:
            return [], again
        new = [row for row in rows if core.may_judge(row, name, now)][:limit]
        return [event_of_row("lease", row, name) for row in new], new

    return review.log.change(review.review, decide)


def write_table(review: PeopleReview, rows: Sequence[ReviewRow], stream: IO[bytes]) -> None:
    """Write these rows as CSV."""
    records = review.records(rows)
    names = [OUTPUT] if review.form.whole else [each.name for each in review.form.fields]
    inputs = list(dict.fromkeys(name for record in records for name in row_fields(record.get("input"))))
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    head = [ROW, ID, QUEUE, *_columns(ANSWER, names), NONE]
    writer.writerow([*map(escaped, [*head, *_columns(MODEL, names), *_columns(INPUT, inputs)])])
    for row, record in zip(rows, records, strict=True):
        shown = None if row.queue == "audit" else cast(JsonValue, record.get("output"))
        models = [review.form.value(each, shown) for each in review.form.fields]
        fields = row_fields(record.get("input"))
        cells = [row.row, row.id, row.queue, *[None] * len(names), None, *models, *map(fields.get, inputs)]
        writer.writerow(["" if cell is None else escaped(as_text(cell)) for cell in cells])
    text.flush()
    text.detach()


def _columns(start: str, names: Sequence[str]) -> list[str]:
    return [start if name == OUTPUT and start != INPUT else f"{start}.{name}" for name in names]


def import_table(review: PeopleReview, who: str, path: Path) -> Imported:
    """Import the answers in a table. Raises SpecError for a file that is not such a table."""
    name, lines = checked_name(who), [*_lines(path, review)]
    review.catch_up()

    def decide(now: float) -> tuple[list[Event], Imported]:
        found, events = Imported(), list[Event]()
        places = {(row.row, row.queue): row for row in review.queue()}
        seen: set[ReviewRow] = set()
        for number, cells in lines:
            try:
                row = _row(cells, places)
                if row in seen:
                    raise Refusal("this row is in the file twice")
                seen.add(row)
                event, counted = _event(review, row, cells, name, now)
            except Refusal as why:
                found.refused.append((number, cells.get(ID, ""), str(why)))
                continue
            events += [] if event is None else [event]
            setattr(found, counted, getattr(found, counted) + 1)
        return events, found

    return review.log.change(review.review, decide)


def free_rows(review: PeopleReview, who: str) -> int:
    """Free all rows that a reviewer holds in tables. Returns their number."""
    name = checked_name(who)
    review.catch_up()

    def decide(now: float) -> tuple[list[Event], int]:
        held = review.review.held_by(name, now, for_good=True)
        rows = [ReviewRow(each.row, each.id, each.queue, each.input) for each in held]
        return [event_of_row("free", row, name) for row in rows], len(rows)

    return review.log.change(review.review, decide)


def _event(
    review: PeopleReview, row: ReviewRow, cells: dict[str, str], who: str, now: float
) -> tuple[Event | None, str]:
    """Return the event for a line of a table, and the kind under which it is counted. The event is None if the line has
    no answer. Raises Refusal."""
    core = review.review
    kind = "none" if _is_none(cells) else "answer"
    given, holds = _given(review, cells), core.holds(row, who, now)
    if kind == "none" and given is not None:
        raise Refusal(f"it has an answer, and {NONE} too: leave one of them empty")
    if kind == "answer" and given is None:
        return (event_of_row("free", row, who), "freed") if holds else (None, "empty")
    output = None if kind == "none" else review.read(given, row)
    before = core.own_answer(row, who)
    if before is not None and (before.kind, before.output) == (kind, output):
        return None, "known"
    if why := core.refusal(row, who):
        raise Refusal(why)
    if not holds and not core.may_judge(row, who, None):
        raise Refusal("another person has judged it since: the row was freed")
    return event_of_row("none" if kind == "none" else "answer", row, who, output=output), "taken"


def _row(cells: dict[str, str], places: dict[tuple[int, Queue], ReviewRow]) -> ReviewRow:
    text, queue = cells[ROW].strip(), cells.get(QUEUE, "").strip()
    found = places.get((int(text), cast(Queue, queue))) if text.isdecimal() and len(text) < 19 else None
    if found is None:
        raise Refusal(f"row {shown_cell(text)} of the queue {shown_cell(queue)} is not in the review")
    if found.id not in (cells[ID], unescaped(cells[ID])):
        raise Refusal(
            f"the id of row {text} is {shown_cell(found.id)}, and here it is {shown_cell(cells[ID])}: a spreadsheet "
            "may have changed it; open the file with the column id as text"
        )
    return found


def _is_none(cells: dict[str, str]) -> bool:
    cell = cells.get(NONE, "").strip().lower()
    if cell and cell not in YES:
        raise Refusal(f"{NONE} is {shown_cell(cell)}: write x, or leave it empty")
    return bool(cell)


def _given(review: PeopleReview, cells: dict[str, str]) -> JsonValue:
    """Return the answer in the cells; None if all are empty."""
    if review.form.whole:
        return unescaped(cells.get(ANSWER, "")) if cells.get(ANSWER, "").strip() else None
    given: dict[str, JsonValue] = {
        each.name: unescaped(cell)
        for each in review.form.fields
        if (cell := cells.get(f"{ANSWER}.{each.name}", "")).strip()
    }
    return given or None


def _lines(path: Path, review: PeopleReview) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table with the numbers of their lines. Raises SpecError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8: save it as CSV UTF-8") from None
    first = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text), delimiter=max(DELIMITERS, key=first.count))
    head = [unescaped(cell.strip()) for cell in next(reader, [])]
    if missing := [name for name in (ROW, ID, QUEUE) if name not in head]:
        raise SpecError(f"{path} has no column {missing[0]}: give a file that batch-agent export --review wrote")
    names = [OUTPUT] if review.form.whole else [each.name for each in review.form.fields]
    known = {*_columns(ANSWER, names)}
    if odd := [name for name in head if name.partition(".")[0] == ANSWER and name not in known]:
        raise SpecError(f"{path} has a column {odd[0]}, and answers have only {', '.join(_columns(ANSWER, names))}")
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                filled = [*cells, *[""] * (len(head) - len(cells))]
                yield reader.line_num, dict(zip(head, filled, strict=False))
    except csv.Error as error:
        raise SpecError(f"{path}, line {reader.line_num}: {error}") from None
