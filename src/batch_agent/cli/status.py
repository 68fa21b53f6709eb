"""``batch-agent status``: how far a run is, seen from outside, while it goes on or afterwards."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.streams import put
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, clock, harmless
from batch_agent.store.rundir import SUMMARY, RunView


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="DIR", help="the run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def status_command(options: argparse.Namespace) -> int:
    view = RunView.of(Path(options.run_dir))
    put(to_json(_json(view)).decode() if options.json else _text(view), sys.stdout)
    return ALL_OK


def _json(view: RunView) -> JsonObject:
    now = view.glance.latest
    facts = {name: value for name, value in view.facts.items() if name not in ("command", "rows")}
    return {
        **facts,
        "state": view.state,
        "sessions": view.glance.sessions,
        "rows": {
            "total": view.facts.get("total"),
            "done": now.ok + now.failed,
            "ok": now.ok,
            "failed": now.failed,
            "resumed": now.resumed,
        },
        "tokens": now.tokens,
        "cost": now.cost,
        "summary": _summary(view),
    }


def _summary(view: RunView) -> JsonObject | None:
    try:
        summary = from_json((view.path / SUMMARY).read_bytes())
    except (OSError, ValueError):  # there is none before a session has ended
        return None
    return summary if isinstance(summary, dict) else None


def _text(view: RunView) -> str:
    now, facts = view.glance.latest, view.facts
    done = now.ok + now.failed
    total = facts.get("total")
    of = f" of {total:,}" if isinstance(total, int) else ""
    rows = f"{done:,}{of} done: {now.ok:,} ok, {now.failed:,} failed"
    if now.resumed:
        rows += f"; {now.resumed:,} of them from the record"
    lines = [("state", view.state), ("rows", rows)]
    trouble, since = facts.get("trouble"), facts.get("trouble_since")
    if view.state == "running" and trouble and isinstance(since, int | float):
        lines.append(("server", f"down for {clock(max(0.0, time.time() - since))}, trying again: {trouble}"))
    if facts.get("why"):
        lines.append(("why", str(facts["why"])))
    lines.append(("started", f"{facts.get('started')}, session {view.glance.sessions} {facts.get('session_started')}"))
    if facts.get("ended"):
        lines.append(("ended", str(facts["ended"])))
    lines.append(("model", f"{facts.get('model')} at {facts.get('backend')}"))
    cost = f", ${now.cost:.4f}" if now.cost is not None else ""
    lines.append(("tokens", f"{amount(now.tokens)} in all sessions{cost}"))
    if view.state in ("interrupted", "failed", "out of budget", "unreachable") or now.failed:
        by_command = facts.get("command") is not None
        lines.append(("go on", f"batch-agent resume {view.path}" if by_command else "run it again with resume=True"))
    return "\n".join([str(view.path), *(f"  {label:<8} {harmless(text)}" for label, text in lines)])
