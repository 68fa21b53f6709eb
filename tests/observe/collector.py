"""An OTLP receiver on a real socket: what a collector would get, read with OpenTelemetry's own protobufs."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self.services: set[str] = set()
        self.url = ""

    def named(self, beginning: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(beginning)]

    def points(self, name: str) -> list[Any]:
        """The data points of the last export of a histogram."""
        found = [metric for metric in self.metrics if metric.name == name]
        return list(found[-1].histogram.data_points) if found else []

    async def take_traces(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(await _body(request)).resource_spans:
            self.services.add(attributes(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                assert scope.scope.name == "batch_agent"
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    async def take_metrics(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        for resource in ExportMetricsServiceRequest.FromString(await _body(request)).resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics.extend(scope.metrics)
        return web.Response(content_type="application/x-protobuf")


async def _body(request: web.Request) -> bytes:
    body = await request.read()
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


def attributes(holder: Any) -> dict[str, Any]:
    """Those of a span, an event, a resource or a point."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", collector.take_traces)
    app.router.add_post("/v1/metrics", collector.take_metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield collector
    finally:
        await runner.cleanup()
