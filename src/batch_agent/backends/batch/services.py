"""The batch APIs of OpenAI and Anthropic.

OpenAI's takes a file of requests and gives files of answers and of errors. Anthropic's takes all requests in one HTTP
request; its results are lines of JSON.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from urllib.parse import quote

import orjson

from batch_agent.backends.anthropic.answer import PAUSED
from batch_agent.backends.batch.jobs import Answer, JobService, State, Wave
from batch_agent.backends.http.backend import HttpClient
from batch_agent.backends.http.wire import mapping, objects_of
from batch_agent.errors import Rejected, Unavailable
from batch_agent.messages import JsonObject

ENDPOINT = "/v1/chat/completions"
WAVE = "batch_agent_wave"  # in a job's metadata
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class OpenAIJobs(JobService):
    most_requests, most_bytes = 50_000, 190_000_000  # of 200 MB, minus room for the fields around a body
    names_jobs = True

    def __init__(self, http: HttpClient) -> None:
        super().__init__(http, "/batches")
        self._files = http.route("POST", "/files")

    async def submit(self, bodies: Mapping[str, bytes], wave: str) -> str:
        lines = b"".join(
            b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (own.encode(), ENDPOINT.encode(), body)
            for own, body in bodies.items()
        )
        kind, form = _multipart(lines)
        file = self.id_of(await self.ask(self._files, form, {"Content-Type": kind}))
        job: JsonObject = {
            "input_file_id": file,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "metadata": {WAVE: wave},
        }
        return self.id_of(await self.ask(self.batches, orjson.dumps(job)))

    async def candidates(self, wave: Wave) -> list[str]:
        async for job in self.listed("limit=100", "after", wave.since):
            if mapping(job.get("metadata")).get(WAVE) == wave.name:
                return [str(job["id"])]
        return []

    def made_at(self, job: JsonObject) -> float | None:
        made = job.get("created_at")
        return float(made) if isinstance(made, int | float) else None

    async def look(self, job: str) -> State:
        told = self.document(await self.ask(self.http.route("GET", self.path_of(job))))
        status = told.get("status")
        places = [str(place) for name in ("output_file_id", "error_file_id") if (place := told.get(name))]
        if status in OPEN:
            return State(done=False)
        if status == "failed":
            refused = f"{self.batches.faults.where}: job {job} was refused: {self.batches.faults.clean(_why(told))}"
            return State(True, Rejected(refused, status=400))
        if not places and status != "completed":  # expired or cancelled before anything was done
            return State(True, Unavailable(f"{self.batches.faults.where}: job {job} is {status} without any answer"))
        return State(True, places=places)

    async def answers(self, state: State) -> Mapping[str, Answer]:
        found: dict[str, Answer] = {}
        for place in state.places:
            # Answers take precedence over errors.
            found = await self.read_lines(f"/files/{quote(place, safe='')}/content") | found
        return found

    def answer_in(self, row: JsonObject) -> Answer:
        response = row.get("response")
        if isinstance(response, dict):
            status, body = response.get("status_code"), orjson.dumps(response.get("body"))
            if status == 200 or not isinstance(status, int):
                return body
            return self.batches.faults.answered(status, {}, body)
        error = row.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        if code in ("batch_expired", "batch_cancelled"):
            return Unavailable(f"{self.batches.faults.where}: the job ended before this request finished ({code})")
        return self.batches.faults.reported(error)


def _why(job: JsonObject) -> str:
    told = objects_of(mapping(job.get("errors")).get("data"))
    words = [str(error.get("message")) for error in told]
    return "; ".join(words[:3]) or "no reason given"


def _multipart(lines: bytes) -> tuple[str, bytes]:
    border = secrets.token_hex(16)
    head = (
        f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    )
    return f"multipart/form-data; boundary={border}", head.encode() + lines + f"\r\n--{border}--\r\n".encode()


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
