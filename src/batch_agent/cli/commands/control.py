"""``batch-agent control``: controls a run that another process works on."""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

from batch_agent.cli.exit_status import ALL_OK, RUN_FAILED, UNREACHABLE
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.numbers import positive
from batch_agent.messages import JsonObject
from batch_agent.observe.numbers import answered_words, cost_words
from batch_agent.observe.text import dollars, duration, harmless, rate
from batch_agent.record.control import NotAlive, Refused
from batch_agent.record.reader import RunReader, open_run

SAID = {
    "pause": "paused: requests in flight finish, no other request is sent until resume",
    "resume": "resumed",
    "drain": "draining: running agents finish, no other agent starts",
    "cancel": "cancelled",
    "resize": "resized",
    "cancel-row": "the row was cancelled",
    "retry-row": "the row starts again",
}
EPILOG = """\
exit status:
  0  done
  1  refused, or there is no such run: the message gives the reason
  4  no process on this machine works on the run
"""


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_dir", metavar="RUN", help=RUN_HELP)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    helps = {
        "status": "show the state of the run",
        "pause": "send no request until resume; requests in flight finish",
        "resume": "continue after pause",
        "drain": "start no new row; running rows finish",
        "cancel": "stop now; the run can be resumed",
    }
    for name, text in helps.items():
        _add(actions, name, text)
    _add(actions, "resize", "change the maximum number of requests in flight").add_argument(
        "inflight", type=positive, metavar="N", help="maximum number of requests in flight"
    )
    for name, text in (
        ("cancel-row", "cancel a running row; it fails with the type Cancelled"),
        ("retry-row", "restart a running row from its beginning"),
    ):
        _add(actions, name, text).add_argument(
            "row", metavar="ROW", help="its id, or its position in the inputs, from 0; in a pipeline STAGE/ROW"
        )


def _add(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    action.add_argument("--json", action="store_true", help="print the status of the run as one JSON object")
    return action


def control_command(options: argparse.Namespace) -> int:
    with open_run(options.run_dir) as run:
        run.view()  # raises SpecError if there is no run
        return _control(options, run)


def _control(options: argparse.Namespace, run: RunReader) -> int:
    request: JsonObject = {"do": options.action}
    for name in ("inflight", "row"):
        if (value := getattr(options, name, None)) is not None:
            request[name] = value
    try:
        answer = asyncio.run(run.steer(request))
    except (NotAlive, Refused) as error:
        if options.json:
            put_json({"alive": isinstance(error, Refused), "error": str(error)})
        else:
            say(f"batch-agent: {harmless(str(error))}")
        return UNREACHABLE if isinstance(error, NotAlive) else RUN_FAILED
    status = cast(JsonObject, answer["status"])
    if options.json:
        put_json({"alive": True, **status})
    elif options.action == "status":
        put("\n".join(_lines(status)))
    else:
        say(f"batch-agent: {SAID[options.action]}")
    return ALL_OK


def _lines(status: JsonObject) -> list[str]:
    rows = cast("dict[str, int | None]", status["rows"])
    agents = cast("dict[str, int]", status["agents"])
    of = f" of {rows['total']:,}" if rows["total"] is not None else ""
    lines = [
        ("state", str(status["state"])),
        ("rows", f"{rows['done']:,}{of} done: {rows['ok']:,} ok, {rows['failed']:,} failed"),
        ("agents", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in agents.items())),
    ]
    left = f", {duration(cast(float, status['seconds_left']))} left" if status["seconds_left"] else ""
    lines.append(("rate", rate(cast(float, status["rows_per_second"])) + left))
    if status.get("degraded"):
        lines.append(("degraded", str(status["degraded"])))
    if words := answered_words(cast("dict[str, int]", status.get("answered_by") or {})):
        lines.append(("answers", words))
    whole = cast("dict[str, float | bool | None]", status.get("all_sessions") or status)
    if (cost := cast("float | None", whole["cost"])) is not None:
        words = cost_words(cost, at_least=bool(whole.get("cost_is_minimum")))
        if status["cost"] is not None and status["cost"] != cost:
            words += f" in all sessions; this session {dollars(cast(float, status['cost']))}"
        lines.append(("cost", words))
    for endpoint in cast("list[dict[str, object]]", status["endpoints"]):
        limit = "no limit" if endpoint["limit"] is None else f"{endpoint['limit']}"
        reason = f": {endpoint['reason']}" if endpoint["reason"] else ""
        name = endpoint["name"] or status["backend"]
        name = f"{name}, {endpoint['model']}" if endpoint.get("model") else name
        lines.append(("server", f"{name}: {endpoint['inflight']} of {limit} in flight, {endpoint['state']}{reason}"))
        for why in cast("list[dict[str, object]]", endpoint.get("why", [])):
            ago = duration(max(0.0, cast(float, status["at"]) - cast(float, why["since"])))
            lines.append(("", f"{why['about']}: {why['rule']} ({why['evidence']}), for {ago}"))
    return [f"  {label:<8} {harmless(text)}" for label, text in lines]
