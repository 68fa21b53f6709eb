"""Providers and servers of ``/chat/completions`` by name, as data: address, key variable, and accepted options.

``servers`` creates the backends. A name is a scheme (``groq://``) and may precede a model's name
(``groq/llama-3.3-70b-versatile``). A host in the URL or the variable ``NAME_BASE_URL`` overrides the address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import mapping
from batch_agent.backends.openai.schema import SchemaForm, engine_form, strict_form
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

Keeps = Literal["always", "maybe", "never"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the servers of OpenAI's wires differ."""

    max_tokens_field: str = "max_tokens"
    seed_field: str | None = "seed"  # None: a seed is refused
    stream_options: bool = True  # accepts the field that requests usage at the end of a stream; else usage comes anyway
    strict_schemas: bool = False  # accepts a schema only in OpenAI's strict form
    cache_key: bool = False  # accepts a ``prompt_cache_key``, which routes requests with one prefix to the same cache
    wants_reasoning: bool = False  # refuses a conversation without the reasoning of earlier answers
    openai_models: bool = False  # serves OpenAI's models, whose names decide the accepted options (``models``)
    deployment: str = ""  # its fixed name for the model, whatever the user gives

    def schema_form(self, schema: JsonObject) -> SchemaForm:
        return strict_form(schema) if self.strict_schemas else engine_form(schema)


STANDARD = Dialect()


@dataclass(frozen=True, slots=True)
class Provider:
    what: str
    base_url: str  # up to and without /chat/completions
    key: str | None = None  # the variable that holds it; None: no key needed
    port: int | None = None  # of a self-hosted server, at a host that the user gives
    schemas: Keeps = "maybe"  # whether it enforces a JSON schema; maybe: depends on the model, and is tested
    dialect: Dialect = STANDARD
    files: bool = False  # takes PDF files as parts of a message


PROVIDERS: Mapping[str, Provider] = {
    "ollama": Provider("Ollama", "http://localhost:11434/v1", port=11434),
    "llamacpp": Provider("llama.cpp's server", "http://localhost:8080/v1", port=8080),
    "lmstudio": Provider("LM Studio", "http://localhost:1234/v1", port=1234),
    "openrouter": Provider("OpenRouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", files=True),
    "groq": Provider(
        "Groq",
        "https://api.groq.com/openai/v1",
        "GROQ_API_KEY",
        dialect=Dialect(max_tokens_field="max_completion_tokens"),
    ),
    "together": Provider("Together AI", "https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "fireworks": Provider("Fireworks AI", "https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    # Refuses unknown fields, and reports usage at the end of a stream without being asked.
    "mistral": Provider(
        "Mistral",
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        dialect=Dialect(seed_field="random_seed", stream_options=False),
    ),
    # Supports JSON only without a schema, and requires its reasoning back.
    "deepseek": Provider(
        "DeepSeek",
        "https://api.deepseek.com/v1",
        "DEEPSEEK_API_KEY",
        schemas="never",
        dialect=Dialect(wants_reasoning=True),
    ),
    "gemini": Provider(
        "Google Gemini, at its OpenAI-compatible address",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        dialect=Dialect(seed_field=None),
    ),
}


def base_variable(name: str) -> str:
    """Return the variable that overrides the provider's address."""
    return f"{name.upper()}_BASE_URL"


# Served only at /v1/responses.
_RESPONSES_ONLY = re.compile(r"^o\d+-pro|^gpt-[\w.]+-pro|codex|deep-research|^computer-use")
_REASONING = re.compile(r"^(o\d|gpt-[5-9](?!\d)|codex|computer-use)")
_CHATTING = re.compile(r"-chat(-|$)")
# From 5.1 on, reasoning can be switched off; then these options are accepted.
_MAY_NOT_REASON = re.compile(r"^gpt-(5\.[1-9]|[6-9](?!\d))")


def needs_responses(model: str) -> bool:
    return _RESPONSES_ONLY.search(_bare(model)) is not None


def reasons(model: str) -> bool:
    name = _bare(model)
    return _REASONING.match(name) is not None and _CHATTING.search(name) is None


def check_options(shape: RequestShape) -> None:
    """Raise SpecError for options that the model refuses: every row would get a 400. They are not dropped silently,
    because a user who sets temperature 0 relies on it."""
    if not reasons(shape.model):
        return
    may = _MAY_NOT_REASON.match(_bare(shape.model)) is not None
    effort = mapping(shape.extra_body.get("reasoning")).get("effort")
    if may and "none" in (shape.extra_body.get("reasoning_effort"), effort):
        return
    given = {"temperature": shape.temperature, "top_p": shape.top_p, "stop": shape.stop or None}
    refused = [name for name, value in given.items() if value is not None]
    if refused:
        it = "it" if len(refused) == 1 else "them"
        way = ', or give extra_body={"reasoning_effort": "none"}' if may else ""
        raise SpecError(
            f"{shape.model} is a reasoning model and takes no {' and no '.join(refused)}: leave {it} out{way}"
        )


def _bare(model: str) -> str:
    """Return the name without the prefix and suffix of a fine-tuned model, ``ft:gpt-…:org``."""
    return model.lower().removeprefix("ft:")
