"""From what a user gives as ``backend=`` and ``model=`` to a Backend and the model's name.

A scheme is one line in ``SCHEMES``, a provider whose name may stand before a model's one in ``PROVIDERS``. Everything
that is wrong with an address is a SpecError that says what is allowed, and none of them shows a password or a key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, parse_qsl, urlsplit

from batch_agent.backends import local
from batch_agent.backends.base import Backend, Capabilities
from batch_agent.backends.local import weights
from batch_agent.backends.openai import OpenAIBackend
from batch_agent.backends.simulated import SimulatedBackend
from batch_agent.errors import SpecError

BACKEND_VARIABLE = "BATCH_AGENT_BACKEND"
KEY_VARIABLE = "BATCH_AGENT_API_KEY"
FORMS = "vllm://host:8000, sglang://host:30000, openai://, http://host:port/v1, https://host/v1, or local://"


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """A backend as the user gave it, taken apart."""

    url: SplitResult
    api_key: str | None
    headers: Mapping[str, str]
    environ: Mapping[str, str]

    @property
    def name(self) -> str:
        """For people: no user, no password, no options."""
        return f"{self.url.scheme}://{_place(self.url)}{self.url.path.rstrip('/')}"

    @property
    def options(self) -> Mapping[str, bool]:
        """What stands behind the question mark, for servers that speak HTTP."""
        return _options(self.url)

    def key(self, variable: str = KEY_VARIABLE) -> str | None:
        """The key that was given, else the variable's, where the URL does not bring a login of its own."""
        if self.api_key:
            return self.api_key
        return None if "@" in self.url.netloc else (self.environ.get(variable) or "").strip() or None


Factory = Callable[[Address], Backend]


def open_backend(
    backend: object,
    *,
    model: str | None,
    api_key: str | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Backend, str | None]:
    """The backend, and the model's name without a provider before it."""
    if backend is None:
        backend = environ.get(BACKEND_VARIABLE) or None
    if backend is None:
        backend, model = _provider_of(model)
    if isinstance(backend, str):
        return _from_url(backend, api_key, {}, environ), model
    if isinstance(backend, Mapping):
        return _from_mapping(backend, api_key, environ), model
    if isinstance(backend, Backend) and not isinstance(backend, type):
        if api_key is not None:
            raise SpecError("api_key has no effect on a Backend object: give the key to the object")
        return backend, model
    raise SpecError(f"backend is a {type(backend).__name__}: give a URL ({FORMS}), a mapping with a url, or a Backend")


def _provider_of(model: str | None) -> tuple[str, str | None]:
    provider, slash, name = (model or "").partition("/")
    if slash and name and provider in PROVIDERS:
        return PROVIDERS[provider], name
    if model is None or model.endswith(".gguf") or weights.find(model) is not None:
        return f"local://{model or ''}", None
    raise SpecError(
        f"no backend for the model {model!r}: give backend= (or set {BACKEND_VARIABLE}), as {FORMS}; "
        f"or put a provider before its name ({', '.join(f'{p}/…' for p in PROVIDERS)})"
    )


def _from_mapping(mapping: Mapping[object, object], api_key: str | None, environ: Mapping[str, str]) -> Backend:
    _known(map(str, mapping), ("url", "api_key", "headers"), "backend has no key")
    url, key, headers = mapping.get("url"), mapping.get("api_key"), mapping.get("headers") or {}
    if not isinstance(url, str):
        raise SpecError(f"backend is a mapping without a url: give one of {FORMS}")
    if not isinstance(key, str | None):
        raise SpecError("backend's api_key is not text")
    if not isinstance(headers, Mapping) or not all(isinstance(text, str) for pair in headers.items() for text in pair):
        raise SpecError("backend's headers must be a mapping of names to texts")
    if key and api_key and key != api_key:
        raise SpecError("there are two keys, api_key= and the one in backend: give one of them")
    return _from_url(url, key or api_key, headers, environ)


