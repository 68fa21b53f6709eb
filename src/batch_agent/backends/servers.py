"""Servers that speak OpenAI's wire, by scheme: where each listens, where its key is, and what it can do."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from batch_agent.backends.address import Address
from batch_agent.backends.base import Backend, Capabilities
from batch_agent.backends.jobs import JobBackend
from batch_agent.backends.openai import OpenAIBackend
from batch_agent.backends.openai_jobs import OpenAIJobs
from batch_agent.errors import SpecError


def openai(address: Address) -> OpenAIBackend:
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
        # Newer models refuse max_tokens.
        max_tokens_field="max_completion_tokens",
    )


def openai_batch(address: Address) -> Backend:
    """The same server and key, through its batch API. ``gather`` and ``look`` are seconds: how long nobody may have
    joined a job before it is sent, and after how long it is first asked whether it is done."""
    waits, address = address.seconds("gather", "look")
    wire = openai(replace(address, url=address.url._replace(scheme="openai")))
    return JobBackend(wire, OpenAIJobs(wire.client), **waits)


def http(address: Address) -> Backend:
    return OpenAIBackend(
        address.base_url(),
        api_key=address.key(),
        headers=address.headers,
        capabilities=_capabilities(address, native_schema=False, schema_with_tools=False),
        name=address.name,
    )


def _capabilities(address: Address, *, native_schema: bool, schema_with_tools: bool) -> Capabilities:
    native = address.options.get("native_schema", native_schema)
    return Capabilities(native_schema=native, schema_with_tools=native and schema_with_tools, images=True)
