"""Probes many servers at once, with a limited number of sockets: state, models, load."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Self

from batch_agent.backends.base import Load, Probe
from batch_agent.backends.engines import dynamo, sglang, vllm
from batch_agent.backends.engines.engine import Exposition
from batch_agent.backends.http.backend import PROBE_SECONDS, Entries, HttpClient, probe_models
from batch_agent.backends.schemes import KEY_VARIABLE
from batch_agent.errors import BackendError, SpecError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.http.transport import Transport

MOST_SOCKETS = 1024
OTHER_FILES = 100  # open files of this process reserved for other uses

RUNNING = (vllm.RUNNING, sglang.RUNNING)
WAITING = (vllm.WAITING, sglang.WAITING, dynamo.PENDING)
KV_USAGE = (*vllm.KV_USAGE, sglang.USAGE)
QUERIES = (*vllm.QUERIES, sglang.PROMPT, dynamo.PROMPT)
HITS = (*vllm.HITS, sglang.CACHED, dynamo.CACHED)
GENERATED = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "dynamo_frontend_output_sequence_tokens_sum",
)
# Metric, label and label values of errors: of the web framework of vLLM and SGLang, of vLLM's engine, of Dynamo's
# frontend.
ERRORS = (
    ("http_requests_total", "status", ("5xx", "500", "502", "503", "504")),
    ("vllm:request_success_total", "finished_reason", ("error",)),
    ("dynamo_frontend_requests_total", "status", ("error",)),
)
NAMES = frozenset(
    [*RUNNING, dynamo.INFLIGHT, *WAITING, *KV_USAGE, *QUERIES, *HITS, *GENERATED, *(name for name, *_ in ERRORS)]
)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds between two probes of one endpoint
PROBES_PER_SECOND = 500  # at most: in a large fleet each is probed less often
SETTLE_SECONDS = 1.0  # for running probes once enough are up, so that other servers that are up count too


@dataclass(frozen=True, slots=True)
class Look:
    """The state of one endpoint at one time. ``reason``: why it is not up."""

    endpoint: AgentEndpoint
    up: bool
    models: tuple[str, ...] = ()
    told: Told | None = None
    at: float = 0.0  # when ``told`` was read
    tokens_per_second: float | None = None
    reason: str = ""


class Prober:
    """Probes servers with the key of the environment. Enter it before use."""

    def __init__(self, *, environ: Mapping[str, str] = os.environ) -> None:
        self._api_key = (environ.get(KEY_VARIABLE) or "").strip() or None
        sockets = most_sockets()
        self._inside = Transport(proxies=False, connections=sockets)
        self._outside = Transport(connections=sockets)
        self._turns = asyncio.Semaphore(sockets)
        self._entered = AsyncExitStack()
        self._clients: dict[str, HttpClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._clients.clear()
        await self._entered.aclose()

    async def probe(self, endpoint: AgentEndpoint) -> tuple[Probe, Entries]:
        """Return whether the server is up, and its list of models. The reason omits the endpoint's address."""
        async with self._turns:
            return await self._probe(endpoint)

    async def look(self, endpoint: AgentEndpoint) -> Look:
        """Return the endpoint's state, with what it reports at ``/metrics``."""
        async with self._turns:
            probe, _ = await self._probe(endpoint)
            if probe.state == "down":
                return Look(endpoint, up=False, reason=probe.reason)
            told, at = await self._told(endpoint), asyncio.get_running_loop().time()
        return Look(endpoint, up=True, models=probe.models or (), told=told, at=at)

    async def look_at_all(self, endpoints: Iterable[AgentEndpoint]) -> list[Look]:
        return list(await asyncio.gather(*map(self.look, endpoints)))

    async def _probe(self, endpoint: AgentEndpoint) -> tuple[Probe, Entries]:
        try:
            probe, entries = await probe_models(await self._client(endpoint))
        except SpecError as error:  # an unusable proxy in the environment
            return Probe("down", str(error)), {}
        return replace(probe, reason=without_address(probe.reason, endpoint)), entries

    async def _told(self, endpoint: AgentEndpoint) -> Told | None:
        client = await self._client(endpoint)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                text = await client.send(client.route("GET", "/metrics", beside=True)) or b""
        except (BackendError, TimeoutError):  # a server without metrics
            return None
        return read_told(text.decode("utf-8", "replace"))

    async def _client(self, endpoint: AgentEndpoint) -> HttpClient:
        client = self._clients.get(endpoint.api)
        if client is None:
            transport = self._outside if endpoint.scheme == "https" else self._inside
            client = self._clients[endpoint.api] = HttpClient(endpoint.api, api_key=self._api_key, transport=transport)
            await self._entered.enter_async_context(client)
        return client


def without_address(words: str, endpoint: AgentEndpoint) -> str:
    """Return an error's message without the endpoint's address, for a line that starts with it."""
    return re.sub(rf"\b(GET|POST) {re.escape(endpoint.url)}", "", words).strip()


