"""Checks of ``doctor`` for hosted providers and fleets: each with a key or an address gets a free request.

The request asks for the list of models. No answer of a model is requested.
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

PATIENCE = 3.0  # seconds for a server to list its models
NAMED = 4  # models and servers that are listed; the others are counted


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """Whether one backend works. ``note`` gives the reason, or what is missing."""

    backend: str
    works: bool
    note: str
    advice: Sequence[Advice] = ()  # on the engine's settings for agents


def asked_services(environ: Mapping[str, str] = os.environ) -> Iterator[BackendFinding]:
    """Check each provider that has a key or an address for its models. For the others, say what is missing."""
    for scheme in SCHEMES.values():
        given = _given(scheme, environ)
        if given or (scheme.is_service and scheme.listed):
            yield _service(scheme, environ)


def _given(scheme: Scheme, environ: Mapping[str, str]) -> bool:
    """Return whether the environment has the provider's key, or its address if it needs no key."""
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
    return BackendFinding(backend.name, True, f"accepts the key and serves {listed(names) or 'no model'}")


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
    return bool(up), "; ".join([note, *down[:NAMED], *([f"{len(down) - NAMED:,} more"] if len(down) > NAMED else [])])


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - NAMED:,} more models" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
