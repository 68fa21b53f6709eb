"""``batch-agent fleet``: waits for the servers of a hostfile, shows their status, measures their throughput, or serves
them at one address.

Modules of the fleet are imported when they are needed, so that help texts appear quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batch_agent.cli.exit_status import ALL_OK, SIGNALLED, UNREACHABLE
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import flush_words, put, put_json, say
from batch_agent.cli.spec.numbers import add_address, add_key, amount, fraction, key_of, positive
from batch_agent.errors import SpecError
from batch_agent.observe.text import amount as short
from batch_agent.observe.text import clock, counted, cut, duration, harmless, table, terminal_width

if TYPE_CHECKING:
    from batch_agent.fleet.bench import Bench, Measurement, Wanted
    from batch_agent.fleet.hostfile import AgentEndpoint
    from batch_agent.fleet.probe import Look, Waited
    from batch_agent.messages import JsonObject

HOSTFILE_VARIABLE = "AURORA_SWARM_HOSTFILE"
SHOWN = 5  # endpoints that are not up are listed
NEWS_SECONDS, QUIET_SECONDS = 5.0, 60.0  # between two lines of progress without a terminal: changed, and unchanged
EVERY = 2.0  # seconds between two probes
AGAIN = 1.0  # seconds to the second probe without --watch, which shows how the counters move
START = "\r"
HOME = "\x1b[H"
CLEAR_LINE = "\x1b[K"
CLEAR_BELOW = "\x1b[J"
HEADS = ("endpoint", "up", "in flight", "queue", "tokens/s", "  KV", "prefix", "errors")


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_wait(actions.add_parser("wait", help="wait until enough servers are up"))
    _add_status(actions.add_parser("status", help="show the status of each server"))
    _add_bench(actions.add_parser("bench", help="measure the throughput of each server"))
    _add_proxy(actions.add_parser("proxy", help="serve all servers at one address"))


def _add_hostfile(parser: argparse.ArgumentParser, does: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument(
        "hostfile",
        nargs="?",
        metavar="HOSTFILE",
        help=f"file with one endpoint per line, or a node file of PBS or Slurm (default: ${HOSTFILE_VARIABLE})",
    )
    parser.set_defaults(does=does)


def _add_wait(parser: argparse.ArgumentParser) -> None:
    _add_hostfile(parser, wait)
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
    _add_hostfile(parser, status)
    parser.add_argument("--watch", action="store_true", help="repeat every two seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch, one per line")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_hostfile(parser, bench)
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
    _add_hostfile(parser, proxy)
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
    status: int = options.does(options)
    return status


def read_hosts(path: str) -> list[AgentEndpoint]:
    from batch_agent.fleet.hostfile import Hostfile

    return Hostfile(path).read()


# wait


def wait(options: argparse.Namespace) -> int:
    from batch_agent.cli.output.results import opened_output
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
    with opened_output(output) as file:
        file.writelines(f"{endpoint.line}\n".encode() for endpoint in waited.ready)
    return ALL_OK


class _WaitLine:
    """The line that ``wait`` shows. On a terminal it is rewritten; otherwise a line is written from time to time."""

    def __init__(self, waited: Waited) -> None:
        self._began = time.monotonic()
        self._told_at = -math.inf
        self._told = ""
        self._width = terminal_width(sys.stderr)
        self(waited)

    def __call__(self, waited: Waited) -> None:
        now = time.monotonic()
        words = f"waiting: {len(waited.up):,} of {len(waited.endpoints):,} up, {waited.needed:,} needed"
        if self._width is not None:
            sys.stderr.write(f"{START}{cut(f'{words}, {clock(now - self._began)}', self._width - 1)}{CLEAR_LINE}")
            flush_words()
        elif now - self._told_at >= (QUIET_SECONDS if words == self._told else NEWS_SECONDS):
            self._told_at, self._told = now, words
            say(words)

    def end(self) -> None:
        if self._width is not None:
            sys.stderr.write(f"{START}{CLEAR_LINE}")
            flush_words()


# status


def status(options: argparse.Namespace) -> int:
    asyncio.run(_watch(options) if options.watch else _once(options))
    return ALL_OK


async def _once(options: argparse.Namespace) -> None:
    from batch_agent.fleet.probe import Prober, with_rates

    async with Prober() as prober:
        looks = await prober.look_at_all(read_hosts(options.hostfile))
        counting = [look for look in looks if look.told is not None and look.told.generated_tokens is not None]
        if counting:
            await asyncio.sleep(AGAIN)
            later = await prober.look_at_all(look.endpoint for look in counting)
            rated = {look.endpoint: look for look in with_rates(later, {look.endpoint: look for look in looks})}
            looks = [rated.get(look.endpoint, look) for look in looks]
    if options.json:
        put_json(_status_json(looks))
    else:
        put(status_table(looks, terminal_width(sys.stdout)))


async def _watch(options: argparse.Namespace) -> None:
    """Show the status repeatedly. The hostfile is read again each time; if that fails, the endpoints stay the same."""
    from batch_agent.fleet.probe import Prober, with_rates

    hosts = read_hosts(options.hostfile)
    earlier: dict[AgentEndpoint, Look] = {}
    screen = terminal_width(sys.stdout) is not None and not options.json
    async with Prober() as prober:
        while True:
            looks = with_rates(await prober.look_at_all(hosts), earlier)
            earlier = {look.endpoint: look for look in looks}
            if options.json:
                put_json(_status_json(looks))
            elif screen:
                put(_screen(looks))
            else:
                put(status_table(looks, None))
            await asyncio.sleep(EVERY)
            try:
                hosts = await asyncio.to_thread(read_hosts, options.hostfile)
            except SpecError as error:
                say(f"{error}; the endpoints stay the same")


def _screen(looks: Sequence[Look]) -> str:
    """Return the table from the top of the terminal. If it does not fit, endpoints that are down come first."""
    size = shutil.get_terminal_size()
    lines = status_table(looks, size.columns).split("\n")
    if len(lines) >= size.lines:
        first = sorted(looks, key=lambda look: look.up)
        lines = status_table(first, size.columns).split("\n")
        left_out = len(lines) - size.lines + 2
        lines = [*lines[: size.lines - 3], f"… and {left_out:,} more", lines[-1]]
    return HOME + f"{CLEAR_LINE}\n".join(lines) + CLEAR_LINE + CLEAR_BELOW


def status_table(looks: Sequence[Look], width: int | None) -> str:
    """Return a table with a line for each endpoint; unknown values are a dash. A line ends with the models, or with the
    reason why the endpoint is down."""
    lines = [
        [look.endpoint.place, "up", *_cells(look), harmless(", ".join(look.models))]
        if look.up
        else [look.endpoint.place, "down", harmless(look.reason)]
        for look in looks
    ]
    return f"{table(HEADS, lines, width=width, numbers=2)}\n{_sum(looks)}"


def _cells(look: Look) -> list[str]:
    told = look.told
    if told is None:
        return ["-"] * len(HEADS[2:])
    return [
        f"{told.load.running:,}",
        f"{told.load.waiting:,}",
        "-" if look.tokens_per_second is None else short(round(look.tokens_per_second)),
        _share(told.load.kv_usage),
        _share(told.prefix_hit_rate),
        "-" if told.errors is None else f"{told.errors:,}",
    ]


def _share(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f}%"


def _sum(looks: Sequence[Look]) -> str:
    told = [look.told for look in looks if look.told is not None]
    rates = [look.tokens_per_second for look in looks if look.tokens_per_second is not None]
    words = f"{sum(look.up for look in looks):,} of {counted(len(looks), 'endpoint')} up"
    if told:
        words += (
            f", {sum(one.load.running for one in told):,} in flight, {sum(one.load.waiting for one in told):,} queued"
        )
    return words + (f", {short(round(sum(rates)))} tokens/s" if rates else "")


def _status_json(looks: Sequence[Look]) -> JsonObject:
    rates = [look.tokens_per_second for look in looks if look.tokens_per_second is not None]
    return {
        "total": len(looks),
        "up": sum(look.up for look in looks),
        "tokens_per_second": round(sum(rates), 1) if rates else None,
        "endpoints": [_look_json(look) for look in looks],
    }


def _look_json(look: Look) -> JsonObject:
    told = look.told
    load = told.load if told is not None else None
    return {
        "endpoint": look.endpoint.address,
        "tags": dict(look.endpoint.tags),
        "up": look.up,
        "models": list(look.models),
        "in_flight": None if load is None else load.running,
        "queue": None if load is None else load.waiting,
        "tokens_per_second": None if look.tokens_per_second is None else round(look.tokens_per_second, 1),
        "kv_usage": None if load is None else load.kv_usage,
        "prefix_hit_rate": None if told is None else told.prefix_hit_rate,
        "errors": None if told is None else told.errors,
        "reason": look.reason,
    }


# bench


def bench(options: argparse.Namespace) -> int:
    from batch_agent.fleet.bench import Bench, Wanted, bench_all

    benches = [Bench(host) for host in read_hosts(options.hostfile)]
    wanted = Wanted(
        steps=options.steps,
        seconds=options.seconds,
        tokens_in=options.tokens_in,
        tokens_out=options.tokens_out,
        model=options.model,
        parallel=options.parallel,
    )
    say(
        f"{wanted.tokens_in} tokens in, {wanted.tokens_out} out, {len(wanted.steps)} steps of "
        f"{wanted.seconds:g} s for each of {len(benches)} endpoints; Ctrl-C prints the results so far"
    )
    interrupted = False
    try:
        asyncio.run(bench_all(benches, wanted, stepped=_say_step))
    except KeyboardInterrupt:
        interrupted = True
    if options.json:
        put_json(_bench_json(benches, wanted))
    else:
        put(bench_table(benches, wanted.steps, terminal_width(sys.stdout)))
    if interrupted:
        return SIGNALLED + signal.SIGINT
    return ALL_OK if any(one.steps for one in benches) else UNREACHABLE


def _say_step(bench: Bench) -> None:
    if bench.reason:
        say(f"{bench.endpoint.place}: {harmless(bench.reason)}")
    else:
        step = bench.steps[-1]
        failed = f", {step.failures:,} failed" if step.failures else ""
        took = "" if step.latency is None else f", {duration(step.latency)} per answer"
        say(f"{bench.endpoint.place}: {step.inflight} in flight: {_rate(step)} tokens/s{took}{failed}")


def bench_table(benches: Sequence[Bench], steps: Sequence[int], width: int | None) -> str:
    """Return a table of tokens per second by requests in flight. The line of a failed endpoint ends with the reason."""
    lines = []
    for one in benches:
        rates = {step.inflight: _rate(step) for step in one.steps}
        knee = "-" if one.knee is None else str(one.knee)
        lines.append([one.endpoint.place, *(rates.get(step, "-") for step in steps), knee, harmless(one.reason)])
    return table(["endpoint", *map(str, steps), "knee"], lines, width=width, numbers=1)


def _rate(step: Measurement) -> str:
    rate = step.tokens_per_second
    return "-" if rate is None else short(round(rate))


def _bench_json(benches: Sequence[Bench], wanted: Wanted) -> JsonObject:
    return {
        "tokens_in": wanted.tokens_in,
        "tokens_out": wanted.tokens_out,
        "seconds": wanted.seconds,
        "endpoints": [
            {
                "endpoint": one.endpoint.address,
                "tags": dict(one.endpoint.tags),
                "model": one.model,
                "tokens_in": one.tokens_in,
                "knee": one.knee,
                "steps": [
                    {
                        "in_flight": step.inflight,
                        "answers": len(step.answers),
                        "failures": step.failures,
                        "tokens_per_second": _rounded(step.tokens_per_second),
                        "requests_per_second": _rounded(step.requests_per_second),
                        "latency": _rounded(step.latency),
                    }
                    for step in one.steps
                ],
                "reason": one.reason,
            }
            for one in benches
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


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