def most_sockets() -> int:
    """Return how many sockets probes may use: the limit of this process, minus what else it needs."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_SOCKETS // 2
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_SOCKETS if soft < 0 else max(16, min(MOST_SOCKETS, soft - OTHER_FILES))


def with_rates(looks: Iterable[Look], earlier: Mapping[AgentEndpoint, Look]) -> list[Look]:
    """Return the looks, with tokens per second added to those that have an earlier look."""
    rated = []
    for look in looks:
        before = earlier.get(look.endpoint)
        if look.told is not None and before is not None and before.told is not None:
            rate = tokens_per_second(before.told, look.told, look.at - before.at)
            look = replace(look, tokens_per_second=rate)
        rated.append(look)
    return rated


@dataclass(frozen=True, slots=True)
class Told:
    """The numbers that an engine reports; None for those that it does not report. Tokens and errors count from the
    server's start."""

    load: Load
    generated_tokens: int | None = None
    errors: int | None = None

    @property
    def prefix_hit_rate(self) -> float | None:
        queries, hits = self.load.prefix_queries, self.load.prefix_hits
        return None if not queries or hits is None else min(1.0, hits / queries)


def read_told(text: str) -> Told | None:
    """Return what the text of ``/metrics`` reports; None if it is not from an engine."""
    metrics = Exposition(text, NAMES)
    running = metrics.count(*RUNNING)
    waiting = metrics.count(*WAITING) or 0
    if running is None:
        inflight = metrics.count(dynamo.INFLIGHT)
        if inflight is None:
            return None
        running = max(0, inflight - waiting)
    load = Load(
        running=running,
        waiting=waiting,
        kv_usage=metrics.mean(*KV_USAGE),
        prefix_queries=metrics.count(*QUERIES),
        prefix_hits=metrics.count(*HITS),
    )
    return Told(load, metrics.count(*GENERATED), _errors(metrics))


def _errors(metrics: Exposition) -> int | None:
    """Return the number of answers with a server error."""
    for name, label, wrong in ERRORS:
        if samples := metrics.samples(name):
            return int(sum(sample.value for sample in samples if sample.labels.get(label) in wrong))
    return None


def tokens_per_second(before: Told, after: Told, seconds: float) -> float | None:
    """Return the rate between two readings; None if the server does not count, or was restarted in between."""
    first, second = before.generated_tokens, after.generated_tokens
    if first is None or second is None or second < first or seconds <= 0:
        return None
    return (second - first) / seconds


@dataclass(slots=True)
class Waited:
    """Which endpoints are up, by position in the list: an endpoint may be listed twice."""

    endpoints: Sequence[AgentEndpoint]
    needed: int
    up: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)  # why others are not up, once probed

    @property
    def enough(self) -> bool:
        return len(self.up) >= self.needed

    @property
    def asked(self) -> bool:
        """Return whether every endpoint was probed at least once."""
        return len(self.up) + len(self.reasons) == len(self.endpoints)

    @property
    def ready(self) -> list[AgentEndpoint]:
        return [self.endpoints[place] for place in sorted(self.up)]

    @property
    def missing(self) -> list[tuple[AgentEndpoint, str]]:
        return [
            (endpoint, self.reasons.get(place, "it has not answered yet"))
            for place, endpoint in enumerate(self.endpoints)
            if place not in self.up
        ]


def needed(total: int, min_hosts: int | None = None, min_fraction: float | None = None) -> int:
    """Return how many of ``total`` endpoints must be up; all of them by default. Raises SpecError if that is
    impossible."""
    if not total:
        raise SpecError("there is no endpoint to wait for: the hostfile lists none")
    if min_hosts is not None and min_hosts > total:
        raise SpecError(f"{min_hosts} endpoints can never be up: the hostfile lists {total}")
    if min_hosts is None and min_fraction is None:
        return total
    part = 1 if min_fraction is None else math.ceil(min_fraction * total - 1e-9)
    return max(1, min_hosts or 1, part)


async def wait_until_ready(
    waited: Waited, prober: Prober, timeout: float, changed: Callable[[Waited], None] = lambda waited: None
) -> None:
    """Wait until enough endpoints are up, or until the time is over. ``waited`` is kept up to date and passed to
    ``changed``."""
    news = asyncio.Event()

    async def watch(place: int) -> None:
        endpoint, pause = waited.endpoints[place], FIRST_PAUSE
        while True:
            probe, _ = await prober.probe(endpoint)
            news.set()
            if probe.state == "up":
                waited.reasons.pop(place, None)
                waited.up.add(place)
                return
            waited.reasons[place] = probe.reason
            await asyncio.sleep(pause)
            pause = min(2 * pause, max(LONGEST_PAUSE, len(waited.endpoints) / PROBES_PER_SECOND))

    async def until(done: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    await news.wait()
                    news.clear()
                    changed(waited)

    tasks = [asyncio.create_task(watch(place)) for place in range(len(waited.endpoints))]
    try:
        await until(lambda: waited.enough, timeout)
        if waited.enough:
            await until(lambda: waited.asked, SETTLE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
