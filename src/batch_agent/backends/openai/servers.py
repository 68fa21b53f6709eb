"""Creates the backends of OpenAI's wires, by scheme: address, key variable and capabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self
from urllib.parse import quote, urlsplit

from batch_agent.backends.address import Address
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.batch import JobBackend, OpenAIJobs
from batch_agent.backends.openai.chat import OpenAIBackend, OpenAIServer
from batch_agent.backends.openai.providers import PROVIDERS, Dialect, base_variable, needs_responses
from batch_agent.backends.openai.responses import ResponsesBackend
from batch_agent.errors import SpecError
from batch_agent.messages import Reply

OPENAI = Dialect(
    max_tokens_field="max_completion_tokens",  # newer models refuse max_tokens
    strict_schemas=True,
    cache_key=True,
    openai_models=True,
)
# The latest dated version that is not a preview; every resource supports it.
AZURE_API_VERSION = "2024-10-21"


def openai(address: Address) -> Backend:
    return _openai(address, OpenAIByModel if address.api is None else _form(address))


def openai_batch(address: Address) -> Backend:
    """Create the batch API backend for the same server and key. ``gather`` is the seconds without a new request after
    which a job is sent, ``look`` the seconds until its first poll."""
    waits, address = address.seconds("gather", "look")
    # A cache key only helps requests that are sent one by one.
    dialect = replace(OPENAI, cache_key=False)
    wire = _openai(replace(address, url=address.url._replace(scheme="openai")), OpenAIBackend, dialect)
    return JobBackend(wire, OpenAIJobs(wire.client), **waits)


def azure(address: Address) -> Backend:
    """Create the backend for ``azure://resource/deployment``. Every resource supports the path with the deployment; the
    newer path without it, which the responses API needs, is used if the version asks for it."""
    environ, deployment = address.environ, address.url.path.strip("/")
    endpoint = environ.get("AZURE_OPENAI_ENDPOINT", "").strip().rstrip("/") or _azure_host(address)
    if not endpoint or not deployment or "/" in deployment:
        raise SpecError("an azure:// backend is azure://resource/deployment")
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise SpecError("AZURE_OPENAI_ENDPOINT is not an http or https URL")
    key = address.key("AZURE_OPENAI_API_KEY")
    token = environ.get("AZURE_OPENAI_AD_TOKEN", "").strip() or None
    if address.sends and key is None and token is None and not address.headers:
        raise SpecError("there is no key for azure://: set AZURE_OPENAI_API_KEY, or give api_key=")
    version = environ.get("AZURE_OPENAI_API_VERSION", "").strip()
    newer = address.api == "responses" or version in ("v1", "preview")
    path = "/openai/v1" if newer else f"/openai/deployments/{quote(deployment)}"
    dated = "" if version in ("", "v1") else version
    query = f"?api-version={quote(dated)}" if dated else "" if newer else f"?api-version={AZURE_API_VERSION}"
    return _form(address)(
        endpoint.removesuffix("/openai/v1") + path,
        api_key=None if key else token,
        headers={**({"api-key": key} if key else {}), **address.headers},
        capabilities=_capabilities(address, schema_with_tools=True, files=address.api == "responses"),
        name=address.name,
        dialect=replace(OPENAI, cache_key=newer, deployment=deployment),
        query=query,
        models=[deployment],
    )


def provider(address: Address) -> Backend:
    """Create the backend of one of ``providers``."""
    name = address.url.scheme
    found = PROVIDERS[name]
    own = bool(address.url.netloc)
    address = _placed(address, base_variable(name), found.base_url)
    key = address.key() if found.key is None else _key(address, found.key, name)
    return _form(address)(
        address.base_url(found.port if own else None),
        api_key=key,
        headers=address.headers,
        capabilities=_capabilities(
            address,
            native_schema=found.schemas != "never",
            proven=found.schemas == "always",
            files=found.files and not own,
        ),
        name=f"{name}://{address.place}",
        dialect=found.dialect,
        transport=address.transport,
    )


def http(address: Address) -> Backend:
    return _form(address)(
        address.base_url(),
        api_key=address.key(),
        headers=address.headers,
        capabilities=_capabilities(address, proven=False),
        name=address.name,
        transport=address.transport,
    )


def _openai(address: Address, form: type[OpenAIServer], dialect: Dialect = OPENAI) -> OpenAIServer:
    address = _placed(address, "OPENAI_BASE_URL", "https://api.openai.com/v1")
    return form(
        address.base_url(),
        api_key=_key(address, "OPENAI_API_KEY", "openai"),
        headers=address.headers,
        capabilities=_capabilities(address, schema_with_tools=True, files=True),
        name=f"openai://{address.place}",
        dialect=dialect,
    )


def _form(address: Address) -> type[OpenAIServer]:
    return ResponsesBackend if address.api == "responses" else OpenAIBackend


def _placed(address: Address, variable: str, usual: str) -> Address:
    """Return the address with a host: that of the URL, else that of the variable, else the default."""
    if address.url.netloc:
        return address
    url = urlsplit((address.environ.get(variable) or "").strip() or usual)
    if url.scheme not in ("http", "https"):
        raise SpecError(f"{variable} is not an http or https URL")
    return replace(address, url=url._replace(query=address.url.query))


def _key(address: Address, variable: str, scheme: str) -> str | None:
    key = address.key(variable)
    if address.sends and key is None and "@" not in address.url.netloc and not address.headers:
        raise SpecError(f"there is no key for {scheme}://: set {variable}, or give api_key=")
    return key


def _azure_host(address: Address) -> str:
    place = address.place
    return f"https://{place if '.' in place or ':' in place else f'{place}.openai.azure.com'}" if place else ""


def _capabilities(
    address: Address,
    *,
    native_schema: bool = True,
    schema_with_tools: bool = False,
    proven: bool = True,
    files: bool = False,
) -> Capabilities:
    """Return the capabilities. What the user states about schemas is not checked."""
    given = address.options.get("native_schema")
    native = native_schema if given is None else given
    return Capabilities(
        native_schema=native,
        schema_with_tools=native and schema_with_tools,
        schema_proven=proven or given is not None,
        images=True,
        documents=frozenset({"pdf"}) if files else frozenset(),
    )


class OpenAIByModel(OpenAIBackend):
    """An OpenAIBackend that passes requests for some models on to a ResponsesBackend, because these models need the
    other wire."""

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        self._responses = ResponsesBackend(base_url, **options)

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities. What either wire learnt about schemas counts, because a run uses only one wire."""
        note = self._responses.capabilities.schema_note
        return replace(self._capabilities, native_schema=False, schema_note=note) if note else self._capabilities

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self._responses.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            await self._responses.__aexit__(*exception)
        finally:
            await super().__aexit__(*exception)

    def check(self, shape: RequestShape) -> None:
        if needs_responses(shape.model):
            self._responses.check(shape)
        else:
            super().check(shape)

    @property
    def wires(self) -> frozenset[str]:
        return super().wires | self._responses.wires

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if needs_responses(request.shape.model) or self._responses.own_body(request) is not None:
            return await self._responses.infer(request, on_tool_call)
        return await super().infer(request, on_tool_call)
