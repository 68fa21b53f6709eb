"""``batch-agent show``: prints rows of a recorded run as text: messages, tool calls with their arguments, times and
costs. Failed and running rows are included.

The record has the answers of models and tools. If the spec did not change, the prompts are shown as they were sent,
else the input. The rows of a pipeline are those of its stages.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import cast

from batch_agent.agent.prepare import Prepared
from batch_agent.agent.transcript import repairs
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.transcripts import prepared_again, prompts_changed, unfinished_rows
from batch_agent.errors import JobError, SpecError
from batch_agent.files.results import to_json
from batch_agent.files.tables import Record
from batch_agent.messages import ToolCall, content_shown
from batch_agent.observe.text import counted, dollars, duration, harmless, harmless_lines, rows, terminal_width
from batch_agent.record.reader import RunReader, open_run
from batch_agent.record.review import JudgedRows
from batch_agent.record.steps import Asked, CallBegun, CallEnded, Past, PastTurn, Used
from batch_agent.trust.review import AUDIT, Event

FIRST = 1  # rows that are shown by default

CUT_CHARACTERS = 2000  # shown of a text without --full
SHOWN_BYTES = 1_000_000  # of a file that the row kept
INDENT = "    "


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help=RUN_HELP)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--row", metavar="ID", help="the row with this id, or at this position, from 0; in a pipeline STAGE/ID"
    )
    which.add_argument("--failed", action="store_true", help="failed rows")
    which.add_argument("--unfinished", action="store_true", help="rows that have started and are not done")
    which.add_argument("--slow", type=int, metavar="N", help="the N rows that took longest")
    parser.add_argument("--full", action="store_true", help="do not cut long texts")


class ShownPart:
    """A stage of a pipeline, or a plain run, whose name is ""."""

    def __init__(self, name: str, run: RunReader, prepared: Prepared | None) -> None:
        self.name = name
        self.run = run
        self._prepared = prepared
        self.unknown = 0  # rows that were shown without their input

    def finished(self, place: int, record: Record) -> ShownRow:
        """Return a row that has a result."""
        past = self.run.past(place, record)
        prompts = _prompts(self._prepared, record.get("input"))
        people = self._judged.of(cast(int, record["index"]))
        return ShownRow(self.name, record, past, prompts, repairs=self._repairs(record, past), people=people)

    @cached_property
    def _judged(self) -> JudgedRows:
        return JudgedRows(self.run)

    def close(self) -> None:
        if "_judged" in vars(self):
            self._judged.close()

    def _repairs(self, record: Record, past: Past | None) -> Mapping[int, str]:
        """Return the repair messages, by the turn before them. Without the spec, the timeline has their beginnings."""
        if past is None:
            return {}
        return repairs(self._prepared.schema, past) if self._prepared is not None else self._rejected[record["index"]]

    @cached_property
    def _rejected(self) -> Mapping[object, dict[int, str]]:
        found: defaultdict[object, dict[int, str]] = defaultdict(dict)
        for span in self.run.timeline().spans:
            if span[0] == "rejected" and isinstance(span[4], int):
                found[span[3]][span[4]] = f"{span[5]}: {span[6]}"
        return found

    def unfinished(self, parts: Sequence[ShownPart], wanted: str | None = None) -> Iterator[ShownRow]:
        """Yield the rows that have started and are not done. ``parts`` are all parts of the run."""
        for row in unfinished_rows(self.run, self._prepared, [part.run for part in parts if part is not self]):
            if wanted is not None and wanted not in (row.job_id, str(row.index)):
                continue
            self.unknown += row.index is None
            record: Record | None = None if row.index is None else {"index": row.index, "job_id": row.job_id}
            prompts = None if row.index is None else _prompts(self._prepared, row.value)
            yield ShownRow(self.name, record, row.past, prompts, row.value)

    def named(self, wanted: str, parts: Sequence[ShownPart]) -> list[ShownRow]:
        """Return the rows with this id, else the row at this position in the inputs."""
        every = ((place, record) for place, record in self.run.rows.placed())
        found = [pair for pair in every if wanted in (pair[1].get("job_id"), str(pair[1].get("index")))]
        found = [pair for pair in found if pair[1].get("job_id") == wanted] or found
        return [self.finished(*pair) for pair in found] or list(self.unfinished(parts, wanted))


def show_command(options: argparse.Namespace) -> int:
    with open_run(options.run_dir) as run, ExitStack() as stages:
        view = run.view()
        with redirect_stdout(sys.stderr):  # a user's module may print when it is imported
            prepared = _prepared(run, list(view.parts))
        parts = [
            ShownPart(name, stages.enter_context(run.stage(name)) if name else run, prepared.get(name))
            for name in view.parts
        ]
        for part in parts:
            stages.callback(part.close)
        shown, page = 0, Page(options.full, terminal_width(sys.stdout))
        for row in _chosen(parts, options):
            put(("\n" if shown else "") + row_text(row, page))
            shown += 1
    if not shown and options.row is not None:
        raise SpecError(f"there is no row {options.row!r} in {run.name}, or it has not started")
    if not shown:
        kind = "failed " if options.failed else "unfinished " if options.unfinished else ""
        say(f"batch-agent: there are no {kind}rows in {run.name}")
    elif not (options.row or options.failed or options.unfinished or options.slow):
        progress = view.progress
        each = " of each stage," if view.stages else ""
        done = rows(progress.ok + progress.failed)
        say(f"the first{each} of {done}; show others with --row ID, --failed, --unfinished or --slow N")
    if unknown := sum(part.unknown for part in parts):
        say(
            f"batch-agent: the inputs of {rows(unknown)} are not available. A run directory records the input of a row "
            "when it is done; before that, it is searched in the inputs of the command that started the run, and in "
            "the answers of other stages"
        )
    return ALL_OK


def _prepared(run: RunReader, names: Sequence[str]) -> Mapping[str, Prepared]:
    """Return the parts of the run whose prompts are known."""
    known: Mapping[str, Prepared] = {}
    try:
        known = prepared_again(run)
        for name in names:
            if name not in known:
                raise prompts_changed(f"{run.name}/{name}" if name else run.name)
    except SpecError as error:
        say(f"batch-agent: inputs are shown instead of prompts: {error}")
    return known


def _chosen(parts: Sequence[ShownPart], options: argparse.Namespace) -> Iterator[ShownRow]:
    if options.row is not None:
        yield from _named(parts, options.row)
    elif options.slow is not None:
        every = ((part, place, record) for part in parts for place, record in part.run.rows.placed())
        for part, place, record in heapq.nlargest(options.slow, every, key=lambda row: _seconds(row[2])):
            yield part.finished(place, record)
    else:
        for part in parts:
            if options.unfinished:
                yield from part.unfinished(parts)
            elif options.failed:
                yield from (part.finished(*row) for row in part.run.rows.placed() if not row[1].get("ok"))
            else:
                yield from (part.finished(*row) for row in islice(part.run.rows.placed(), FIRST))


def _has_id(row: ShownRow, wanted: str) -> bool:
    """Return whether the row has this id, and not only this position."""
    record = row.record or {}
    return record.get("job_id") == wanted != str(record.get("index"))


def _named(parts: Sequence[ShownPart], wanted: str) -> list[ShownRow]:
    """Return the row ``STAGE/ID``, or the rows ``ID`` of all stages. Raises SpecError if ``ID`` is a position in more
    than one stage."""
    stage, _, own = wanted.partition("/")
    within = [part for part in parts if part.name and part.name == stage and own]
    if within:
        return within[0].named(own, parts)
    found = {part.name: part.named(wanted, parts) for part in parts}
    having = [name for name, those in found.items() if those]
    if len(having) > 1 and not all(_has_id(row, wanted) for those in found.values() for row in those):
        names = " or ".join(f"--row {name}/{wanted}" for name in having)
        raise SpecError(f"more than one stage has a row {wanted!r}: give {names}")
    return [row for those in found.values() for row in those]


def _seconds(record: Record) -> float:
    timings = record.get("timings")
    total = timings.get("total") if isinstance(timings, dict) else None
    return float(total) if isinstance(total, int | float) else 0.0


def _prompts(prepared: Prepared | None, value: object) -> tuple[str, str] | None:
    if prepared is None:
        return None
    try:
        prepared.plan.check_first(value)
        return prepared.plan.system, prepared.plan.job(0, value).prompt
    except (JobError, SpecError):
        return None


@dataclass(frozen=True, slots=True)
class Page:
    """How rows are shown. Texts are in full or shortened; ``width`` is the length of lines, None if lines are not
    wrapped."""

    full: bool = False
    width: int | None = None

    def said(self, label: str, text: str) -> str:
        if not self.full and len(text) > CUT_CHARACTERS:
            text = f"{text[:CUT_CHARACTERS]}… ({len(text) - CUT_CHARACTERS:,} more characters, --full shows them)"
        lines = harmless_lines(text).split("\n")
        return "\n".join(["", label, *(f"{INDENT}{part}" for line in lines for part in self._parts(line))])

    def _parts(self, line: str) -> list[str]:
        """Return the line, wrapped between words."""
        if self.width is None or len(line) + len(INDENT) <= self.width:
            return [line]
        room = max(20, self.width - len(INDENT))
        return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row to show. ``record`` is its result line; a running row has none. ``stage`` is "" in a plain run."""

    stage: str
    record: Record | None
    past: Past | None
    prompts: tuple[str, str] | None = None  # system and user, if known
    value: object = None  # the input of a row without a result
    repairs: Mapping[int, str] = field(default_factory=dict)  # messages after a turn whose answer did not validate
    people: Sequence[Event] = ()  # their judgements


