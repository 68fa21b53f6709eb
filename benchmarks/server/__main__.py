"""``python -m benchmarks.server``: what the server can do, to show that it is not the bottleneck."""

from __future__ import annotations

from benchmarks.server.capacity import CONNECTIONS, capacity

for name, answers in capacity(seconds=2.0).items():
    print(f"{name:<16} {answers:>10,.0f} answers/s  ({CONNECTIONS} connections, no latency)")
