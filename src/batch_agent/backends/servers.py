"""Servers that speak OpenAI's wire, by scheme: where each listens, where its key is, and what it can do."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from batch_agent.backends.address import Address
from batch_agent.backends.base import Backend, Capabilities
from batch_agent.backends.openai import OpenAIBackend
from batch_agent.errors import SpecError


def openai(address: Address) -> Backend:
    if not address.url.netloc:
        base = address.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        url = urlsplit(base)
        if url.scheme not in ("http", "https"):
            raise SpecError("OPENAI_BASE_URL is not an http or https URL")
        address = replace(address, url=url._replace(query=address.url.query))
    key = address.key("OPENAI_API_KEY")
    if address.sends and key is None and "@" not in address.url.netloc and not address.headers:
        raise SpecError("there is no key for openai://: set OPENAI_API_KEY, or give api_key=")
    return OpenAIBackend(
        address.base_url(),
        api_key=key,
        headers=address.headers,
        capabilities=_capabilities(address, native_schema=True, schema_with_tools=True),
        name=f"openai://{address.place}",
        transport=address.transport,
        # Newer models refuse max_tokens.
        max_tokens_field="max_completion_tokens",
    )


def vllm(address: Address) -> Backend:
    return _engine(address, 8000)


def sglang(address: Address) -> Backend:
    return _engine(address, 30000)


def http(address: Address) -> Backend:
    return OpenAIBackend(
        address.base_url(),
        api_key=address.key(),
        headers=address.headers,
        capabilities=_capabilities(address, native_schema=False, schema_with_tools=False),
        name=address.name,
        transport=address.transport,
    )


def _engine(address: Address, default_port: int) -> Backend:
    """A server that people run themselves: plain http on its own port, and schemas kept by a grammar."""
    return OpenAIBackend(
        address.base_url(default_port),
        api_key=address.key(),
        headers=address.headers,
        capabilities=_capabilities(address, native_schema=True, schema_with_tools=False),
        name=address.name,
        transport=address.transport,
    )


def _capabilities(address: Address, *, native_schema: bool, schema_with_tools: bool) -> Capabilities:
    native = address.options.get("native_schema", native_schema)
    return Capabilities(native_schema=native, schema_with_tools=native and schema_with_tools, images=True)