def row_text(row: ShownRow, page: Page) -> str:
    record, past = row.record, row.past
    parts = [_heading(record, past, row.stage)]
    value = record.get("input") if record and "input" in record else row.value
    if row.prompts is not None:
        system, user = row.prompts
        parts += [page.said("system", system)] if system else []
        parts += [page.said("user", user)] if user else []
    elif value is not None:
        parts.append(page.said("input", value if isinstance(value, str) else to_json(value).decode()))
    if past is None:
        parts.append(page.said("answers", "not in the journal" if record and "ok" in record else "none yet"))
    elif past.unreadable:
        parts.append(page.said("answers", f"unreadable: {past.unreadable}"))
    else:
        parts += _conversation(past, row.repairs, page)
        parts += _worked(past, page)
    parts += _end(record, past, page)
    for each in row.people:
        said = "no right answer" if each.kind == "none" else to_json(each.output).decode()
        parts.append(page.said(f"{each.who}, {'blind' if each.queue == AUDIT else 'repair'}", said))
    return "\n".join(parts)


def _heading(record: Record | None, past: Past | None, stage: str) -> str:
    index = (record or {}).get("index")
    job_id = (record or {}).get("job_id")
    name = "a row whose input is unknown" if index is None else f"row {index}"
    if job_id is not None and str(job_id) != str(index):
        name += f" ({harmless(str(job_id))})"
    if stage:
        name = f"{stage}, {name}"
    facts = [_state(record, past)]
    spent = None if past is None else past.spent
    timings = (record or {}).get("timings")
    total = timings.get("total") if isinstance(timings, dict) else spent.total if spent is not None else None
    if isinstance(total, int | float):
        facts.append(duration(total))
    if past is not None:
        turns = cast(int, record["turns"]) if record is not None and record.get("votes") else len(past.replies)
        facts.append(counted(turns, "turn") + (" and one that was cut off" if _cut_off(past) else ""))
        tokens = _tokens(record, past)
        facts.append(f"{tokens[0]:,} tokens in, {tokens[1]:,} out")
    cost = (record or {}).get("cost")
    if isinstance(cost, int | float):
        facts.append(dollars(cost))
    if isinstance(by := (record or {}).get("answered_by"), str):
        facts.append(f"answered by {harmless(by)}")
    line = f"{name}: {', '.join(facts)}"
    return f"{line}\n{'=' * len(line)}"


