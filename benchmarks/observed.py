"""What it costs to be watched: CPU per turn of a run with page, Prometheus and OpenTelemetry, over that of one without.

``python -m benchmarks.observed``. Needs the extra ``otel``. The work, the server and the way of comparing are those of
``throughput``. A collector in another process takes what is exported; the page for Prometheus is read once a second.
The page needs a run directory, so the run with it is compared with a recorded one. With ``always_on`` every row is
exported: that is not the default, and has no bar.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from benchmarks import report
from benchmarks.server import Server, serving
from benchmarks.throughput import OURS, RECORDED, Cell, Contender, Costs, cpu_ratio, median, run_once

BAR = 1.15
CELLS = (Cell(10_000, 1), Cell(5_000, 2))
OBSERVED = Contender("batch_agent, observed", "benchmarks.contenders.ours_observed")
BOTH, ALL = "prometheus and opentelemetry", "page, prometheus and opentelemetry"
# What each is given by the environment, beside the collector and the port.
CASES: Mapping[str, Mapping[str, str]] = {
    "prometheus": {"OBSERVED": "prometheus"},
    "opentelemetry": {"OBSERVED": "opentelemetry"},
    BOTH: {"OBSERVED": "prometheus opentelemetry"},
    ALL: {"OBSERVED": "page prometheus opentelemetry"},
    "both, every row exported": {"OBSERVED": "prometheus opentelemetry", "OTEL_TRACES_SAMPLER": "always_on"},
}
COLLECTOR = """
import http.server, sys
class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def collector() -> Iterator[str]:
    """The address of a process that takes whatever is exported."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def scraping(port: int) -> Iterator[list[int]]:
    """Read the page once a second; the sizes of those that were there."""
    over, sizes = threading.Event(), list[int]()

    def scrape() -> None:
        while not over.wait(1.0):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1) as page:
                sizes.append(len(page.read()))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def measure(cell: Cell, repetitions: int, server: Server, endpoint: str) -> Costs:
    unwatched = {contender.name: contender for contender in (OURS, RECORDED)}
    costs: Costs = {name: [] for name in (*unwatched, *CASES)}
    for _ in range(repetitions):
        for name in costs:
            port = free_port()
            os.environ |= {"METRICS_PORT": str(port), **CASES.get(name, {})}
            if "opentelemetry" in CASES.get(name, {}).get("OBSERVED", ""):
                os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
            with scraping(port):
                cost = run_once(unwatched.get(name, OBSERVED), cell, server, limit=300.0)
            for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OBSERVED"):
                os.environ.pop(variable, None)
            assert cost is not None
            costs[name].append(cost)
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observed", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    env = report.environment()
    bars: list[report.Bar] = []
    measurements: list[object] = []
    with serving() as server, collector() as endpoint:
        for cell in CELLS:
            costs = measure(cell, options.repetitions, server, endpoint)
            ratios = {
                name: cpu_ratio(its, costs[RECORDED.name if name == ALL else OURS.name]) for name, its in costs.items()
            }
            print(f"\n{cell.name}")
            rows = [
                (name, f"{median(its).cpu_per_turn * 1e6:,.0f}", f"{ratios[name]:.3f}") for name, its in costs.items()
            ]
            print(report.table(("", "µs CPU/turn", "over unwatched"), rows))
            bars += [
                report.Bar(f"CPU per turn, {name}/unwatched: {cell.name}", ratios[name], "<=", BAR)
                for name in (BOTH, ALL)
            ]
            spreads = {name: report.spread([cost.cpu_per_turn for cost in its]) for name, its in costs.items()}
            measurements.append({"work": cell.name, "cpu_per_turn_s": spreads})
    print()
    return report.finish("observed", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
