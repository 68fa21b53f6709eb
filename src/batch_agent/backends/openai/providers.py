"""Providers and servers that speak ``/chat/completions``, by name, as data: where they are, where their key is, what
they take. ``servers`` makes a backend of one.

A name is a scheme (``groq://``) and may stand before a model's (``groq/llama-3.3-70b-versatile``). Where one is can be
said otherwise: by a host in the URL, or by the variable ``NAME_BASE_URL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batch_agent.backends.openai.dialect import STANDARD, Dialect

Keeps = Literal["always", "maybe", "never"]


@dataclass(frozen=True, slots=True)
class Provider:
    what: str  # for people
    base_url: str  # up to and without /chat/completions
    key: str | None = None  # the variable that holds it; None: it needs none
    port: int | None = None  # of a server that people run themselves, at a host they name
    schemas: Keeps = "maybe"  # whether it keeps to a JSON schema; maybe: it depends on the model, and is found out
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
    # Refuses every field that it does not know, and tells usage at the end of a stream without being asked.
    "mistral": Provider(
        "Mistral",
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        dialect=Dialect(seed_field="random_seed", stream_options=False),
    ),
    # Has JSON without a schema alone, and refuses to go on without the reasoning that it gave.
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
    """Where the provider is, if not where everybody finds it."""
    return f"{name.upper()}_BASE_URL"
