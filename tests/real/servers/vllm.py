"""vLLM on a CPU with real weights, from nothing: an environment, SmolLM2-135M-Instruct as the package's own embedded
engine fetches it, and a server that tells cached tokens, goes by priorities and calls tools.

About four minutes on two cores the first time (3 GB), one minute afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.real.servers.environment import python_of
from tests.real.servers.process import answers, free_port, running

import batch_agent
from batch_agent.backends.local import weights

HERE = Path(__file__).parent
SLOTS = 8  # requests that are computed at once
FLAGS = [
    *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
    *("--max-num-seqs", str(SLOTS), "--block-size", "32", "--enable-prompt-tokens-details"),
    *("--scheduling-policy", "priority", "--enable-request-id-headers"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--tool-strict-level", "parameter"),
    *("--chat-template", str(HERE / "tools.jinja")),
]
# The development mode tells the scheduling policy; a gigabyte of KV is a few hundred thousand tokens.
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def model_in(folder: Path, python: Path, *options: str) -> Path:
    """The model's folder, made first where it is not there."""
    model = folder / "model"
    if not (model / "config.json").exists():
        subprocess.run([python, HERE / "weights.py", weights.fetch(), model, *options], check=True)
    return model


@contextmanager
def vllm(folder: Path, *flags: str, environ: Mapping[str, str] = ENVIRON) -> Iterator[str]:
    """The address of a server that runs until the block is left."""
    python = python_of(folder / "venv", HERE / "vllm.txt")
    _name_the_package(python)
    port = free_port()
    serve = [python.parent / "vllm", "serve", model_in(folder, python), "--host", "127.0.0.1", "--port", str(port)]
    ready = answers(f"http://127.0.0.1:{port}/health")
    with running([*serve, *FLAGS, *flags], folder / "vllm.log", ready, environ):
        yield f"vllm://127.0.0.1:{port}"


def vllm_pin(folder: Path) -> AbstractContextManager[str]:
    """The same with the connector that pins, and a cache that is soon full."""
    connector = {
        "kv_connector": "PinConnector",
        "kv_connector_module_path": "batch_agent.vllm_pin",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pin_seconds": 3600},  # on a busy machine a flood of requests takes minutes
    }
    flags = ["--kv-transfer-config", json.dumps(connector), "--num-gpu-blocks-override", "80"]
    flags += ["--max-model-len", "1024", "--max-num-batched-tokens", "256"]
    source = Path(batch_agent.__file__).parents[1]
    os.environ["BATCH_AGENT_TEST_VLLM_PYTHON"] = str(folder / "venv" / "bin" / "python")
    return vllm(folder, *flags, environ={**ENVIRON, "PYTHONPATH": str(source)})


def _name_the_package(python: Path) -> None:
    """The build for CPUs is a package of another name. The command looks its version up under its own, and tells by it
    that it is on a CPU."""
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    [version] = [line.partition("==")[2] for line in (HERE / "vllm.txt").read_text().split() if "vllm-cpu" in line]
    metadata = Path(site) / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
