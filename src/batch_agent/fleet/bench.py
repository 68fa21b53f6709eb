"""Measures the throughput of each server with different numbers of requests in flight.

All requests have the same size and share no prefix. The first wave of answers started all at once, so a step is
measured from the end of that wave to its last answer; neither its start nor its end counts. The knee is the smallest
number of requests in flight with nearly the highest throughput.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import median

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, Rejected, SpecError, Truncated
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import without_address
from batch_agent.http.transport import Transport
from batch_agent.messages import Conversation, Message, Usage

STEPS = (16, 32, 64, 128, 256)
TOKENS_IN, TOKENS_OUT = 750, 150
NEARLY = 0.9  # of the highest throughput
PAUSE_SECONDS = 0.5  # after a failure
FIRST_SECONDS = 60.0  # for the first answer
WORDS = ("time", "year", "people", "day", "thing", "life", "world", "school", "state", "family", "group", "country")


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    at: float  # seconds since the step began
    seconds: float
    usage: Usage


@dataclass(slots=True)
class Measurement:
    """The measurement of one number of requests in flight."""

    inflight: int
    answers: list[MeasuredAnswer] = field(default_factory=list)  # in the order of arrival
    failures: int = 0
    reason: str = ""  # of the last failure

    @property
    def _first(self) -> int:
        """Return the size of the first wave; 0 if too few answers came after it."""
        return self.inflight if len(self.answers) >= 2 * self.inflight else 0

    @property
    def requests_per_second(self) -> float | None:
        return self._rate(len(self.answers) - self._first)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate; None if nothing was answered, or the server does not count tokens."""
        return self._rate(sum(answer.usage.completion_tokens for answer in self.answers[self._first :]))

    def _rate(self, total: int) -> float | None:
        if not self.answers:
            return None
        seconds = self.answers[-1].at - (self.answers[self._first - 1].at if self._first else 0.0)
        return total / seconds if seconds > 0 and total else None

    @property
    def latency(self) -> float | None:
        return median(answer.seconds for answer in self.answers[self._first :]) if self.answers else None


@dataclass(slots=True)
class Bench:
    """The measurements of one endpoint so far; ``reason`` says why there are no more."""

    endpoint: AgentEndpoint
    model: str = ""
    tokens_in: int = 0  # of a prompt, as the server counts them
    steps: list[Measurement] = field(default_factory=list)
    reason: str = ""

    @property
    def knee(self) -> int | None:
        return knee({step.inflight: step.tokens_per_second or step.requests_per_second for step in self.steps})


def knee(rates: Mapping[int, float | None]) -> int | None:
    """Return the smallest number in flight with nearly the highest rate; None if nothing was measured."""
    measured = {inflight: rate for inflight, rate in rates.items() if rate}
    if not measured:
        return None
    most = max(measured.values())
    return min(inflight for inflight, rate in measured.items() if rate >= NEARLY * most)


@dataclass(frozen=True, slots=True)
class Wanted:
    steps: Sequence[int] = STEPS
    seconds: float = 20.0  # per step
    tokens_in: int = TOKENS_IN
    tokens_out: int = TOKENS_OUT
    model: str | None = None
    parallel: int = 4  # endpoints measured at a time


class Driver:
    def __init__(self, backend: Backend, endpoint: AgentEndpoint, model: str, wanted: Wanted) -> None:
        self._backend = backend
        self._endpoint = endpoint
        self._words = wanted.tokens_in
        self._seed = os.urandom(8).hex()  # prompts differ from those of an earlier bench, which may be cached
        self._tokens_in = wanted.tokens_in
        self._numbers = count()
        self._shape = RequestShape(model, max_tokens=wanted.tokens_out, extra_body={"ignore_eos": True})

    async def size(self) -> int:
        """Send one request to learn how many words make ``tokens_in``, and whether the server takes ``ignore_eos``.
        Returns the tokens of a prompt as the server counts them."""
        try:
            usage = await self.ask()
        except Rejected as error:
            if error.status not in (400, 422):
                raise
            self._shape = RequestShape(self._shape.model, max_tokens=self._shape.max_tokens)
            usage = await self.ask()
        if usage.prompt_tokens:
            self._words = max(1, round(self._words * self._tokens_in / usage.prompt_tokens))
        return round(usage.prompt_tokens * self._words / self._tokens_in)

    async def ask(self) -> Usage:
        number = next(self._numbers)
        words = Random(f"{self._seed} {number}").choices(WORDS, k=self._words)
        conversation = Conversation([Message("user", " ".join(words))])
        try:
            return (await self._backend.infer(ModelRequest(self._shape, conversation, f"bench-{number}"))).usage
        except Truncated as cut:  # intended
            return cut.usage or Usage()

    async def keep(self, inflight: int, seconds: float) -> Measurement:
        """Keep ``inflight`` requests in flight for ``seconds``, then cancel the unfinished ones."""
        step, clock = Measurement(inflight), asyncio.get_running_loop().time
        began = clock()

        async def one() -> None:
            while True:
                sent = clock()
                try:
                    usage = await self.ask()
                except BackendError as error:
                    step.failures += 1
                    step.reason = without_address(str(error), self._endpoint)
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    step.answers.append(MeasuredAnswer(clock() - began, clock() - sent, usage))

        tasks = [asyncio.create_task(one()) for _ in range(inflight)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        return step


async def bench_all(
    benches: Sequence[Bench],
    wanted: Wanted,
    *,
    stepped: Callable[[Bench], None] = lambda bench: None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Fill in the benches. ``stepped`` is called after each step, and when an endpoint fails."""
    turn = asyncio.Semaphore(wanted.parallel)

    async def bench(one: Bench) -> None:
        async with turn:
            try:
                await _bench(one, wanted, stepped, environ)
            except (BackendError, SpecError) as error:
                one.reason = without_address(str(error), one.endpoint)
            except TimeoutError:
                one.reason = f"no request was answered within {FIRST_SECONDS:g} s"
            if one.reason:
                stepped(one)

    await asyncio.gather(*map(bench, benches))


async def _bench(bench: Bench, wanted: Wanted, stepped: Callable[[Bench], None], environ: Mapping[str, str]) -> None:
    inside = bench.endpoint.scheme != "https"
    backend, _ = open_backend(
        bench.endpoint.address, model=None, api_key=None, environ=environ, transport=Transport(proxies=not inside)
    )
    async with backend:
        async with asyncio.timeout(FIRST_SECONDS):
            bench.model = wanted.model or bench.endpoint.tags.get("model") or next(iter(await backend.models()), "")
            driver = Driver(backend, bench.endpoint, bench.model, wanted)
            bench.tokens_in = await driver.size()
        for inflight in wanted.steps:
            step = await driver.keep(inflight, wanted.seconds)
            if len(step.answers) < inflight:  # less than one wave: more requests in flight would not help
                bench.reason = (
                    f"{len(step.answers):,} answers in {wanted.seconds:g} s are too few for {inflight} in flight"
                )
                if step.failures:
                    bench.reason += f"; the last of {step.failures:,} failures: {step.reason}"
                return
            bench.steps.append(step)
            stepped(bench)
