"""NVIDIA Dynamo's frontend with simulated workers (mockers), from nothing: routing, prefix caches, sessions and hints
are real, forward passes are not. A mocker says random tokens up to ``max_tokens``.

Each worker is a process of its own, so that one can be killed; their ids are in ``$BATCH_AGENT_TEST_DYNAMO_WORKERS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.real.servers.environment import python_of
from tests.real.servers.process import answers, free_port, running
from tests.real.servers.vllm import model_in

HERE = Path(__file__).parent
WORKERS = 3
FRONTEND = [
    *("--http-host", "127.0.0.1", "--router-mode", "kv", "--enable-anthropic-api", "--migration-limit", "3"),
    *("--router-session-affinity-ttl-secs", "600", "--enable-streaming-tool-dispatch"),
]
MOCKER = [
    *("--model-name", "smollm2", "--num-workers", "1", "--block-size", "16", "--num-gpu-blocks-override", "4096"),
    *("--speedup-ratio", "1.0", "--max-num-seqs", "64"),
]


@contextmanager
def dynamo(folder: Path) -> Iterator[str]:
    """The address of a frontend that runs until the block is left."""
    python = python_of(folder / "venv", HERE / "dynamo.txt")
    model = model_in(folder, python, "--tokenizer")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory() as registry, ExitStack() as processes:
        environ = {
            "DYN_FILE_KV": registry,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "HF_HUB_OFFLINE": "1",
        }
        frontend = [python, "-m", "dynamo.frontend", "--http-port", str(port), *FRONTEND]
        processes.enter_context(running(frontend, folder / "frontend.log", answers(f"{url}/health"), environ))
        mocker = [python, "-m", "dynamo.mocker", "--model-path", model, *MOCKER]
        workers = []
        for number in range(WORKERS):
            log = folder / f"worker-{number}.log"
            workers.append(processes.enter_context(running(mocker, log, _has(url, number + 1), environ)))
        os.environ["BATCH_AGENT_TEST_DYNAMO_WORKERS"] = ",".join(str(worker.pid) for worker in workers)
        yield f"dynamo://127.0.0.1:{port}"


def _has(url: str, workers: int) -> Callable[[], bool]:
    """The frontend is healthy without a worker, and lists those that it has."""
    return answers(f"{url}/health", lambda said: said.count(b'"endpoint":"generate"') >= workers)
