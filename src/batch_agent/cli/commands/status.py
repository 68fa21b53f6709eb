"""``batch-agent status`` shows the progress of a run from another process, during or after the run; ``runs`` lists the
runs that are recorded in a directory, the latest first."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, cast

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.cli.spec.arguments import RUN_HELP, RUNS
from batch_agent.errors import BatchAgentError, SpecError, StoreError
from batch_agent.files.gold import GOLD_FACT
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.entry_counts import recorded_lines
from batch_agent.observe.numbers import ALIVE, UNPRICED, ShownNumbers, answered_words, of_record
from batch_agent.observe.text import (
    amount,
    counted,
    harmless,
    table,
    terminal_width,
    wrapped,
)
from batch_agent.record.address import RunPlace, place_of
from batch_agent.record.people import reviews_of
from batch_agent.record.promise import PromiseStanding
from batch_agent.record.reader import RunReader, RunSnapshot, look, open_run, runs_in
from batch_agent.record.rundir import FORGED, SCHEMA, stage_names
from batch_agent.record.score_reader import has_gold, score_of_run
from batch_agent.run.promise import standing_in
from batch_agent.trust.shown import brief_lines

EVERY = 2.0  # seconds between two reads: another process cannot be awaited
NOT_BEGUN = "not begun"
SCORED_ROWS = 100_000  # of a running run: reading more takes longer than a person waits
UP, CLEAR = "\x1b[{}A", "\x1b[J"
HEADINGS = ("RUN", "STATE", "ROWS", "FAILED", "STARTED", "TOKENS", "COST", "MODEL")
People: TypeAlias = Mapping[str, tuple[JsonObject, Sequence[str]]]  # stage → as JSON, in words; "" without stages
NO_PEOPLE: People = MappingProxyType({})
NEEDED = 3  # columns of the list of runs that are always shown


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch, one per line")
    parser.add_argument("--watch", action="store_true", help="repeat every two seconds until the run ends")


def status_command(options: argparse.Namespace) -> int:
    shown = ""
    with open_run(options.run_dir) as run:
        while True:
            view = run.view()
            score = _score(run, view)
            promise = _promise(run, view) if view.facts else None
            people = _people(run, view)
            found = status_json(view, score, promise, people) if options.json else None
            text = _text(view, score, promise, people) if found is None else to_json(found).decode()
            if not options.json:
                text = wrapped(text, terminal_width(sys.stdout))
            if text != shown:
                put(_over(shown) + text if not options.json else text)
                shown = text
            if not options.watch or view.state not in ALIVE:
                return ALL_OK
            time.sleep(EVERY)


def _over(shown: str) -> str:
    """Return the sequence that moves the cursor to the start of the previous output; "" without a terminal."""
    if not shown or terminal_width(sys.stdout) is None:
        return ""
    return UP.format(shown.count("\n") + 1) + CLEAR


def status_json(
    view: RunSnapshot,
    score: JsonObject | None = None,
    promise: PromiseStanding | None = None,
    people: People = NO_PEOPLE,
) -> JsonObject:
    """Return the run as one JSON object. For a pipeline, ``rows`` is the sum and ``stages`` has each stage."""
    hidden = ("command", "rows", "stages", "unpriced", GOLD_FACT, SCHEMA)
    facts = {name: value for name, value in view.facts.items() if name not in hidden}
    numbers = of_record(view)
    left, session = numbers.seconds_left, numbers.session
    status: JsonObject = {
        **facts,
        "total": view.total,
        "state": numbers.state,
        "sessions": view.sessions,
        **numbers.to_json(),
        "session": None if session is None else {"tokens": session[0], "cost": session[1]},
        "models": [*numbers.models],
        "degraded": numbers.degraded or None,
        "rows_per_second": round(numbers.rate, 3),
        "seconds_left": None if left is None else round(left),
        "summary": view.summary,
    }
    if score is not None:
        status["score"] = score
    if people:
        status["people"] = [*people.values()][-1][0]
    if promise is not None:
        status["promise"] = promise.to_json()
    if view.workers:
        status["workers"] = [{"host": worker.get("host"), "pid": worker.get("pid")} for worker in view.workers]
    if names := stage_names(view.facts):
        parts = {name: of_record(stage) for name, stage in view.stages.items()}
        reviews = {name: {"people": review} for name, (review, _) in people.items()}
        begun = {name: {"state": part.state, **part.to_json(), **reviews.get(name, {})} for name, part in parts.items()}
        status["stages"] = [{"name": name, **begun.get(name, {"state": NOT_BEGUN})} for name in names]
    return status


def _score(run: RunReader, view: RunSnapshot) -> JsonObject | None:
    """Return the score of a run with gold, as it was at its end or so far; None without gold. It does not count as a
    look at the gold: the run or ``score`` counts one."""
    if not has_gold(view.facts):
        return None
    if view.state not in ALIVE and isinstance(score := (view.summary or {}).get("score"), dict):
        return score
    if view.progress.ok + view.progress.failed > SCORED_ROWS:
        return None
    try:
        return score_of_run(run, {}, count=False).to_json()
    except (SpecError, StoreError):  # no stage has an answer yet, or a function of the user's is not here
        return None


def _people(run: RunReader, view: RunSnapshot) -> People:
    """Return what people have judged and what is left for them; empty if people do not review the run."""
    if not view.facts or (view.state in ALIVE and view.progress.ok + view.progress.failed > SCORED_ROWS):
        return {}
    try:
        return {stage: (review.to_json(), review.lines()) for stage, review in reviews_of(run)}
    except StoreError:  # the log cannot be read now
        return {}


def _promise(run: RunReader, view: RunSnapshot) -> PromiseStanding | None:
    """Return how the promise of a run stands; None if it has none. For a long run it is computed only when no process
    works on it."""
    if view.state in ALIVE and view.progress.ok + view.progress.failed > SCORED_ROWS:
        return None
    return standing_in(run)


def _text(view: RunSnapshot, score: JsonObject | None, promise: PromiseStanding | None, people: People) -> str:
    now, facts = view.progress, view.facts
    if not facts:
        return f"{view.name}\n  state    starting: a process has this run, and has not begun with the rows yet"
    numbers = of_record(view)
    rows = _rows(numbers)
    if now.resumed:
        rows += f"; {now.resumed:,} of them from the record"
    lines = [("state", numbers.state), ("rows", rows), *_stages(view)]
    if numbers.rate:
        lines.append(("rate", numbers.rate_words))
    label, words = numbers.health_words(time.time())
    if words:
        lines.append((label, words))
    if view.workers:
        lines.append(
            ("workers", ", ".join(f"process {each.get('pid')} on {each.get('host')}" for each in view.workers))
        )
    if forged := sum(cast(int, part.facts.get(FORGED) or 0) for part in (view, *view.stages.values())):
        lines.append(("forged", f"{counted(forged, 'entry', 'entries')} of the queue that no feeder put there"))
    if facts.get("why"):
        lines.append(("why", str(facts["why"])))
    lines.append(("started", f"{facts.get('started')}, session {view.sessions} {facts.get('session_started')}"))
    if facts.get("ended"):
        lines.append(("ended", str(facts["ended"])))
    asked = dict.fromkeys(f"{part.facts.get('model')} at {part.facts.get('backend')}" for part in view.parts.values())
    lines += [("" if place else "model", words) for place, words in enumerate(asked)]
    if words := answered_words(numbers.answered_by):
        lines.append(("answers", words))
    lines += [("" if place else "cascade", words) for place, words in enumerate(recorded_lines(view.summary or {}))]
    lines.append(("spent", numbers.spent_words))
    lines += [("" if place else "score", words) for place, words in enumerate(brief_lines(score or {}))]
    said = [f"{stage}: {words}" if stage else words for stage, (_, every) in people.items() for words in every]
    lines += [("" if place else "people", words) for place, words in enumerate(said)]
    if promise is not None:
        about = promise.lines(shlex.quote(view.name))
        lines += [("" if place else "promise", words) for place, words in enumerate(about)]
    if view.state not in ALIVE and (view.state != "complete" or now.failed):
        command = f"batch-agent resume {shlex.quote(view.name)}"
        lines.append(("continue", command if facts.get("command") is not None else "run it again with resume=True"))
    return "\n".join([view.name, *(f"  {label:<8} {harmless(text)}" for label, text in lines)])


def _rows(numbers: ShownNumbers) -> str:
    of = "" if numbers.total is None else f" of {numbers.total:,}"
    return f"{numbers.done:,}{of} done: {numbers.ok:,} ok, {numbers.failed:,} failed"


def _stages(view: RunSnapshot) -> Iterator[tuple[str, str]]:
    """Yield one line for each stage of a pipeline; the first has the label."""
    names = stage_names(view.facts)
    width = max(map(len, names), default=0)
    for place, name in enumerate(names):
        stage = view.stages.get(name)
        text = NOT_BEGUN
        if stage is not None:
            now = of_record(stage)
            text = f"{_rows(now)}, {amount(now.tokens)} tokens, {now.cost_words or UNPRICED}, {now.state}"
        yield "" if place else "stages", f"{name:<{width}}  {text}"


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        default=RUNS,
        metavar="PLACE",
        help="a directory, or the URL of a Redis server (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def runs_command(options: argparse.Namespace) -> int:
    place = place_of(options.directory, named=False)
    if isinstance(place, Path) and not place.is_dir():
        raise SpecError(f"there is no directory {place}: runs of the command line are recorded in ./{RUNS}")
    views, unreadable = _views(place)
    if options.json:
        put_json([_run_json(view) for view in views])
    elif views:
        put(_table([HEADINGS, *map(_cells, views)], terminal_width(sys.stdout)))
    else:
        say(f"there are no runs in {place}")
    for words in unreadable:
        say(f"batch-agent: {harmless(words)}")
    return ALL_OK


def _views(place: RunPlace) -> tuple[list[RunSnapshot], list[str]]:
    views, unreadable = [], []
    for each in runs_in(place):
        try:
            views.append(look(each))
        except BatchAgentError as error:  # a damaged run must not hide the others
            unreadable.append(str(error))
    return sorted(views, key=lambda view: str(view.facts.get("session_started")), reverse=True), unreadable


def _run_json(view: RunSnapshot) -> JsonObject:
    facts: JsonObject = {name: view.facts.get(name) for name in ("started", "backend")}
    numbers = of_record(view)
    return {"run_dir": view.name, "state": numbers.state, **numbers.to_json(), "model": numbers.model or None, **facts}


def _cells(view: RunSnapshot) -> tuple[str, ...]:
    now = of_record(view)
    of = "" if now.total is None else f"/{now.total:,}"
    return (
        harmless(view.name),
        now.state,
        f"{now.done:,}{of}",
        f"{now.failed:,}",
        _local(str(view.facts.get("started"))),
        amount(now.tokens),
        now.cost_words,
        harmless(now.model),
    )


def _local(time: str) -> str:
    try:
        return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return harmless(time)


def _table(lines: Sequence[tuple[str, ...]], width: int | None) -> str:
    """Return the table without empty columns, and without the last columns if the terminal is too narrow."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    while width is not None and len(columns) > NEEDED and sum(widths) + 2 * len(columns) - 2 > width:
        columns.pop()
        widths.pop()
    head, *rest = zip(*columns, strict=True)
    return table(head, rest)
