"""``batch-agent fleet bench``: measures the throughput of each server by requests in flight, and its knee."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from batch_agent.cli.commands.fleet import read_hosts
from batch_agent.cli.exit_status import ALL_OK, SIGNALLED, UNREACHABLE
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.fleet.bench import Bench, Measurement, Wanted, bench_all
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, cut, duration, harmless, terminal_width

WIDEST_NAME = 30
COLUMN = 7


def bench(options: argparse.Namespace) -> int:
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
        asyncio.run(bench_all(benches, wanted, stepped=_say))
    except KeyboardInterrupt:
        interrupted = True
    if options.json:
        put_json(_json(benches, wanted))
    else:
        put(table(benches, wanted.steps, terminal_width(sys.stdout)))
    if interrupted:
        return SIGNALLED + signal.SIGINT
    return ALL_OK if any(one.steps for one in benches) else UNREACHABLE


def _say(bench: Bench) -> None:
    if bench.reason:
        say(f"{bench.endpoint.place}: {harmless(bench.reason)}")
    else:
        step = bench.steps[-1]
        failed = f", {step.failures:,} failed" if step.failures else ""
        took = "" if step.latency is None else f", {duration(step.latency)} per answer"
        say(f"{bench.endpoint.place}: {step.inflight} in flight: {_rate(step)} tokens/s{took}{failed}")


def table(benches: Sequence[Bench], steps: Sequence[int], width: int | None) -> str:
    """Return a table of tokens per second by requests in flight. The line of a failed endpoint ends with the reason."""
    name_width = min(WIDEST_NAME, max(8, *(len(one.endpoint.place) for one in benches)))
    heads = [f"{'endpoint':<{name_width}}", *(f"{step:>{COLUMN}}" for step in steps), f"{'knee':>{COLUMN}}"]
    lines = ["".join(heads)]
    for one in benches:
        rates = {step.inflight: _rate(step) for step in one.steps}
        cells = [f"{cut(one.endpoint.place, name_width):<{name_width}}"]
        cells += [f"{rates.get(step, '-'):>{COLUMN}}" for step in steps]
        cells.append(f"{one.knee if one.knee is not None else '-':>{COLUMN}}")
        cells.append(f"  {harmless(one.reason)}")
        lines.append("".join(cells).rstrip())
    return "\n".join(line if width is None else cut(line, width) for line in lines)


def _rate(step: Measurement) -> str:
    rate = step.tokens_per_second
    return "-" if rate is None else amount(round(rate))


def _json(benches: Sequence[Bench], wanted: Wanted) -> JsonObject:
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
                "steps": [_json_of(step) for step in one.steps],
                "reason": one.reason,
            }
            for one in benches
        ],
    }


def _json_of(step: Measurement) -> JsonObject:
    return {
        "in_flight": step.inflight,
        "answers": len(step.answers),
        "failures": step.failures,
        "tokens_per_second": _rounded(step.tokens_per_second),
        "requests_per_second": _rounded(step.requests_per_second),
        "latency": _rounded(step.latency),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
