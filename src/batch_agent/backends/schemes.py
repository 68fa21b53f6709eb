"""The table of backends by URL scheme, as data. A new backend is one line here.

The registry opens the named one. Error messages, ``doctor`` and the tables of the documentation (``docs/tables.py``)
are generated from these lines. What each can do is in its ``Capabilities``, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batch_agent.backends.openai.providers import PROVIDERS as NAMED

KEY_VARIABLE = "BATCH_AGENT_API_KEY"
HTTP_OPTIONS = ("native_schema",)
ENGINE_OPTIONS = ("native_schema", "tls")
API = ("api",)  # option of servers with both of OpenAI's APIs


@dataclass(frozen=True, slots=True)
class Scheme:
    name: str
    factory: str  # import path of its Callable[[Address], Backend], imported only when used
    form: str  # as users write it
    what: str  # short description
    key: str = ""  # the variable that holds its key
    options: tuple[str, ...] = ()  # query options that are true or false
    texts: tuple[str, ...] = ()  # query options with other values
    own: bool = False  # a self-hosted engine
    provider: bool = False  # may precede a model's name: openai/gpt-4o
    listed: bool = True  # listed in messages about allowed backends
    in_process: bool = False  # each backend is a server of its own, which no other backend shares

    @property
    def is_service(self) -> bool:
        """Whether the backend has a fixed address and needs only a key."""
        return bool(self.key) and self.form == f"{self.name}://"


_SERVERS = "batch_agent.backends.openai.servers"
_LINES = (
    Scheme(
        "local",
        "batch_agent.backends.local:from_address",
        "local://",
        "the embedded engine, on this machine's CPU; `local://qwen2.5-0.5b` for a model that can judge, "
        "`local://path/to/model.gguf` for your own weights",
        texts=("threads", "kv_gb", "max_seqs", "keep"),
        own=True,
        in_process=True,
    ),
    Scheme(
        "vllm",
        "batch_agent.backends.engines.vllm:VllmBackend",
        "vllm://host:8000",
        "vLLM",
        KEY_VARIABLE,
        ("priority", *ENGINE_OPTIONS),
        texts=("cache_salt",),
        own=True,
    ),
    Scheme(
        "sglang",
        "batch_agent.backends.engines.sglang:SglangBackend",
        "sglang://host:30000",
        "SGLang",
        KEY_VARIABLE,
        ("priority", *ENGINE_OPTIONS),
        texts=("extra_key",),
        own=True,
    ),
    Scheme(
        "dynamo",
        "batch_agent.backends.engines.dynamo:DynamoBackend",
        "dynamo://host:8000",
        "NVIDIA Dynamo's frontend",
        KEY_VARIABLE,
        ENGINE_OPTIONS,
        texts=("cache_salt",),
        own=True,
    ),
    Scheme("openai", f"{_SERVERS}:openai", "openai://", "OpenAI", "OPENAI_API_KEY", ENGINE_OPTIONS, API, provider=True),
    Scheme(
        "azure",
        f"{_SERVERS}:azure",
        "azure://resource/deployment",
        "OpenAI's models on Azure",
        "AZURE_OPENAI_API_KEY",
        HTTP_OPTIONS,
        API,
        listed=False,
    ),
    *(
        Scheme(
            name,
            f"{_SERVERS}:provider",
            f"{name}://" if known.port is None else f"{name}://host:{known.port}",
            known.what,
            known.key or KEY_VARIABLE,
            ENGINE_OPTIONS,
            API,
            own=known.port is not None,
            provider=True,
            listed=False,
        )
        for name, known in NAMED.items()
    ),
    Scheme(
        "anthropic",
        "batch_agent.backends.anthropic.messages:from_address",
        "anthropic://",
        "Anthropic; `anthropic://host:8000` for a server of your own that speaks its wire",
        "ANTHROPIC_API_KEY",
        ENGINE_OPTIONS,
        ("version",),
        provider=True,
    ),
    Scheme(
        "bedrock",
        "batch_agent.backends.bedrock.converse:from_address",
        "bedrock://region/model",
        "AWS Bedrock, with the credentials that boto3 finds (needs the package boto3)",
        options=("native_schema",),
        texts=("endpoint_url",),
        provider=True,
    ),
    Scheme(
        "openai-batch",
        f"{_SERVERS}:openai_batch",
        "openai-batch://",
        "OpenAI's batch API: half the price, within a day",
        "OPENAI_API_KEY",
        ENGINE_OPTIONS,
        ("gather", "look"),
        listed=False,
    ),
    Scheme(
        "anthropic-batch",
        "batch_agent.backends.anthropic.messages:batch_from_address",
        "anthropic-batch://",
        "Anthropic's batch API: half the price, within a day",
        "ANTHROPIC_API_KEY",
        ENGINE_OPTIONS,
        ("gather", "look", "version"),
        listed=False,
    ),
    Scheme(
        "http",
        f"{_SERVERS}:http",
        "http://host:port/v1",
        "any server that speaks OpenAI's dialect",
        KEY_VARIABLE,
        HTTP_OPTIONS,
        API,
    ),
    Scheme("https", f"{_SERVERS}:http", "https://host/v1", "the same, over TLS", KEY_VARIABLE, HTTP_OPTIONS, API),
    Scheme(
        "fleet",
        "batch_agent.fleet.backend:from_address",
        "fleet://hosts.txt",
        "many servers as one: the endpoints of a hostfile, `fleet://hosts.txt?role=worker` for some of them",
        KEY_VARIABLE,
    ),
    Scheme(
        "models",
        "batch_agent.serve.models:from_address",
        "models://?NAME=vllm://host:8000",
        "several models, each with the URL of its backend (`serve`)",
        listed=False,
        in_process=True,
    ),
    Scheme(
        "simulated",
        "batch_agent.backends.simulated:from_address",
        "simulated://",
        "a model of an engine, for planning: `batch-agent simulate --help` has its options",
        listed=False,
        in_process=True,
    ),
)
SCHEMES: Mapping[str, Scheme] = {line.name: line for line in _LINES}
# How the names of models begin, and the provider that makes them.
MAKERS: Mapping[str, str] = {
    **dict.fromkeys(("gpt-", "o1", "o3", "o4", "chatgpt-"), "openai"),
    **{"claude-": "anthropic", "gemini-": "gemini", "deepseek-": "deepseek"},
    **dict.fromkeys(("mistral-", "magistral-", "codestral-", "ministral-"), "mistral"),
}
PROVIDERS: Mapping[str, str] = {line.name: f"{line.name}://" for line in _LINES if line.provider}


def _or(forms: list[str]) -> str:
    return f"{', '.join(forms[:-1])}, or {forms[-1]}"


FORMS = _or([line.form for line in _LINES if line.listed])
OWN_FORMS = _or([line.form for line in _LINES if line.listed and not line.is_service and line.name != "local"])
