"""Anthropic's batch API: one HTTP request with all model requests creates a job; its results are lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

import orjson

from batch_agent.backends.anthropic.answer import PAUSED
from batch_agent.backends.batch.jobs import Answer, JobService, State, Wave
from batch_agent.backends.http.backend import HttpClient
from batch_agent.backends.http.wire import mapping
from batch_agent.errors import Unavailable
from batch_agent.messages import JsonObject


class AnthropicJobs(JobService):
    most_requests, most_bytes = 100_000, 245_000_000  # of 256 MB, minus room for the fields around a body
    names_jobs = False

    def __init__(self, http: HttpClient) -> None:
        super().__init__(http, "/messages/batches")

    async def submit(self, bodies: Mapping[str, bytes], wave: str) -> str:
        requests = b",".join(b'{"custom_id":"%b","params":%b}' % (own.encode(), body) for own, body in bodies.items())
        return self.id_of(await self.ask(self.batches, b'{"requests":[%b]}' % requests))

    async def candidates(self, wave: Wave) -> list[str]:
        """Return jobs with as many requests: a job lists their ids only when it has ended."""
        jobs = self.listed("limit=1000", "after_id", wave.since)
        return [str(job.get("id")) async for job in jobs if _count(job) in (None, len(wave.requests))]

    def made_at(self, job: JsonObject) -> float | None:
        made = job.get("created_at")
        with suppress(ValueError):
            return datetime.fromisoformat(made).timestamp() if isinstance(made, str) else None
        return None

    async def look(self, job: str) -> State:
        told = self.document(await self.ask(self.http.route("GET", self.path_of(job))))
        return State(told.get("processing_status") == "ended", places=[job])

    async def answers(self, state: State) -> Mapping[str, Answer]:
        [job] = state.places
        return await self.read_lines(f"{self.path_of(job)}/results")

    def answer_in(self, row: JsonObject) -> Answer:
        told = mapping(row.get("result"))
        kind = told.get("type")
        message = told.get("message")
        if kind == "succeeded" and isinstance(message, dict):
            if message.get("stop_reason") == PAUSED:  # one of the server's own tools takes long
                return self.batches.faults.bad("the answer was paused, and a batch job cannot continue it")
            return orjson.dumps(message)
        if kind in ("expired", "canceled"):
            where = self.batches.faults.where
            return Unavailable(f"{where}: the job ended before this request finished ({kind})")
        return self.batches.faults.reported(told.get("error"))


def _count(job: JsonObject) -> int | None:
    """Return the number of requests in the job; None if not reported."""
    counts = job.get("request_counts")
    return sum(n for n in counts.values() if isinstance(n, int)) if isinstance(counts, dict) else None