def _tokens(record: Record | None, past: Past) -> tuple[int, int]:
    """Return the tokens of prompts and of answers: of the result, with failed attempts, else the sum of the turns."""
    usage = (record or {}).get("usage")
    if isinstance(usage, dict):
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            return prompt, completion
    each = [reply.usage for reply in past.replies]
    return sum(one.prompt_tokens for one in each), sum(one.completion_tokens for one in each)


def _cut_off(past: Past) -> str:
    """Return the text of an incomplete answer, which is not one of the turns; "" if there is none."""
    text = past.failed.text if past.failed is not None else ""
    answers = [turn.reply.text for turn in past.turns[-1:]] + [ask.reply.text for ask in past.asked]
    return "" if text in answers else text


def _state(record: Record | None, past: Past | None) -> str:
    if record is not None and "ok" in record:
        return "ok" if record["ok"] else "failed"
    return "not done" if past is None or not past.done else "ok"


def _conversation(past: Past, repairs: Mapping[int, str], page: Page) -> Iterator[str]:
    before = Used()
    for number, turn in enumerate(past.turns, start=1):
        reply = turn.reply
        took = duration(max(0.0, turn.spent.inference - before.inference))
        usage = f"{reply.usage.prompt_tokens:,} in, {reply.usage.completion_tokens:,} out"
        by = f", {harmless(reply.answered_by)}, a standby" if reply.answered_by else ""
        label = f"assistant, turn {number}{by}, {took}, {usage}"
        before = turn.spent
        if reply.reasoning:
            yield page.said("reasoning", reply.reasoning)
        if reply.text or not reply.tool_calls:
            yield page.said(label, reply.text)
            label = ""
        yield from _calls(turn, label, page)
        if number in repairs:
            yield page.said("user, repair", repairs[number])
    if text := _cut_off(past):
        yield page.said("assistant, cut off", text)


def _calls(turn: PastTurn, label: str, page: Page) -> Iterator[str]:
    for place, call in enumerate(turn.reply.tool_calls):
        yield page.said(f"{label}: calls" if label and not place else "calls", _call(call))
        outcome = turn.outcomes.get(place)
        if outcome is not None:
            yield page.said(f"{harmless(call.name)} answers", outcome.text)
        else:
            yield page.said(f"{harmless(call.name)}", "started" if place in turn.begun else "not started")


