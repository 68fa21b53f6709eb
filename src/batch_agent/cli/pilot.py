"""The pilot on the command line: what it says of all rows, and whether the others follow."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress

from batch_agent.blocking import in_thread
from batch_agent.cli.output.streams import flush_words, say
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.observe.outlook import Outlook, examples
from batch_agent.observe.text import rows
from batch_agent.run.pilot import Pilot
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.topology.flow import Flow
from batch_agent.trust.shown import score_lines

YES = ("y", "yes")


def can_ask(options: argparse.Namespace) -> bool:
    """Return whether someone at a terminal can answer a question."""
    return not options.json and sys.stdin.isatty() and sys.stderr.isatty()


def refuse_unrecorded(options: argparse.Namespace, spec: BatchSpec) -> None:
    """Raise SpecError for a pilot after which a run would stop that cannot be continued."""
    if spec.pilot is not None and spec.run_dir is None and not options.yes and not can_ask(options):
        raise SpecError(
            "the run would stop after its pilot, and without a run directory it cannot continue from there: leave out "
            "--no-run-dir, or give --yes to continue without a question"
        )


class PilotStop:
    """Waits for the pilot, and decides whether the other rows follow. ``outlook``: what the pilot says about all rows,
    when it is done."""

    def __init__(self, options: argparse.Namespace, run: Run[object] | Flow, pilot: Pilot) -> None:
        self._options = options
        self._run = run
        self._pilot = pilot
        self.outlook: Outlook | None = None

    async def wait(self) -> None:
        """Wait until the rows of the pilot are done, or the run has ended."""
        await self._pilot.wait_ended()

    async def decide(self) -> None:
        """Show what the pilot says about all rows, and decide whether the others follow."""
        pilot, results = self._pilot, await self._run.pilot()
        if pilot.passed or pilot.covers_all or not pilot.complete:
            pilot.go_on()
            return
        self.outlook = results.summary.pilot
        pilot.results.clear()  # they are delivered too, and may be many
        if not self._options.json:
            say("\n".join([f"pilot: {rows(len(pilot.indexes))}, a random sample", *examples(results)]))
            say("\n".join(() if self.outlook is None else self.outlook.lines()))
        continues = self._options.yes or can_ask(self._options)
        if continues and not self._options.json and self._has_gold:  # else the summary at the end has the score
            with suppress(SpecError):  # of the user's own function
                say("\n".join(score_lines(self._run.score(count=False), details=False)))
        if continues and (self._options.yes or await self._ask()):
            pilot.go_on()
        else:
            pilot.stop()

    @property
    def _has_gold(self) -> bool:
        run = self._run
        return run.gold is not None if isinstance(run, Flow) else run.scoring is not None

    async def _ask(self) -> bool:
        left = self._pilot.of - len(self._pilot.indexes)
        print(f"Continue with the other {rows(left)}? (y/N) ", end="", file=sys.stderr)
        flush_words()
        answer = await _line(self._pilot)
        return answer.strip().lower() in YES

    def to_json(self, command: str | None) -> JsonObject:
        """Return the pilot for JSON output. ``command`` is the command that continues the run."""
        if self.outlook is None:
            return {}
        return {"pilot": {**self.outlook.to_json(), "stopped": self._pilot.stopped, "continue": command}}


async def _line(pilot: Pilot) -> str:
    """Return the next line of the terminal. "" if the run ends first, as after Ctrl-C."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    pilot.on_closed = wake
    descriptor = sys.stdin.fileno()
    try:
        loop.add_reader(descriptor, wake)
    except NotImplementedError:  # Windows
        return await in_thread(sys.stdin.readline)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
    return "" if pilot.closed else sys.stdin.readline()