def _from_url(text: str, api_key: str | None, headers: Mapping[str, str], environ: Mapping[str, str]) -> Backend:
    scheme, separator, _ = text.strip().partition("://")
    if not separator:
        raise SpecError(f"backend {text.rpartition('@')[2]!r} is not a URL: give one of {FORMS}")
    scheme = scheme.lower()
    _known([scheme], SCHEMES, "there is no backend scheme")
    try:
        url = urlsplit(text.strip())
        port_is_readable = url.port is None or url.port > 0
    except ValueError:
        port_is_readable = False
    if not port_is_readable:
        raise SpecError(
            f"the host and port of the {scheme}:// backend cannot be read: write host:port, IPv6 in brackets"
        )
    # A key of spaces is a variable that was not filled in.
    key = (api_key or "").strip() or None
    return SCHEMES[scheme](Address(url, key, headers, environ))


def _options(url: SplitResult) -> dict[str, bool]:
    given = dict(parse_qsl(url.query, keep_blank_values=True))
    allowed = ("native_schema",) if url.scheme in ("http", "https") else ("native_schema", "tls")
    _known(given, allowed, f"a {url.scheme}:// backend has no option")
    values = {"true": True, "1": True, "false": False, "0": False}
    for name, value in given.items():
        if value.lower() not in values:
            raise SpecError(f"the backend's option {name} must be true or false")
    return {name: values[value.lower()] for name, value in given.items()}


def _known(names: Iterable[str], allowed: Iterable[str], complaint: str) -> None:
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise SpecError(f"{complaint} {name!r}{hint} Known: {', '.join(allowed)}")


def _openai(address: Address) -> Backend:
    if not address.url.netloc:
        base = address.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        url = urlsplit(base)
        if url.scheme not in ("http", "https"):
            raise SpecError("OPENAI_BASE_URL is not an http or https URL")
        address = replace(address, url=url._replace(query=address.url.query))
    key = address.key("OPENAI_API_KEY")
    if key is None and "@" not in address.url.netloc and not address.headers:
        raise SpecError("there is no key for openai://: set OPENAI_API_KEY, or give api_key=")
    return OpenAIBackend(
        _base_url(address),
        api_key=key,
        headers=address.headers,
        capabilities=_capabilities(address, native_schema=True, schema_with_tools=True),
        name=f"openai://{_place(address.url)}",
        # Newer models refuse max_tokens.
        max_tokens_field="max_completion_tokens",
    )


def _engine(default_port: int) -> Factory:
    """A server that people run themselves: plain http on its own port, and schemas kept by a grammar."""

    def build(address: Address) -> Backend:
        return OpenAIBackend(
            _base_url(address, default_port),
            api_key=address.key(),
            headers=address.headers,
            capabilities=_capabilities(address, native_schema=True, schema_with_tools=False),
            name=address.name,
        )

    return build


def _http(address: Address) -> Backend:
    return OpenAIBackend(
        _base_url(address),
        api_key=address.key(),
        headers=address.headers,
        capabilities=_capabilities(address, native_schema=False, schema_with_tools=False),
        name=address.name,
    )


def _capabilities(address: Address, *, native_schema: bool, schema_with_tools: bool) -> Capabilities:
    native = address.options.get("native_schema", native_schema)
    return Capabilities(native_schema=native, schema_with_tools=native and schema_with_tools, images=True)


def _base_url(address: Address, engine_port: int | None = None) -> str:
    """The URL up to ``/v1``, login included. A path that was given is kept; engines serve ``/v1`` below theirs."""
    url = address.url
    if not url.hostname:
        raise SpecError(f"the {url.scheme}:// backend has no host: give one of {FORMS}")
    is_engine = engine_port is not None
    secure = address.options.get("tls", url.scheme in ("https", "openai"))
    port = f":{engine_port}" if is_engine and url.port is None and not secure else ""
    path = url.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    if not path or (is_engine and not path.endswith("/v1")):
        path += "/v1"
    return f"{'https' if secure else 'http'}://{url.netloc.removesuffix(':')}{port}{path}"


def _place(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


def _local(address: Address) -> Backend:
    return local.from_url(address.url.geturl())


def _simulated(address: Address) -> Backend:
    return SimulatedBackend.from_url(address.url.geturl())


SCHEMES: Mapping[str, Factory] = {
    "openai": _openai,
    "vllm": _engine(8000),
    "sglang": _engine(30000),
    "http": _http,
    "https": _http,
    "local": _local,
    "simulated": _simulated,
}
PROVIDERS: Mapping[str, str] = {"openai": "openai://"}
