"""``python -m tests.real vllm`` (``vllm-pin``, ``dynamo``, ``agents``, ``llamacpp``): set the real thing up from
nothing, run its suite, stop it.

What is installed stays in ``--folder``. With ``--serve`` the server is started and its address printed, for whoever
wants to look for themselves; it runs until it is interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tests.real.servers.agents import agents
from tests.real.servers.dynamo import dynamo
from tests.real.servers.llamacpp import llamacpp
from tests.real.servers.vllm import vllm, vllm_pin

from batch_agent.backends.cache_store import cache_dir

SUITES = {
    "vllm": ("test_vllm.py", "test_anthropic_wire.py", "test_vllm_fleet.py"),
    "vllm-pin": ("test_vllm_pin.py",),
    "dynamo": ("test_dynamo.py",),
    "agents": ("test_agents.py",),
    "llamacpp": ("test_llamacpp.py",),
}
SERVERS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "vllm": vllm,
    "vllm-pin": vllm_pin,
    "dynamo": dynamo,
    "agents": agents,
    "llamacpp": llamacpp,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.real", description="A real server, and its suite.")
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "test-servers", help="where servers are installed")
    parser.add_argument("--serve", action="store_true", help="start the server and wait")
    options, pytest = parser.parse_known_args()
    folder = options.folder.resolve() / options.server.partition("-")[0]  # what is installed is the same
    folder.mkdir(parents=True, exist_ok=True)
    with SERVERS[options.server](folder) as url:
        print(f"{options.server} is at {url}", flush=True)
        if options.serve:
            ends = {signal.SIGINT, signal.SIGTERM}
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)
            return 0
        suites = [Path(__file__).parent / suite for suite in SUITES[options.server]]
        environ = os.environ | {f"BATCH_AGENT_TEST_{options.server.upper().replace('-', '_')}": url}
        return subprocess.run([sys.executable, "-m", "pytest", *suites, "-v", *pytest], env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
