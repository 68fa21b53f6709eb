"""Turns ``backend=`` and ``model=`` as the user gave them into a Backend and the model's name.

``schemes`` is the table of backends. Only the named backend is imported, because an HTTP client or an engine is slow to
load. A wrong address raises a SpecError that lists what is allowed, and never shows a password or a key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from batch_agent.backends.address import Address, check_known
from batch_agent.backends.base import Backend
from batch_agent.backends.schemes import FORMS, MAKERS, PROVIDERS, SCHEMES
from batch_agent.errors import SpecError
from batch_agent.scheduler.server import KnownServers

if TYPE_CHECKING:
    from batch_agent.http.transport import Transport

BACKEND_VARIABLE = "BATCH_AGENT_BACKEND"

FLEET = "batch_agent.fleet.backend:Fleet"
KNOWN = KnownServers()
"""What this process knows about servers, by address: two runs with one URL share its rate limits and its health."""


def open_backend(
    backend: object,
    *,
    model: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] = os.environ,
    sends: bool = True,
    transport: Transport | None = None,
) -> tuple[Backend, str | None]:
    """Return the backend, and the model's name without a provider prefix. Without ``sends`` no key is needed.
    ``transport`` is shared with other backends."""
    backend, model = resolved(backend, model, environ)
    headers: Mapping[str, str] = {}
    if isinstance(backend, Mapping):
        backend, api_key, headers = _read_mapping(backend, api_key)
    if isinstance(backend, str):
        scheme, url = _read_url(backend)
        # A key of only spaces is a variable that was not filled in.
        key = (api_key or "").strip() or None
        factory: Callable[[Address], Backend] = resolve_name(SCHEMES[scheme].factory)
        opened = factory(Address(url, key, headers, environ, sends, model=model, transport=transport))
        if not SCHEMES[scheme].in_process and not opened.is_fleet:
            opened.lend(KNOWN.server(opened.name, key))
        return opened, model
    if isinstance(backend, list | tuple):
        fleet: Callable[..., Backend] = resolve_name(FLEET)
        return fleet(backend, api_key=api_key, environ=environ, sends=sends), model
    if isinstance(backend, Backend):
        if api_key is not None:
            raise SpecError("api_key has no effect on a Backend object: give the key to the object")
        return backend, model
    what = f"the class {backend.__name__}" if isinstance(backend, type) else f"a {type(backend).__name__}"
    raise SpecError(
        f"backend is {what}: give a URL ({FORMS}), a mapping with a url, a list of these, or a Backend (an object of a "
        "class derived from batch_agent.backends.base.Backend)"
    )


def resolved(backend: object, model: str | None, environ: Mapping[str, str] = os.environ) -> tuple[object, str | None]:
    """Return the backend, and the model's name there, if the user may have given no backend: the one of the
    environment, that of the provider in the model's name, or the embedded engine."""
    if backend is None:
        backend = environ.get(BACKEND_VARIABLE) or None
    return _provider_of(model) if backend is None else (backend, model)


def at_backend(model: str, backend: object) -> str | None:
    """Return the name that a model has at the backend to which it was resolved; None if the address of the backend
    names the model. ``model`` is the name as a user gave it without a backend."""
    provider, _, name = model.partition("/")
    if PROVIDERS.get(provider) == backend:
        return name
    return None if backend == f"local://{model}" else model


def _provider_of(model: str | None) -> tuple[str, str | None]:
    provider, slash, name = (model or "").partition("/")
    if slash and name and provider in PROVIDERS:
        return PROVIDERS[provider], name
    from batch_agent.backends.local import weights

    if model is None or model.endswith(".gguf") or weights.find(model) is not None:
        return f"local://{model or ''}", None
    near = difflib.get_close_matches(provider, PROVIDERS) if slash else []
    if not slash and (maker := next((by for start, by in MAKERS.items() if model.startswith(start)), None)):
        near, name = [maker], model
    hint = f"; did you mean {' or '.join(f'{one}/{name}' for one in near)}?" if near and name else ""
    give = "Else give" if hint else "give"
    raise SpecError(
        f"no backend for the model {model!r}{hint or ':'} {give} backend= (or set {BACKEND_VARIABLE}), as {FORMS}; "
        f"or put a provider before its name ({', '.join(f'{p}/…' for p in PROVIDERS)})"
    )


def _read_mapping(mapping: Mapping[object, object], api_key: str | None) -> tuple[str, str | None, Mapping[str, str]]:
    check_known(map(str, mapping), ("url", "api_key", "headers"), "backend has no key")
    url = mapping.get("url")
    key = mapping.get("api_key")
    headers = mapping.get("headers") or {}
    if not isinstance(url, str):
        raise SpecError(f"backend is a mapping without a url: give one of {FORMS}")
    if not isinstance(key, str | None):
        raise SpecError("backend's api_key is not text")
    if not isinstance(headers, Mapping) or not all(isinstance(text, str) for pair in headers.items() for text in pair):
        raise SpecError("backend's headers must be a mapping of names to texts")
    if key and api_key and key != api_key:
        raise SpecError("give the key once: either api_key= or the one in backend")
    return url, key or api_key, headers


def _read_url(text: str) -> tuple[str, SplitResult]:
    scheme, separator, _ = text.strip().partition("://")
    if not separator:
        raise SpecError(f"backend {text.rpartition('@')[2]!r} is not a URL: give one of {FORMS}")
    scheme = scheme.lower()
    check_known([scheme], SCHEMES, "there is no backend scheme")
    try:
        url = urlsplit(text.strip())
        if url.port == 0:
            raise ValueError("port 0")
    except ValueError:
        what = f"the host and port of the {scheme}:// backend are invalid: write host:port, IPv6 in brackets"
        raise SpecError(what) from None
    return scheme, url
