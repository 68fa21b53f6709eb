"""``batch-agent fleet status``: shows the status of each server, as a table or as JSON, once or repeatedly."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence

from batch_agent.cli.commands.fleet import read_hosts
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.errors import SpecError
from batch_agent.files.results import to_json
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import Look, Prober, with_rates
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, counted, cut, harmless, terminal_width

EVERY = 2.0  # seconds between two probes
AGAIN = 1.0  # seconds to the second probe without --watch, which shows how the counters move
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
WIDEST_NAME = 40
HEADS = ("in flight", "queue", "tokens/s", "  KV", "prefix", "errors")


def status(options: argparse.Namespace) -> int:
    asyncio.run(_watch(options) if options.watch else _once(options))
    return ALL_OK


async def _once(options: argparse.Namespace) -> None:
    async with Prober() as prober:
        looks = await prober.look_at_all(read_hosts(options.hostfile))
        counting = [look for look in looks if look.told is not None and look.told.generated_tokens is not None]
        if counting:
            await asyncio.sleep(AGAIN)
            later = await prober.look_at_all(look.endpoint for look in counting)
            rated = {look.endpoint: look for look in with_rates(later, {look.endpoint: look for look in looks})}
            looks = [rated.get(look.endpoint, look) for look in looks]
    put(to_json(_json(looks)).decode() if options.json else table(looks, terminal_width(sys.stdout)))


async def _watch(options: argparse.Namespace) -> None:
    """Show the status repeatedly. The hostfile is read again each time; if that fails, the endpoints stay the same."""
    hosts = read_hosts(options.hostfile)
    earlier: dict[AgentEndpoint, Look] = {}
    screen = terminal_width(sys.stdout) is not None and not options.json
    async with Prober() as prober:
        while True:
            looks = with_rates(await prober.look_at_all(hosts), earlier)
            earlier = {look.endpoint: look for look in looks}
            if options.json:
                put_json(_json(looks))
            elif screen:
                put(_screen(looks))
            else:
                put(table(looks, None))
            await asyncio.sleep(EVERY)
            try:
                hosts = await asyncio.to_thread(read_hosts, options.hostfile)
            except SpecError as error:
                say(f"{error}; the endpoints stay the same")


def _screen(looks: Sequence[Look]) -> str:
    """Return the table from the top of the terminal. If it does not fit, endpoints that are down come first."""
    size = shutil.get_terminal_size()
    lines = table(looks, size.columns).split("\n")
    if len(lines) >= size.lines:
        first = sorted(looks, key=lambda look: look.up)
        lines = table(first, size.columns).split("\n")
        left_out = len(lines) - size.lines + 2
        lines = [*lines[: size.lines - 3], f"… and {left_out:,} more", lines[-1]]
    return HOME + f"{CLEAR_LINE}\n".join(lines) + CLEAR_LINE + CLEAR_BELOW


def table(looks: Sequence[Look], width: int | None) -> str:
    """Return a table with a line for each endpoint; unknown values are a dash. A line ends with the models, or with the
    reason why the endpoint is down."""
    numbers = len("  ".join(["", "down", *HEADS]))
    widest = WIDEST_NAME if width is None else min(WIDEST_NAME, max(len("endpoint"), width - numbers))
    name_width = min(widest, max(len("endpoint"), *(len(look.endpoint.place) for look in looks)))
    heads = [f"{'endpoint':<{name_width}}", "up  ", *HEADS]
    lines = ["  ".join(heads)]
    for look in looks:
        cells = [f"{cut(look.endpoint.place, name_width):<{name_width}}", "up  " if look.up else "down"]
        if look.up:
            cells += [f"{text:>{len(head)}}" for head, text in zip(HEADS, _cells(look), strict=True)]
            cells.append(harmless(", ".join(look.models)))
        else:
            cells.append(harmless(look.reason))
        lines.append("  ".join(cells))
    lines.append(_sum(looks))
    return "\n".join(line.rstrip() if width is None else cut(line.rstrip(), width) for line in lines)


def _cells(look: Look) -> list[str]:
    told = look.told
    if told is None:
        return ["-"] * len(HEADS)
    return [
        f"{told.load.running:,}",
        f"{told.load.waiting:,}",
        "-" if look.tokens_per_second is None else amount(round(look.tokens_per_second)),
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
    return words + (f", {amount(round(sum(rates)))} tokens/s" if rates else "")


def _json(looks: Sequence[Look]) -> JsonObject:
    rates = [look.tokens_per_second for look in looks if look.tokens_per_second is not None]
    return {
        "total": len(looks),
        "up": sum(look.up for look in looks),
        "tokens_per_second": round(sum(rates), 1) if rates else None,
        "endpoints": [_json_of(look) for look in looks],
    }


def _json_of(look: Look) -> JsonObject:
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
