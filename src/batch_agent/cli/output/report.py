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
from batch_agent.observe.text import counted, harmless
from batch_agent.record.address import StoreAddress
from batch_agent.record.reader import look, place_of
from batch_agent.record.rundir import RUN
from batch_agent.spec import BatchSpec
from batch_agent.tools.latency import ToolStatistics


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
        if statistics.done and self._writer.destination:
            say(f"{counted(statistics.done, 'result')} in {self._writer.destination}")
        self._name_record(statistics)

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
