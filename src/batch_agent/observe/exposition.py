"""Writes Prometheus text, version 0.0.4: counters, gauges and histograms, and the page with them. Serves that page.

Each family has at most ``MOST_SERIES`` combinations of labels. Further ones are counted under the label value
``other``: names of models and tools come from outside and must not fill a time-series database.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import TYPE_CHECKING, Literal, Self

from batch_agent.errors import SpecError, about

if TYPE_CHECKING:
    from aiohttp import web

    from batch_agent.door import RequestRefused


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_SERIES = 100
OTHER = "other"
MOST_LABEL_CHARACTERS = 200
# Seconds: from a cached answer to a batch of an hour.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)

Labels = tuple[str, ...]


class Family:
    """One metric: its name, help text and label names."""

    kind: Literal["counter", "gauge", "histogram"]

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Yield each line's name suffix, its labels as written, and its value."""
        raise NotImplementedError


class Values(Family):
    """A family with one number for each combination of labels."""

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        super().__init__(name, text, labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for labels, value in self.values.items():
            yield "", written(self.labels, labels), value

    def _key(self, labels: Labels) -> Labels:
        if labels in self.values or len(self.values) < MOST_SERIES:
            return labels
        return (OTHER,) * len(labels)


class Counter(Values):
    """A number that only grows. Its name ends in ``_total``."""

    kind = "counter"

    def add(self, amount: float = 1.0, *labels: str) -> Self:
        if labels in self.values:
            self.values[labels] += amount
        else:
            key = self._key(labels)
            self.values[key] = self.values.get(key, 0.0) + amount
        return self


class Gauge(Values):
    kind = "gauge"

    def set(self, value: float, *labels: str) -> Self:
        self.values[self._key(labels)] = value
        return self


class Series:
    """The values of a histogram with the same labels: how many are in each bucket, their sum, and the extremes."""

    __slots__ = ("counts", "highest", "lowest", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0
        self.lowest = inf
        self.highest = -inf

    def add(self, values: Sequence[float], bounds: Sequence[float]) -> None:
        for value in values:
            self.counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)
        self.lowest = min(self.lowest, *values)
        self.highest = max(self.highest, *values)


class Histogram(Family):
    """Values by their size, usually seconds. ``bounds`` are the upper bounds of its buckets, below infinity."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Labels = (), bounds: Sequence[float] = SECONDS) -> None:
        super().__init__(name, text, labels)
        self.bounds = bounds
        self.series: dict[Labels, Series] = {}
        if not labels:
            self.series[()] = Series(len(bounds) + 1)

    def observe(self, value: float, *labels: str) -> None:
        self.observe_all((value,), *labels)

    def observe_all(self, values: Sequence[float], *labels: str) -> None:
        if not values:
            return
        series = self.series.get(labels)
        if series is None:
            if len(self.series) >= MOST_SERIES:
                labels = (OTHER,) * len(labels)
            series = self.series.setdefault(labels, Series(len(self.bounds) + 1))
        series.add(values, self.bounds)

    def samples(self) -> Iterator[tuple[str, str, float]]:
        bounds = [*map(_number, self.bounds), "+Inf"]
        for labels, series in self.series.items():
            count = 0
            for bound, here in zip(bounds, series.counts, strict=True):
                count += here
                yield "_bucket", written((*self.labels, "le"), (*labels, bound)), count
            yield "_sum", written(self.labels, labels), series.sum
            yield "_count", written(self.labels, labels), count


def page(families: Iterable[Family]) -> str:
    """Return the text for a scrape. A family without samples is left out."""
    lines: list[str] = []
    for family in families:
        samples = [f"{family.name}{suffix}{labels} {_number(value)}" for suffix, labels, value in family.samples()]
        if samples:
            text = family.text.replace("\\", "\\\\").replace("\n", "\\n")
            lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}", *samples]
    return "\n".join(lines) + "\n"


def written(names: Labels, values: Labels) -> str:
    """Return labels as written in a sample."""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{','.join(pairs)}}}" if names else ""


def _escaped(value: str) -> str:
    value = value[:MOST_LABEL_CHARACTERS].encode(errors="replace").decode()
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(float(value))


LOOPBACK = "127.0.0.1"
MOST_PORT = 65535


def read_place(value: int | str) -> tuple[str, int]:
    """Return host and port of ``metrics_port``. Raises SpecError."""
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or int(port) > MOST_PORT or (isinstance(value, str) and ":" in value and not host):
        raise SpecError(f"metrics_port: must be a port from 0 to {MOST_PORT}, or HOST:PORT (got {value!r})")
    return host.strip("[]") or LOOPBACK, int(port)


@asynccontextmanager
async def serve_metrics(place: int | str, page: Callable[[], str]) -> AsyncIterator[str]:
    """Serve the page while entered; yields the URL. Raises SpecError if the port is in use."""
    from batch_agent.door import Door, routes  # it imports aiohttp, which only a run with metrics needs

    async def metrics(request: web.BaseRequest) -> web.Response:
        return metrics_response(page())

    host, port = read_place(place)
    door = Door(routes({"/metrics": {"GET": metrics}}), _refused, host=host, port=port)
    with about("metrics_port: "):
        await door.__aenter__()
    try:
        yield f"{door.url}/metrics"
    finally:
        await door.__aexit__()


def metrics_response(text: str) -> web.Response:
    from aiohttp import web

    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _refused(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    from aiohttp import web

    return web.Response(status=refused.status, text=f"{refused}\n")
