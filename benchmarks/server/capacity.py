"""What the server can do: answers per second without latency, asked by a client in C (``load.c``)."""

from __future__ import annotations

import subprocess

import orjson

from benchmarks.server import compiled, serving
from benchmarks.workload import first_body

CONNECTIONS = 64


def capacity(seconds: float) -> dict[str, float]:
    """Answers per second of each kind of request."""
    kinds = {"one answer": (False, False), "tool call": (True, False), "streamed": (False, True)}
    with serving(latency=0) as server, compiled("load") as load:
        rates = {}
        for name, (tools, stream) in kinds.items():
            body = orjson.dumps(first_body(record=7, tools=tools, stream=stream))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
            command = [str(load), str(server.port), str(CONNECTIONS), str(seconds)]
            done = subprocess.run(command, input=head.encode() + body, capture_output=True, check=True)
            rates[name] = float(done.stdout)
    return rates
