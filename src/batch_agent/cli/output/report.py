"""The summary at the end of a run: text on standard error, or with --json one object on standard output (on standard
error if the results are on standard output). It names the record and the command that continues the run.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from batch_agent.cli.output.results import ResultWriter
from batch_agent.cli.output.streams import put, say
from batch_agent.errors import BatchAgentError
from batch_agent.files.results import to_json
from batch_agent.observe.metrics import Statistics
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.observe.text import amount, counted, dollars, harmless, rows
from batch_agent.record.address import StoreAddress, place_of
from batch_agent.record.reader import RunSnapshot, look
from batch_agent.record.rundir import RUN
from batch_agent.spec import BatchSpec
from batch_agent.tools.execution import ToolStatistics


def spent(view: RunSnapshot) -> str:
    """Return the tokens, the cost and the cost per row of all sessions of a run."""
    now = view.progress
    words, done = f"{amount(now.tokens)} tokens", now.ok + now.failed
    if now.cost is not None:
        words += f", {dollars(now.cost)}" + (f", {dollars(now.cost / done)} a row" if done else "")
    return words


class Reporter:
    def __init__(self, options: argparse.Namespace, spec: BatchSpec, writer: ResultWriter, stdout: TextIO) -> None:
        self._json: bool = options.json
        self._place = None if spec.run_dir is None else place_of(str(spec.run_dir))
        self._writer = writer
        self._stdout = stdout if options.output is not None else None

    def finished(self, statistics: Statistics, tools: Mapping[str, ToolStatistics]) -> None:
        output = self._writer.destination
        if not self._json:
            say("\n".join(summary_lines(statistics, output=output, tools=tools)))
            self._say_overall(statistics)
            self._name_record(statistics)
            return
        record = {
            **summary_json(statistics, output=output, tools=tools),
            "run_dir": self._record(statistics),
        }
        text = to_json(record).decode()
        say(text, wrap=False) if self._stdout is None else put(text, self._stdout)

    def broke_off(self, statistics: Statistics) -> None:
        """Report the results and the record of a run that failed, or whose standard output was closed."""
        if self._json:
            return
        if self._writer.written and self._writer.destination:
            say(f"{counted(self._writer.written, 'result')} in {self._writer.destination}")
        self._name_record(statistics)

    def _say_overall(self, statistics: Statistics) -> None:
        """Print the totals of a run that has earlier sessions: the summary is about this one."""
        if self._record(statistics) is None or self._place is None:
            return
        try:
            view = look(self._place)
        except BatchAgentError:  # the results are there; a record that cannot be read must not hide them
            return
        if view.sessions > 1:
            now = view.progress
            done = f"{rows(now.ok + now.failed)} done: {now.ok:,} ok, {now.failed:,} failed"
            say(f"  overall  {done}; {spent(view)}, in {view.sessions} sessions")

    def _name_record(self, statistics: Statistics) -> None:
        """Print the command that continues the run, or that shows it if all rows are ok."""
        record = self._record(statistics)
        if record is None:
            return
        directory = shlex.quote(harmless(record))
        if statistics.ended != "complete" or statistics.failed:
            say(f"  continue batch-agent resume {directory}", wrap=False)
        else:
            say(f"  show     batch-agent show {directory}", wrap=False)

    def _record(self, statistics: Statistics) -> str | None:
        """Return the path or URL of the record, without a password; None if there is none."""
        if self._place is None or (isinstance(self._place, Path) and not (self._place / RUN).exists()):
            return None
        if isinstance(self._place, StoreAddress) and not statistics.started:
            try:
                look(self._place)
            except BatchAgentError:  # nothing was recorded: Redis is unreachable or refused the login
                return None
        return str(self._place)
