"""``batch-agent doctor``: shows what is installed, which backends work, and which one is the default.

It sends requests, but changes, downloads and starts nothing. A given backend is checked instead of the default. For an
inference engine it prints advice on settings for agents. The exit status is 1 if the backend does not work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from batch_agent.backends.base import Backend
from batch_agent.backends.cache_store import cache_dir
from batch_agent.backends.engines.engine import SHARED, Advice, advice
from batch_agent.backends.local import physical_cores, require_engine, weights
from batch_agent.backends.openai.providers import PROVIDERS, base_variable
from batch_agent.backends.registry import BACKEND_VARIABLE, open_backend
from batch_agent.backends.schemes import OWN_FORMS, SCHEMES, Scheme
from batch_agent.cli.exit_status import ALL_OK, RUN_FAILED
from batch_agent.cli.output.streams import put, put_json
from batch_agent.cli.spec.numbers import positive
from batch_agent.compiler.prices import find_prices
from batch_agent.conformance.examination import CHECKS, examine, most_usage
from batch_agent.conformance.finding import STATUSES, Answered
from batch_agent.errors import BackendError, SpecError
from batch_agent.fleet.backend import Fleet
from batch_agent.messages import JsonObject
from batch_agent.money import dollars
from batch_agent.observe.text import amount, counted, harmless
from batch_agent.version import __version__

PACKAGE = "batch-agent"
NAMED = "given on the command line"
SHARING_PATIENCE = 20.0  # seconds for a server to answer two requests
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*(?:;.*extra == ['\"](?P<extra>[\w-]+)['\"])?")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")

OWN = ("http", "local", "simulated")  # schemes of servers that charge nothing, beside the engines
LISTING_SECONDS = 10.0

PATIENCE = 3.0  # seconds for a server to list its models
LISTED = 4  # models and servers that are listed; the others are counted


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="the backend to check, like --backend")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--backend", metavar="URL", help="check this backend, also fleet://, and give advice on it")
    parser.add_argument("--thorough", action="store_true", help="ask the backend about 60 small questions, in minutes")
    parser.add_argument("--model", metavar="NAME", help="with --thorough: the model to ask, if it serves several")
    parser.add_argument("--yes", action="store_true", help="with --thorough: send the questions to a paid API")
    parser.add_argument("--agents", type=positive, metavar="N", help="with --context: number of concurrent agents")
    parser.add_argument("--context", type=positive, metavar="TOKENS", help="context of an agent before its last turn")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    packages: Mapping[str, str | None]  # name → version, None if not installed
    extras: Mapping[str, Mapping[str, str | None]]
    backends: Sequence[BackendFinding]
    default: BackendFinding
    because: str
    cores: int
    physical_cores: int
    memory_bytes: int | None
    cache: Path
    cache_bytes: int

    @classmethod
    def of_this_machine(cls, url: str | None = None, batch: Mapping[str, int | None] | None = None) -> Diagnosis:
        """Return the diagnosis of this machine. ``url`` replaces the default backend; ``batch`` is for ``advice``."""
        cache, is_set = cache_dir(), bool(os.environ.get(BACKEND_VARIABLE))
        default = f"set by {BACKEND_VARIABLE}" if is_set else f"{BACKEND_VARIABLE} is not set"
        return cls(
            packages=_installed(None),
            extras={extra: _installed(extra) for extra in sorted({e for _, e in _requirements() if e is not None})},
            backends=(_local(), *asked_services()),
            default=_default(url, batch or {}),
            because=default if url is None else NAMED,
            cores=_usable_cores(),
            physical_cores=physical_cores(),
            memory_bytes=_memory_bytes(),
            cache=cache,
            cache_bytes=_size_bytes(cache),
        )

    def to_json(self) -> JsonObject:
        return {
            "version": __version__,
            "python": platform.python_version(),
            "executable": sys.executable,
            "system": _system(),
            "packages": dict(self.packages),
            "extras": {extra: dict(packages) for extra, packages in self.extras.items()},
            "backends": [_json(finding) for finding in self.backends],
            "default": {
                **_json(self.default),
                "because": self.because,
                "advice": [each.to_json() for each in self.default.advice],
            },
            "cores": {"usable": self.cores, "physical": self.physical_cores},
            "memory_bytes": self.memory_bytes,
            "cache": {"path": str(self.cache), "bytes": self.cache_bytes},
        }

    def lines(self) -> Iterator[str]:
        yield f"{PACKAGE} {__version__}, Python {platform.python_version()}, {_system()}"
        yield f"  {'needs':<9} {_versions(self.packages) or 'unknown: the package is not installed'}"
        for extra, packages in self.extras.items():
            yield f"  {extra:<9} {_versions(packages)}"
        yield "backends"
        width = max(9, *(len(finding.backend) for finding in self.backends))
        for finding in self.backends:
            yield f"  {finding.backend:<{width}} {_verdict(finding)}"
        yield f"  {'servers':<{width}} your own, or another: --backend {OWN_FORMS}"
        verdict = "as above" if self.default in self.backends else _verdict(self.default)
        label = "backend" if self.because == NAMED else "default"
        yield f"{label:<11} {self.default.backend} ({self.because}); {verdict}"
        for each in self.default.advice:
            yield f"  advice    {each}"
        memory = f", {amount(self.memory_bytes)}B of memory" if self.memory_bytes else ""
        yield f"machine     {self.cores} cores, {self.physical_cores} of them physical{memory}"
        yield f"cache       {self.cache}, {amount(self.cache_bytes)}B"


def doctor_command(options: argparse.Namespace) -> int:
    if options.thorough:
        return thorough_command(options.backend or options.url, options.model, json=options.json, yes=options.yes)
    batch = {"agents": options.agents, "context_tokens": options.context}
    found = Diagnosis.of_this_machine(options.backend or options.url, batch)
    if options.json:
        put_json(found.to_json())
    else:
        put("\n".join(map(harmless, found.lines())))
    return ALL_OK if found.default.works else RUN_FAILED


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _json(finding: BackendFinding) -> JsonObject:
    return {"backend": finding.backend, "works": finding.works, "note": finding.note}


def _verdict(finding: BackendFinding) -> str:
    return f"{'works' if finding.works else 'does not work'}: {finding.note}"


def _default(url: str | None, batch: Mapping[str, int | None]) -> BackendFinding:
    """Check the given backend, or the default backend."""
    if url is None and not os.environ.get(BACKEND_VARIABLE):
        return _local()
    try:
        backend, _ = open_backend(url, model=None, api_key=None)
    except SpecError as error:
        named = BACKEND_VARIABLE if url is None else "--backend"
        return BackendFinding(f"the URL of {named}", False, str(error))  # the URL may hold a password
    return _local() if backend.name.startswith("local://") else asyncio.run(_asked(backend, batch))


async def _asked(backend: Backend, batch: Mapping[str, int | None] | None) -> BackendFinding:
    """Ask for the list of models. With ``batch``, also measure an engine and give advice on it."""
    verb = "accepts the key and serves"
    sharing = ""
    lacks = tuple[Advice, ...]()
    try:
        async with backend:
            if isinstance(backend, Fleet):
                return BackendFinding(backend.name, *await fleet_note(backend))
            async with asyncio.timeout(PATIENCE):
                names = await backend.models()
            if batch is not None:
                verb, (sharing, lacks) = "serves", await _sharing(backend, names, batch)
    except TimeoutError:
        return BackendFinding(backend.name, False, f"no answer in {PATIENCE:g} s")
    except (BackendError, SpecError) as error:
        return BackendFinding(backend.name, False, str(error))
    return BackendFinding(backend.name, True, f"{verb} {listed(names) or 'no model'}{sharing}", lacks)


async def _sharing(
    backend: Backend, names: Sequence[str], batch: Mapping[str, int | None]
) -> tuple[str, tuple[Advice, ...]]:
    """Measure whether an engine computes the shared prefix of requests once. Returns "" if the engine does not report
    it, and advice on the engine's settings."""
    from batch_agent.backends.engines.engine import EngineBackend

    if not isinstance(backend, EngineBackend) or len(names) != 1:
        return "", ()
    try:
        async with asyncio.timeout(SHARING_PATIENCE):
            sharing = await backend.verify_prefix_sharing(names[0])
            state = await backend.state(sharing)
    except (BackendError, TimeoutError) as error:
        why = str(error) or f"no answer in {SHARING_PATIENCE:g} s"
        return f"; prefix caching could not be measured: {why}", ()
    lacks = () if state is None else tuple(advice(state, **batch))
    if sharing.share is None:
        return "", lacks
    if sharing.share < SHARED:
        return "; requests with the same prefix have no cache hits: is its prefix cache on?", lacks
    return f"; requests with the same prefix share {sharing.share:.0%} of their prompt", lacks


