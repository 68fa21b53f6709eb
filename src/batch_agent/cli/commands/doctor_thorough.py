"""``batch-agent doctor --thorough``: asks one server small questions and prints what works, and which flag would help.

The requests cost tokens. For an API that may be paid, the command first prints the most that they cost, and sends
nothing without ``--yes``.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from dataclasses import replace

from batch_agent.backends.base import Backend
from batch_agent.backends.registry import open_backend
from batch_agent.backends.schemes import SCHEMES
from batch_agent.cli.exit_status import ALL_OK, RUN_FAILED
from batch_agent.compiler.prices import find_prices
from batch_agent.conformance.examination import CHECKS, estimate, examine
from batch_agent.conformance.finding import STATUSES, Answered, Report
from batch_agent.errors import BackendError, SpecError
from batch_agent.files.results import to_json
from batch_agent.messages import Usage
from batch_agent.observe.text import harmless
from batch_agent.version import __version__

OWN = ("http", "local", "simulated")  # schemes of servers that charge nothing, beside the engines
LISTING_SECONDS = 10.0


def thorough_command(url: str | None, model: str | None, *, json: bool, yes: bool) -> int:
    backend, model = open_backend(url, model=model)
    if backend.is_fleet:
        raise SpecError("--thorough asks one server: give the URL of one server of the fleet")
    if backend.capabilities.patient:
        raise SpecError("--thorough needs answers within seconds: give the address of the API without its batches")
    return asyncio.run(_examined(backend, model, json=json, yes=yes))


async def _examined(backend: Backend, model: str | None, *, json: bool, yes: bool) -> int:
    paid = may_be_paid(backend.name)
    async with backend:
        try:
            name = await _model(backend, model)
            if paid:
                print(harmless(cost_note(backend.name, name)), file=sys.stderr)
                if not yes:
                    raise SpecError("nothing was sent: add --yes to send the questions")
            progress = not json and sys.stderr.isatty()
            report = await examine(backend, name, paid=paid, on_answer=_tick if progress else lambda answer: None)
        except BackendError as error:
            print(harmless(f"{backend.name} does not work: {error}"), file=sys.stderr)
            return RUN_FAILED
    if sys.stderr.isatty() and not json:
        print("\r\x1b[K", end="", file=sys.stderr)
    report = replace(report, about={"batch_agent": __version__, "python": platform.python_version()})
    _print(report, json=json)
    return ALL_OK if report.answers_at_all else RUN_FAILED


def _print(report: Report, *, json: bool) -> None:
    if json:
        print(to_json(report.to_json()).decode())
        return
    for line in report.lines():
        print(harmless(line))
    for status, meaning in STATUSES.items():
        if report.counts[status]:
            print(f"  {status:<9} {meaning}")


def _tick(answer: Answered) -> None:
    print(f"\r\x1b[K{harmless(answer.text, 70)}: {answer.finding.status}", end="", file=sys.stderr, flush=True)


def may_be_paid(name: str) -> bool:
    """Return whether requests to this backend may cost money: a service, or a server behind https."""
    scheme = SCHEMES.get(name.partition("://")[0])
    return scheme is not None and not scheme.own and scheme.name not in OWN


def cost_note(backend: str, model: str) -> str:
    """Return the most that the questions cost, in words."""
    most = estimate(CHECKS)
    tokens = f"{most.prompt_tokens:,} prompt and {most.answer_tokens:,} answer tokens"
    prices = find_prices(None, model=model, backend=backend)
    usage = Usage(prompt_tokens=most.prompt_tokens, completion_tokens=most.answer_tokens)
    cost = "its prices are unknown here" if prices is None else f"${prices.cost(usage):.4f} by {prices.source}"
    return f"{backend}: {most.questions} questions to {model}, at most about {tokens}; {cost}"


async def _model(backend: Backend, model: str | None) -> str:
    if model is not None:
        return model
    try:
        async with asyncio.timeout(LISTING_SECONDS):
            names = await backend.models()
    except TimeoutError:
        raise SpecError(f"{backend.name} did not list its models in {LISTING_SECONDS:g} s: give --model") from None
    if len(names) != 1:
        known = f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}" if names else "no model"
        raise SpecError(f"{backend.name} serves {known}: give --model")
    return names[0]