def _worked(past: Past, page: Page) -> Iterator[str]:
    """Yield the requests and tool calls of the user's worker, in the order in which they ended."""
    ended = {(step.digest, step.nth) for step in past.worked if isinstance(step, CallEnded)}
    number = 0
    for step in past.worked:
        if isinstance(step, Asked):
            number += 1
            if step.after >= 0:
                yield page.said(f"ask {number}", f"continues ask {step.after + 1}")
            for message in step.said:
                yield page.said(f"ask {number}, {message.role}", content_shown(message.content))
            usage = f"{step.reply.usage.prompt_tokens:,} in, {step.reply.usage.completion_tokens:,} out"
            if step.reply.text or not step.reply.tool_calls:
                yield page.said(f"answer {number}, {usage}", step.reply.text)
            for call in step.reply.tool_calls:
                yield page.said(f"answer {number} calls", _call(call))
        elif isinstance(step, CallEnded):
            yield page.said("the worker calls", _call(ToolCall("", step.name, step.arguments)))
            yield page.said(f"{harmless(step.name)} {'answers' if step.ok else 'fails'}", step.text)
        elif isinstance(step, CallBegun) and (step.digest, step.nth) not in ended:
            yield page.said("the worker calls", _call(ToolCall("", step.name, step.arguments)))
            yield page.said(harmless(step.name), "started; its outcome is unknown")


def _call(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return f"{call.name} {call.arguments}"
    given = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{call.name}({', '.join(given)})"


def _end(record: Record | None, past: Past | None, page: Page) -> Iterator[str]:
    error = (record or {}).get("error")
    failed = past.failed.error if past is not None and past.failed is not None else None
    if isinstance(error, dict):
        yield page.said("failed", f"{error.get('type')}: {error.get('message')}")
        if traceback := error.get("traceback"):
            yield page.said("traceback", str(traceback).rstrip())
    elif failed is not None and not (record or {}).get("ok"):
        yield page.said("failed", str(failed))
        if failed.traceback:
            yield page.said("traceback", failed.traceback.rstrip())
    output = (record or {}).get("output")
    if isinstance(output, str):
        answers = [] if past is None else [reply.text for reply in past.replies]
        if output not in answers:  # the worker, or the agent that it started, wrote it
            yield page.said("output", output)
    elif output is not None:
        yield page.said("output", to_json(output).decode())
    yield from _trust(record or {}, page)
    artifacts = (record or {}).get("artifacts")
    for name, path in artifacts.items() if isinstance(artifacts, dict) else ():
        yield from _artifact(harmless(str(name)), Path(str(path)), page)


def _trust(record: Record, page: Page) -> Iterator[str]:
    """Yield how the samples of a row voted, and how much its fields are doubted."""
    votes = record.get("votes")
    doubts = record.get("doubts")
    samples = record.get("samples")
    lines = []
    for name, vote in votes.items() if isinstance(votes, dict) else ():
        counts = ", ".join(f"{value} {count}" for value, count in vote["counts"].items())
        lines.append(f"{name}: {counts}; {vote['against']} against")
    if lines:
        asked = f" of {counted(len(samples), 'sample')}" if isinstance(samples, list) else ""
        yield page.said(f"votes{asked}; the conversation above is that of the first", "\n".join(lines))
    for each in cast("list[Record]", record.get("earlier") or ()):
        error = cast("Record | None", each["error"])
        said = to_json(each["output"]).decode() if error is None else f"{error['type']}: {error['message']}"
        yield page.said(f"asked too: {harmless(str(each['name']))}{_doubted(each.get('doubt'))}", said)
    if (by := record.get("answered_by")) is not None:
        waits = record.get("waits_for")
        later = "" if waits is None else f"; the row waits for {harmless(str(waits))}"
        yield page.said("answered by", f"{harmless(str(by))}{later}")
    if isinstance(doubts, dict):
        known = (f"{name}: {'not known' if doubt is None else f'{doubt:.2f}'}" for name, doubt in doubts.items())
        yield page.said("doubt, from 0 to 1", "\n".join(known))


def _doubted(doubt: object) -> str:
    return f", doubt {doubt:.2f}" if isinstance(doubt, int | float) else ""


def _artifact(name: str, path: Path, page: Page) -> Iterator[str]:
    """Yield the text of a file that the row kept: what a command-line agent did, printed and changed."""
    try:
        text = path.read_text() if path.stat().st_size <= SHOWN_BYTES else ""
    except (OSError, UnicodeDecodeError):  # on another machine, moved, or not a text
        text = ""
    yield (
        page.said(f"{name}, {harmless(str(path))}", text.rstrip())
        if text.strip()
        else f"\n{name}, {harmless(str(path))}"
    )
