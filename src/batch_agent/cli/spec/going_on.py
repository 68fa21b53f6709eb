"""What ``resume``, ``retry-failed`` and ``run --resume`` say and ask before anything is sent: which options differ from
the record, how many recorded answers they would drop, and what the rest costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Protocol

from batch_agent.agent.prepare import Prepared
from batch_agent.cli.exit_status import ALL_OK, RUN_FAILED
from batch_agent.cli.output.streams import flush_words, say
from batch_agent.run.changes import Changes, retries
from batch_agent.run.recording import OnChange

CHOICES: Mapping[str, OnChange] = {"k": "keep", "keep": "keep", "r": "resend", "resend": "resend"}


class Resumable(Protocol):
    """A run or a pipeline that has not begun."""

    on_change: OnChange

    @property
    def parts(self) -> Mapping[str, Prepared]: ...

    def changes(self) -> Changes: ...


def go_on(options: argparse.Namespace, run: Resumable, run_dir: object) -> int | None:
    """Compare a resumed run with its record. Returns the exit status if the run does not begin: there is nothing to do,
    or recorded answers would be dropped and neither the arguments nor the user at the terminal allow that."""
    if not options.resume or run_dir is None:
        return None
    if options.command == "retry-failed":
        count, words = retries(str(run_dir), run.parts)
        say(f"batch-agent: {words}")
        if not count:
            return ALL_OK
    changes = run.changes()
    if changes.dropped and run.on_change is None:
        say(f"batch-agent: {changes.refusal(flags=True)}")
        if not options.json and sys.stdin.isatty() and sys.stderr.isatty():
            run.on_change = _ask()
        if run.on_change is None:
            return RUN_FAILED
    elif words := changes.forecast(keeps=run.on_change == "keep"):
        say(f"batch-agent: {words}")
    return None


def _ask() -> OnChange:
    while True:
        print("Keep the recorded answers (k), send the rows again (r), or stop (Enter)? ", end="", file=sys.stderr)
        flush_words()
        answer = sys.stdin.readline().strip().lower()
        if not answer or answer in CHOICES:
            return CHOICES.get(answer)
