"""``batch-agent resume`` and ``retry-failed``: start a recorded run again with the recorded command.

``run.json`` has the command; this command line overrides it. A complete run whose spec and rows did not change is not
started: its rows are compared by their hash, and results are not delivered again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path

from pydantic import JsonValue

from batch_agent.agent.fingerprint import matched, rows_under
from batch_agent.api import BatchAgent
from batch_agent.cli.commands.run import run_command
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put_json, say
from batch_agent.cli.spec.load import is_pipeline, load_spec, settings_beside, take_settings
from batch_agent.cli.spec.recorded import KEPT, command_again, recorded_command, refuse_left_out
from batch_agent.cli.spec.rows import STDIN
from batch_agent.errors import JobError, SpecError
from batch_agent.files.read import LazyRows
from batch_agent.record.address import place_of
from batch_agent.record.keys import Keys
from batch_agent.record.reader import RunSnapshot, look
from batch_agent.record.rundir import RESULTS


def resume_command(options: argparse.Namespace) -> int:
    view = look(options.run_dir)
    command = recorded_command(
        view.facts,
        f"{view.name} was not started by the command line, so its spec is unknown here; start it again from "
        "Python with resume=True",
    )
    asked_for = options.output is not None or options.command == "retry-failed" or options.on_change is not None
    merged = _merged(options, command)
    recorded = view.sessions > 0  # False if the journal is deleted
    if not asked_for and recorded and view.state == "complete" and _is_as_it_was(view, merged):
        _say_complete(view, as_json=options.json)
        return ALL_OK
    return run_command(merged)


def _merged(options: argparse.Namespace, command: Mapping[str, JsonValue]) -> argparse.Namespace:
    take_settings(options)
    refuse_left_out(command, options)
    kept = command_again(command)
    merged = argparse.Namespace(**{**vars(options), **vars(kept)})
    for name in KEPT:
        if getattr(options, name) is not None:
            setattr(merged, name, getattr(options, name))
    merged.set = [*settings_beside(options, kept.set or ()), *(options.set or ())] or None  # the last one wins
    if merged.inputs == STDIN and options.inputs != STDIN:
        raise SpecError(
            f"{place_of(options.run_dir)} read its rows from standard input: pipe them in again, with --inputs -"
        )
    merged.resume = True
    return merged


def _is_as_it_was(view: RunSnapshot, options: argparse.Namespace) -> bool:
    recorded = view.facts.get("rows")
    if options.inputs == STDIN or is_pipeline(options) or not isinstance(recorded, dict) or recorded.get("failed"):
        return False
    prepared = BatchAgent.plan(load_spec(options))
    inputs = prepared.spec.inputs
    with closing(inputs) if isinstance(inputs, LazyRows) else nullcontext():
        if not isinstance(inputs, Iterable):
            return False
        prepared, same = matched(prepared, view.facts)
        if not same or prepared.shapes.raised_from is not None:
            return False
        keys, plan = Keys(rows_under(prepared)), prepared.plan
        try:
            for index, value in enumerate(inputs):
                if not index:
                    plan.check_first(value)
                keys.identify(value, *plan.asks(value))
        except JobError:
            return False
    return keys.digest == recorded.get("digest")


def _say_complete(view: RunSnapshot, *, as_json: bool) -> None:
    ok, results = view.latest.ok, Path(view.name) / RESULTS
    output = str(results) if results.exists() else view.name
    if as_json:
        put_json({"state": view.state, "rows": ok, "output": output})
    else:
        text = f"{view.name} is complete: {ok:,} rows, all ok, and neither its spec nor its rows have changed."
        say(f"{text}\n  results  {output}")