def _local() -> BackendFinding:
    try:
        require_engine()
    except SpecError as error:
        return BackendFinding("local://", False, str(error))
    model = weights.available()[0]
    if model.state == "ready":
        return BackendFinding("local://", True, f"{model.name} is in the cache")
    if model.state == "damaged":
        return BackendFinding("local://", False, f"{model.path} is damaged: run batch-agent models fetch")
    return BackendFinding("local://", True, f"{model.name} is downloaded at first use, {amount(model.size_bytes)}B")


def _requirements() -> Iterator[tuple[str, str | None]]:
    """Yield each required package with the extra that requires it; nothing in a source tree that is not installed."""
    try:
        requirements = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        if match := REQUIREMENT.match(requirement):
            yield match["name"], match["extra"]


def _installed(extra: str | None) -> dict[str, str | None]:
    return {name: _version(name) for name, of in _requirements() if of == extra}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    """Return the memory of the machine, or the limit of this container if it is lower; None if unknown."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(memory, int(MEMORY_LIMIT.read_text()))
    except (OSError, ValueError):  # no such limit
        return memory


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # deleted meanwhile
            continue
    return total


def _versions(installed: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'is not installed'}" for name, version in installed.items())


# ``--thorough`` asks one server small questions. They cost tokens: for an API that may be paid, the command first
# prints the most that they cost, and sends nothing without ``--yes``.
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
    if json:
        put_json(report.to_json())
    else:
        meanings = [f"  {status:<9} {meaning}" for status, meaning in STATUSES.items() if report.counts[status]]
        put("\n".join([*map(harmless, report.lines()), *meanings]))
    return ALL_OK if report.answers_at_all else RUN_FAILED


def _tick(answer: Answered) -> None:
    print(f"\r\x1b[K{harmless(answer.text, 70)}: {answer.finding.status}", end="", file=sys.stderr, flush=True)


def may_be_paid(name: str) -> bool:
    """Return whether requests to this backend may cost money: a service, or a server behind https."""
    scheme = SCHEMES.get(name.partition("://")[0])
    return scheme is not None and not scheme.own and scheme.name not in OWN


def cost_note(backend: str, model: str) -> str:
    """Return the most that the questions cost, in words."""
    most, prices = most_usage(), find_prices(None, model=model, backend=backend)
    tokens = f"{most.prompt_tokens:,} prompt and {most.completion_tokens:,} answer tokens"
    cost = "its prices are unknown here" if prices is None else f"{dollars(prices.cost(most))} by {prices.source}"
    return f"{backend}: {len(CHECKS)} questions to {model}, at most about {tokens}; {cost}"


async def _model(backend: Backend, model: str | None) -> str:
    if model is not None:
        return model
    try:
        async with asyncio.timeout(LISTING_SECONDS):
            names = await backend.models()
    except TimeoutError:
        raise SpecError(f"{backend.name} did not list its models in {LISTING_SECONDS:g} s: give --model") from None
    if len(names) != 1:
        raise SpecError(f"{backend.name} serves {listed(names) or 'no model'}: give --model")
    return names[0]


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """Whether one backend works. ``note`` gives the reason, or what is missing."""

    backend: str
    works: bool
    note: str
    advice: Sequence[Advice] = ()  # on the engine's settings for agents


def asked_services() -> Iterator[BackendFinding]:
    """Check each provider that has a key or an address for its models. For the others, say what is missing."""
    for scheme in SCHEMES.values():
        if _is_given(scheme) or (scheme.is_service and scheme.listed):
            url = f"{scheme.name}://"
            try:
                backend, _ = open_backend(url, model=None, api_key=None)
            except SpecError as error:
                yield BackendFinding(url, False, str(error))
            else:
                yield replace(asyncio.run(_asked(backend, None)), backend=url)


def _is_given(scheme: Scheme) -> bool:
    """Return whether the environment has the provider's key, or its address if it needs no key."""
    if scheme.name in PROVIDERS and os.environ.get(base_variable(scheme.name), "").strip():
        return True
    return scheme.is_service and "batch" not in scheme.name and bool(os.environ.get(scheme.key, "").strip())


async def fleet_note(fleet: Fleet) -> tuple[bool, str]:
    """Return whether any server of an open fleet answers, and a note with the models and the unreachable servers."""
    answers: dict[str, list[str] | BackendError] = {}
    try:
        async with asyncio.timeout(PATIENCE):
            answers = await fleet.survey()
    except TimeoutError:
        pass
    up = [answer for answer in answers.values() if isinstance(answer, list)]
    silent = [name for name in fleet.servers if not isinstance(answers.get(name), list)]
    down = [f"{name}: {answers.get(name, f'no answer in {PATIENCE:g} s')}" for name in silent]
    models = list(dict.fromkeys(name for names in up for name in names))
    note = f"{len(up):,} of {counted(len(fleet.servers), 'server')} answer, serving {listed(models) or 'no model'}"
    if not up:
        note = f"none of {counted(len(fleet.servers), 'server')} answers"
    return bool(up), "; ".join(
        [note, *down[:LISTED], *([f"{len(down) - LISTED:,} more"] if len(down) > LISTED else [])]
    )


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - LISTED:,} more models" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
