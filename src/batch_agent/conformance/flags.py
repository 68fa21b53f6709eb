"""The flags that make an engine do what it lacks, by kind of engine, and how an unknown server is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from batch_agent.backends.engines.engine import at
from batch_agent.conformance.subject import Subject, json_object

FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "key": "--api-key KEY",
            "tools": "--enable-auto-tool-choice --tool-call-parser NAME",
            "arguments": "--tool-strict-level parameter",
            "cached": "--enable-prompt-tokens-details",
            "cache": "start it without --no-enable-prefix-caching",
            "priority": "--scheduling-policy priority, and ?priority=true behind the address",
            "load": "start it without --disable-log-stats",
            "reasoning": "--reasoning-parser NAME",
            "concurrency": "--max-num-seqs N",
            "embeddings": "a server of its own, with an embedding model",
            "whitespace": "--structured-outputs-config '{\"disable_any_whitespace\": true}'",
        },
        "sglang": {
            "key": "--api-key KEY",
            "tools": "--tool-call-parser NAME",
            "arguments": "--tool-call-parser NAME, and --grammar-backend xgrammar",
            "cached": "--enable-cache-report",
            "cache": "start it without --disable-radix-cache",
            "priority": "--enable-priority-scheduling",
            "load": "--enable-metrics",
            "reasoning": "--reasoning-parser NAME",
            "concurrency": "--max-running-requests N",
            "embeddings": "a server of its own, with --is-embedding",
            "seed": "--enable-deterministic-inference",
            "whitespace": "--constrained-json-disable-any-whitespace",
        },
        "llamacpp": {
            "key": "--api-key KEY",
            "tools": "--jinja",
            "load": "--metrics",
            "reasoning": "--jinja --reasoning-format deepseek",
            "concurrency": "--parallel N, with --ctx-size N times the context of one request",
            "embeddings": "--embeddings, in a server of its own",
        },
        "ollama": {
            "key": "a proxy in front of it: it has no keys",
            "tools": "a model whose template has tools (ollama show MODEL)",
            "overflow": "OLLAMA_CONTEXT_LENGTH=N, and model_max_context=N in the run",
            "concurrency": "OLLAMA_NUM_PARALLEL=N",
            "embeddings": "an embedding model, such as nomic-embed-text",
        },
    }
)
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "ollama": "Ollama", "dynamo": "Dynamo"}


def flag(subject: Subject, name: str) -> str:
    """Return the flag of this engine, or ""."""
    return FLAGS.get(subject.engine, {}).get(name, "")


async def identify(subject: Subject) -> None:
    """Find the kind and the version of the server, from pages that cost nothing."""
    scheme = subject.backend.name.partition("://")[0]
    subject.engine = scheme if scheme in NAMES else ""
    pages = (
        ("ollama", "/api/version", ("version",)),
        ("sglang", "/server_info", ("version",)),
        ("llamacpp", "/props", ("build_info",)),
        ("vllm", "/version", ("version",)),
    )
    for engine, page, path in pages:
        if subject.engine not in ("", engine):
            continue
        told = at(json_object(await subject.get(page, beside=True)), *path)
        if isinstance(told, str) and told:
            subject.engine, subject.version = engine, told
            return


def engine_name(subject: Subject) -> str:
    name = NAMES.get(subject.engine) or subject.backend.name.partition("://")[0]
    return f"{name} {subject.version}" if subject.version else f"{name}, version unknown"
