"""``batch-agent fleet``: its actions and flags, and the actions ``wait`` and ``proxy``. ``fleet_status`` and
``fleet_bench`` have the others.

Modules of the fleet are imported when they are needed, so that help texts appear quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from batch_agent.cli.exit_status import ALL_OK, UNREACHABLE
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import flush_words, put, say
from batch_agent.cli.spec.numbers import add_address, add_key, amount, fraction, key_of, positive
from batch_agent.errors import SpecError
from batch_agent.observe.text import clock, counted, cut, harmless, terminal_width

if TYPE_CHECKING:
    from batch_agent.fleet.hostfile import AgentEndpoint
    from batch_agent.fleet.probe import Waited

HOSTFILE_VARIABLE = "AURORA_SWARM_HOSTFILE"
SHOWN = 5  # endpoints that are not up are listed
NEWS_SECONDS, QUIET_SECONDS = 5.0, 60.0  # between two lines of progress without a terminal: changed, and unchanged
START, CLEAR = "\r", "\x1b[K"


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_wait(actions.add_parser("wait", help="wait until enough servers are up"))
    _add_status(actions.add_parser("status", help="show the status of each server"))
    _add_bench(actions.add_parser("bench", help="measure the throughput of each server"))
    _add_proxy(actions.add_parser("proxy", help="serve all servers at one address"))


def _add_hostfile(parser: argparse.ArgumentParser, does: str) -> None:
    parser.add_argument(
        "hostfile",
        nargs="?",
        metavar="HOSTFILE",
        help=f"file with one endpoint per line, or a node file of PBS or Slurm (default: ${HOSTFILE_VARIABLE})",
    )
    parser.set_defaults(does=does)


def _add_wait(parser: argparse.ArgumentParser) -> None:
    _add_hostfile(parser, "fleet:wait")
    parser.add_argument("--min-hosts", type=positive, metavar="N", help="number of servers to wait for (default: all)")
    parser.add_argument(
        "--min-fraction",
        type=fraction,
        metavar="F",
        help="fraction of the servers to wait for, 0 to 1",
    )
    parser.add_argument(
        "--timeout", type=amount, default=600, metavar="SECONDS", help="maximum time to wait (default %(default)s)"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write a hostfile of the servers that are up; - is standard output (default)"
    )


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_hostfile(parser, "fleet_status:status")
    parser.add_argument("--watch", action="store_true", help="repeat every two seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch, one per line")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_hostfile(parser, "fleet_bench:bench")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(16, 32, 64, 128, 256),
        metavar="N,N,…",
        help="numbers of requests in flight to measure (default 16,32,64,128,256)",
    )
    parser.add_argument(
        "--seconds", type=amount, default=20, metavar="SECONDS", help="duration of each step (default %(default)s)"
    )
    parser.add_argument("--tokens-in", type=positive, default=750, metavar="N", help="tokens per prompt (default 750)")
    parser.add_argument("--tokens-out", type=positive, default=150, metavar="N", help="tokens per answer (default 150)")
    parser.add_argument("--model", help="name of the model (default: the model of each endpoint)")
    parser.add_argument(
        "--parallel", type=positive, default=4, metavar="N", help="endpoints measured at a time (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_proxy(parser: argparse.ArgumentParser) -> None:
    _add_hostfile(parser, "fleet:proxy")
    add_address(parser, 8000)
    add_key(parser)
    parser.add_argument(
        "--max-inflight",
        type=positive,
        default=256,
        metavar="N",
        help="maximum number of requests in flight at each endpoint; others wait (default %(default)s)",
    )


def fleet_command(options: argparse.Namespace) -> int:
    options.hostfile = options.hostfile or os.environ.get(HOSTFILE_VARIABLE)
    if not options.hostfile:
        raise SpecError(f"no hostfile: batch-agent fleet {options.action} HOSTFILE, or set {HOSTFILE_VARIABLE}")
    does: Callable[[argparse.Namespace], int] = resolve_name(f"batch_agent.cli.commands.{options.does}")
    return does(options)


def read_hosts(path: str) -> list[AgentEndpoint]:
    from batch_agent.fleet.hostfile import Hostfile

    return Hostfile(path).read()


# wait


def wait(options: argparse.Namespace) -> int:
    from batch_agent.cli.output.results import written_file
    from batch_agent.fleet.probe import Prober, Waited, needed, wait_until_ready

    hosts = read_hosts(options.hostfile)
    waited = Waited(hosts, needed(len(hosts), options.min_hosts, options.min_fraction))
    output = None if options.output in (None, "-") else Path(options.output)
    if output is not None and not output.absolute().parent.is_dir():
        raise SpecError(f"cannot write {str(output)!r}: there is no such directory")
    line = _WaitLine(waited)

    async def run() -> None:
        async with Prober() as prober:
            await wait_until_ready(waited, prober, options.timeout, line)

    try:
        asyncio.run(run())
    finally:
        line.end()
    found = f"{len(waited.up):,} of {counted(len(hosts), 'endpoint')} up"
    if not waited.enough:
        say(f"batch-agent: {found} after {clock(options.timeout)}; {waited.needed:,} are needed")
        for endpoint, reason in waited.missing[:SHOWN]:
            say(f"  {endpoint.place}  {harmless(reason)}")
        if len(waited.missing) > SHOWN:
            say(f"  and {len(waited.missing) - SHOWN:,} more")
        return UNREACHABLE
    say(found)
    lines = "\n".join(endpoint.line for endpoint in waited.ready)
    if output is None:
        put(lines)
    else:
        with written_file(output) as file:
            file.write(f"{lines}\n".encode())
    return ALL_OK


class _WaitLine:
    """What ``wait`` shows: one line that is rewritten on a terminal, otherwise a line now and then."""

    def __init__(self, waited: Waited) -> None:
        self._began, self._told_at, self._told = time.monotonic(), -math.inf, ""
        self._width = terminal_width(sys.stderr)
        self(waited)

    def __call__(self, waited: Waited) -> None:
        now = time.monotonic()
        words = f"waiting: {len(waited.up):,} of {len(waited.endpoints):,} up, {waited.needed:,} needed"
        if self._width is not None:
            sys.stderr.write(f"{START}{cut(f'{words}, {clock(now - self._began)}', self._width - 1)}{CLEAR}")
            flush_words()
        elif now - self._told_at >= (QUIET_SECONDS if words == self._told else NEWS_SECONDS):
            self._told_at, self._told = now, words
            say(words)

    def end(self) -> None:
        if self._width is not None:
            sys.stderr.write(f"{START}{CLEAR}")
            flush_words()


# proxy


def proxy(options: argparse.Namespace) -> int:
    from batch_agent.fleet.proxy import serve_proxy

    hosts, (key, words) = read_hosts(options.hostfile), key_of(options)

    def announce(url: str) -> None:
        status = f"{url}/status shows their status{words}"
        say(f"{counted(len(hosts), 'endpoint')} at {url}/v1; {status}; Ctrl-C stops the proxy")

    serving = serve_proxy(
        hosts,
        host=options.host,
        port=options.port,
        ready=announce,
        hostfile=Path(options.hostfile),
        max_inflight=options.max_inflight,
        key=key,
    )
    return serve(serving)


def _steps(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(number.strip()) for number in text.split(",")}))
