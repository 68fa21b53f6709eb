"""What ``doctor`` finds out of hosted services and of fleets: those with a key or an address are asked, for free.

The request is the one for the list of models. Whether an answer would be any good is not tried.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from batch_agent.backends.base import Backend
from batch_agent.backends.engines.advice import Advice
from batch_agent.backends.openai.providers import PROVIDERS, base_variable
from batch_agent.backends.registry import open_backend
from batch_agent.backends.schemes import SCHEMES, Scheme
from batch_agent.errors import BackendError, SpecError
from batch_agent.fleet.backend import Fleet
from batch_agent.observe.text import counted

PATIENCE = 3.0  # seconds for a server to say what it serves
NAMED = 4  # models and servers that are named; the others are counted


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """Whether one backend would work. ``note`` says why, or what is missing."""

    backend: str
    works: bool
    note: str
    advice: Sequence[Advice] = ()  # what an engine lacks for agents


def asked_services(environ: Mapping[str, str] = os.environ) -> Iterator[BackendFinding]:
    """The services that have a key or an address here, each asked for its models; others by what they lack."""
    for scheme in SCHEMES.values():
        given = _given(scheme, environ)
        if given or (scheme.is_service and scheme.listed):
            yield _service(scheme, environ)


def _given(scheme: Scheme, environ: Mapping[str, str]) -> bool:
    """Whether the environment has its key, or its address where it needs no key."""
    if scheme.name in PROVIDERS and environ.get(base_variable(scheme.name), "").strip():
        return True
    return scheme.is_service and "batch" not in scheme.name and bool(environ.get(scheme.key, "").strip())


def _service(scheme: Scheme, environ: Mapping[str, str]) -> BackendFinding:
    url = f"{scheme.name}://"
    try:
        backend, _ = open_backend(url, model=None, api_key=None, environ=environ)
    except SpecError as error:
        return BackendFinding(url, False, str(error))
    finding = asyncio.run(_asked(backend))
    return BackendFinding(url, finding.works, finding.note)


async def _asked(backend: Backend) -> BackendFinding:
    try:
        async with backend, asyncio.timeout(PATIENCE):
            names = await backend.models()
    except TimeoutError:
        return BackendFinding(backend.name, False, f"no answer in {PATIENCE:g} s")
    except (BackendError, SpecError) as error:
        return BackendFinding(backend.name, False, str(error))
    return BackendFinding(backend.name, True, f"takes the key and serves {listed(names) or 'no model'}")


async def fleet_note(fleet: Fleet) -> tuple[bool, str]:
    """Whether a server of an entered fleet answers; and what each serves, or why it does not."""
    answers: dict[str, list[str] | BackendError] = {}
    try:
        async with asyncio.timeout(PATIENCE):
            answers = await fleet.survey()
    except TimeoutError:
        pass
    up = [answer for answer in answers.values() if isinstance(answer, list)]
    down = [f"{name}: {answers.get(name, f'no answer in {PATIENCE:g} s')}" for name in _silent(fleet, answers)]
    models = list(dict.fromkeys(name for names in up for name in names))
    note = f"{len(up):,} of {counted(len(fleet.servers), 'server')} answer, serving {listed(models) or 'no model'}"
    if not up:
        note = f"none of {counted(len(fleet.servers), 'server')} answers"
    return bool(up), "; ".join([note, *down[:NAMED], *([f"{len(down) - NAMED:,} more"] if len(down) > NAMED else [])])


def _silent(fleet: Fleet, answers: Mapping[str, object]) -> list[str]:
    return [name for name in fleet.servers if not isinstance(answers.get(name), list)]


def listed(names: Sequence[str]) -> str:
    """The first names; the others are counted."""
    more = f" and {len(names) - NAMED:,} more models" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
