"""``batch-agent review``: people judge rows of a run at the terminal, or on a page; ``import-review`` takes the answers
of a table that ``export --review`` wrote."""

from __future__ import annotations

import argparse
import getpass
import os
import select
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import JsonValue

from batch_agent.cli.exit_status import ALL_OK, ROWS_FAILED
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.numbers import add_address, positive
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import counted, harmless, harmless_lines, rows, wrapped
from batch_agent.record.address import place_of
from batch_agent.record.people import PeopleReview, Refusal, Shown
from batch_agent.record.review_table import free_rows, import_table
from batch_agent.trust.form import Draft
from batch_agent.trust.gold import class_name
from batch_agent.trust.review import AUDIT, QUEUES, EventKind, Queue

if sys.platform == "win32":
    import msvcrt
else:
    import termios
    import tty

EVERY = 2.0  # seconds between two looks for new rows
KEYED = 9  # classes that have a key of their own
LONGEST = 4000  # characters of a field
CLEAR = "\x1b[2J\x1b[H"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"
HELP = "1-9 class   e edit   Enter give   x no right answer   s skip   u undo   q quit"
ENTER, SEARCH, ESCAPE, NO_KEY = ("\r", "\n"), "/", "\x1b", "\0"
LONGEST_CHARACTER = 4  # bytes


def add_review_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_who(parser)
    add_stage(parser)
    parser.add_argument("--queue", choices=QUEUES, help="only rows of this queue (default: the audit, then the repair)")
    parser.add_argument(
        "--audit", type=positive, metavar="N", help="let people audit N random rows of the run, judged blind"
    )
    parser.add_argument(
        "--page", action="store_true", help="serve a page that shows the review alone, and print the link for reviewers"
    )
    add_address(parser, 0)


def add_who(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--who", metavar="NAME", help="name of the reviewer (default: your login name)")


def add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", metavar="NAME", help="stage of a pipeline (default: the last stage)")


def add_import_review_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("file", metavar="FILE", nargs="?", help="the table that export --review wrote, filled in")
    add_who(parser)
    add_stage(parser)
    parser.add_argument(
        "--release", action="store_true", help="afterwards, free all rows that this reviewer has in tables"
    )


def name_of(options: argparse.Namespace) -> str:
    """Return the name of the reviewer."""
    if options.who is not None:
        return str(options.who)
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise SpecError("your login name is unknown: give --who NAME") from None


def review_command(options: argparse.Namespace) -> int:
    with PeopleReview.open(options.run, options.stage or "") as review:
        if options.audit is not None:
            review.audit(options.audit, name_of(options))
        if not options.page and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise SpecError(
                "review needs a terminal; --page serves a page instead, and batch-agent export RUN --review FILE.csv "
                "writes a table"
            )
        if not options.page:
            Terminal(review, name_of(options), options.queue).run()
            _say_end(review, options)
            return ALL_OK
    return _serve_page(options)


def _say_end(review: PeopleReview, options: argparse.Namespace) -> None:
    review.catch_up()
    said = review.lines(name_of(options))
    if review.promise is not None:
        said += review.promise.standing().lines(shlex.quote(options.run))
    say("\n".join(said))
    if review.models_have_work:
        say(f"the models have work: batch-agent resume {shlex.quote(options.run)}", wrap=False)


def _serve_page(options: argparse.Namespace) -> int:
    from batch_agent.cli.commands.view import serve_page
    from batch_agent.view.runs import ShownRuns
    from batch_agent.view.server import ViewServer

    runs = ShownRuns([place_of(options.run)])
    key = "/".join(filter(None, (runs.first[0], options.stage)))
    return serve_page(
        ViewServer(runs, options.host, options.port, review=key),
        options.host,
        "anyone with the link can read the rows of the review, and answer",
        "this is the link for reviewers: it reaches the review alone. Ctrl-C stops the page",
    )


def import_review_command(options: argparse.Namespace) -> int:
    if options.file is None and not options.release:
        raise SpecError("give the FILE to import, or --release to free the rows that you have in tables")
    who = name_of(options)
    with PeopleReview.open(options.run, options.stage or "") as review:
        code = ALL_OK
        if options.file is not None:
            found = import_table(review, who, Path(options.file))
            known = f", {counted(found.known, 'answer was', 'answers were')} there already" if found.known else ""
            freed = f"; {rows(found.freed)} left empty and freed" if found.freed else ""
            say(f"{counted(found.taken, 'answer')} of {harmless(who)} taken{known}{freed}")
            for line, name, why in found.refused:
                put(f"{options.file}, line {line}, {harmless(name)}: refused: {harmless(why)}")
            if found.refused:
                say(f"{rows(len(found.refused))} refused; correct these lines and import the file again")
                code = ROWS_FAILED
        if options.release:
            say(f"{rows(free_rows(review, who))} freed")
        say("\n".join(review.lines(who)))
        return code


class Terminal:
    """A review at the terminal. One key is one action."""

    def __init__(self, review: PeopleReview, who: str, queue: Queue | None) -> None:
        self._review = review
        self._who = who
        self._only = queue
        self._draft = Draft(review.form, AUDIT)
        self._note, self._search = "", ""
        self._keys = TypedKeys()

    def run(self) -> None:
        """Show rows until the person quits, or none is left."""
        try:
            with self._keys:
                shown = self._next()
                while shown is not None:
                    put(CLEAR + self._screen(shown))
                    self._note = ""
                    key = self._keys.next()
                    if not key or (key == "q" and not self._search):
                        break
                    try:
                        shown = self._act(shown, key)
                    except (Refusal, StoreError) as error:  # on a full disk too, the row stays until it is recorded
                        self._note = str(error)
        except (KeyboardInterrupt, EOFError):
            pass
        finally:
            put("")
            with suppress(StoreError):
                self._review.free_row(self._who)

    def _next(self) -> Shown | None:
        """Return the next row. While the run works, wait for one."""
        while (shown := self._review.next(self._who, self._only)) is None:
            if self._review.whole.view().state not in ("starting", "running"):
                say("no row is left for you")
                return None
            put(f"{CLEAR}no row waits for you now. The run works: waiting for rows; q quits")
            if self._keys.next(EVERY) == "q":
                return None
        return self._begin(shown)

    def _begin(self, shown: Shown) -> Shown:
        self._draft = Draft(self._review.form, shown.row.queue, None if shown.model is None else shown.model["output"])
        self._search = ""
        return shown

    def _act(self, shown: Shown, key: str) -> Shown | None:
        """Do what a key means. Returns the row to show next, or None. Raises Refusal or StoreError."""
        draft, choices = self._draft, self._draft.choices
        if self._search:
            return self._searched(shown, key)
        if key.isdecimal() and 0 < int(key) <= min(KEYED, len(choices)):
            return self._give(shown) if draft.choose(choices[int(key) - 1]) else shown
        if key in ENTER:
            return self._give(shown)
        if key == "e":
            self._edit()
        elif key in ("x", "s"):
            return self._judge(shown, "none" if key == "x" else "skip")
        elif key == "u":
            back = self._review.undo(self._who)
            self._note = "your latest judgement is undone"
            return self._next() if back is None else self._begin(back)
        elif len(choices) > KEYED and key.isprintable():
            self._search = SEARCH + key.removeprefix(SEARCH)
        return shown

    def _searched(self, shown: Shown, key: str) -> Shown | None:
        """Choose a class by typing a part of its name."""
        found = self._found()
        if key == ESCAPE:
            self._search = ""
        elif key in ("\x7f", "\b"):
            self._search = self._search[:-1]
        elif key in ENTER or (key.isdecimal() and 0 < int(key) <= min(KEYED, len(found))):
            self._search = ""
            place = 0 if key in ENTER else int(key) - 1
            if place < len(found) and self._draft.choose(found[place]):
                return self._give(shown)
        elif key.isprintable():
            self._search += key
        return shown

    def _found(self) -> list[JsonValue]:
        """Return the classes that contain the typed text; those that begin with it come first."""
        typed = self._search.removeprefix(SEARCH).casefold()
        names = [(class_name(value).casefold(), value) for value in self._draft.choices]
        return [value for name, value in sorted(names, key=lambda each: not each[0].startswith(typed)) if typed in name]

    def _give(self, shown: Shown) -> Shown | None:
        if missing := self._draft.missing:
            raise Refusal(
                f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no value: choose one, or e edits"
            )
        return self._judge(shown, "answer")

    def _judge(self, shown: Shown, kind: EventKind) -> Shown | None:
        given = self._draft.given if kind == "answer" else None
        verdict = self._review.judge(self._who, shown.row.row, shown.row.queue, kind, given, shown.row.input)
        if verdict.kind == "disputed":
            self._note = "two people differ about that row: a third decides"
        return self._next()

    def _edit(self) -> None:
        """Ask for each field; an empty line keeps the present value."""
        for field in self._review.form.fields:
            value = self._draft.values.get(field.name)
            before = "" if value is None else f" [{harmless(_shown(value), 60)}]"
            put(f"{field.name}{before}:")
            if not (line := self._keys.line()).strip():
                continue
            try:
                self._draft.values[field.name] = field.read(line)
            except ValueError as error:
                self._note = f"{field.name}: {error}"
                return

    def _screen(self, shown: Shown) -> str:
        """Return what the terminal shows."""
        width = shutil.get_terminal_size().columns
        left = self._review.left(self._who)
        counts = ", ".join(f"{each.yours:,} in the {queue}" for queue, each in left.items() if each.yours)
        lines = [f"{BOLD}{harmless(shown.row.id)}{PLAIN}   {shown.row.queue}   {DIM}left for you: {counts}{PLAIN}", ""]
        lines += _fields(shown.value)
        for file in shown.files:
            lines.append(f"{DIM}{harmless(file.field)}: {harmless(str(file.path))}{PLAIN}")
        if shown.model is not None:
            lines += ["", f"{BOLD}the model{PLAIN}", *_of_model(shown.model)]
        lines += ["", *self._answer()]
        if self._note:
            lines += ["", f"{BOLD}{harmless(self._note)}{PLAIN}"]
        lines += ["", DIM + HELP + ("   / search a class" if len(self._draft.choices) > KEYED else "") + PLAIN]
        return "\n".join(wrapped(line, width) for line in lines)

    def _answer(self) -> Iterator[str]:
        draft = self._draft
        yield f"{BOLD}your answer{PLAIN}"
        for name, value in draft.values.items():
            yield f"  {harmless(name)}: {harmless_lines(_shown(value))[:LONGEST]}"
        if draft.field is None:
            return
        choices = self._found() if self._search else draft.choices
        yield f"  {harmless(draft.field.name)}?" + (f"  {self._search}" if self._search else "")
        for number, value in enumerate(choices[:KEYED], 1):
            yield f"   {number}  {harmless(class_name(value))}"
        if len(choices) > KEYED:
            yield f"   {DIM}and {len(choices) - KEYED} more: type a part of the name{PLAIN}"


def _fields(value: JsonValue) -> Iterator[str]:
    fields = value if isinstance(value, dict) else {"input": value}
    for name, each in fields.items():
        text = _shown(each)
        cut = f"{text[:LONGEST]}… ({len(text):,} characters)" if len(text) > LONGEST else text
        yield f"{DIM}{harmless(name)}{PLAIN}  {harmless_lines(cut)}"


def _of_model(model: JsonObject) -> Iterator[str]:
    if model["error"] is not None:
        yield f"  failed: {harmless(str(model['error']))}"
    for said in (model["output"], model["text"] if model["output"] is None else None):
        if said is not None:
            yield f"  {harmless_lines(_shown(said))[:LONGEST]}"
    earlier = model["earlier"] if isinstance(model["earlier"], list) else []
    for each in earlier:
        if isinstance(each, dict):
            yield f"  {DIM}{harmless(str(each.get('name')))}: {harmless(_shown(each.get('output')), LONGEST)}{PLAIN}"
    if isinstance(model["doubt"], float | int):
        yield f"  {DIM}doubt {model['doubt']:.2f}{PLAIN}"


def _shown(value: JsonValue) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


class TypedKeys:
    """The keys that are pressed at the terminal, one by one, while this is entered. Keys that are pressed early are
    kept."""

    def __enter__(self) -> Self:
        if sys.platform != "win32":
            self._descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform != "win32":
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def next(self, seconds: float | None = None) -> str:
        """Return the next key; "" at the end of the input, or if no key is pressed for ``seconds``."""
        sys.stdout.flush()
        if sys.platform == "win32":
            return msvcrt.getwch()
        if seconds is not None and not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        key = self._character()
        if key == ESCAPE and select.select([self._descriptor], [], [], 0.02)[0]:  # the rest of an arrow and the like
            os.read(self._descriptor, 16)
            return NO_KEY
        return key

    def line(self) -> str:
        """Return a line that is typed, without its end. Raises EOFError at the end of the input."""
        sys.stdout.flush()
        if sys.platform == "win32":
            return input()
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        try:
            typed = ""
            while (character := self._character()) != "\n":
                if not character:
                    raise EOFError
                typed += character
            return typed
        finally:
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)

    def _character(self) -> str:
        data = b""
        while part := os.read(self._descriptor, 1):
            data += part
            with suppress(UnicodeDecodeError):
                return data.decode()
            if len(data) > LONGEST_CHARACTER:
                return NO_KEY
        return ""
