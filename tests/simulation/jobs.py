"""A provider's batch API, in process: files, jobs that take hours, and the faults of its server.

The package's own code runs down to the bytes of HTTP. A request is bought when its job is made, whether or not the
process that made it lives to hear of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import orjson
from tests.simulation.model import answer, mark_of
from tests.simulation.process import Process
from tests.simulation.world import World

from batch_agent.backends.base import Backend, Capabilities
from batch_agent.backends.batch import JobBackend, OpenAIJobs
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.http.connection import ResponseParser
from batch_agent.http.failures import BrokenOff, ClosedEarly, ConnectFailed
from batch_agent.http.origin import Origin
from batch_agent.http.transport import Pool, Transport
from batch_agent.testing import Request
from batch_agent.testing.wire import Wire, track_of

Answered = tuple[int, Any]  # a status, and JSON or lines


@dataclass(slots=True)
class Job:
    id: str
    metadata: dict[str, str]
    requests: dict[str, Request]
    due: float


class JobProvider:
    """Its server is the world's first."""

    def __init__(self, world: World) -> None:
        self.world, self.server = world, world.servers[0]
        self.files: dict[str, bytes] = {}
        self.jobs: list[Job] = []

    async def respond(self, method: str, path: str, body: bytes) -> Answered:
        """What the server answers. Raises what is wrong with the connection."""
        loop, server = asyncio.get_running_loop(), self.server
        if server.mode == "dead":
            raise ConnectFailed(ConnectionRefusedError("connection refused"))
        await asyncio.sleep(0.1 if server.mode != "slow" else 5.0)
        while server.mode in ("stuck", "mute"):
            await server.wait_change()
        match server.mode:
            case "500" | "502" | "503" | "429":
                return int(server.mode), {"error": {"message": "not now"}}
            case "garbage":
                return 200, b"<html>It works!</html>"
            case "dead":
                raise ClosedEarly
            case "reset" if self.world.chance(f"{path} {loop.time()}").random() < 0.5:
                raise ClosedEarly  # before anything was done
        answered = self._do(method, path, body)
        if server.mode == "reset":
            raise ClosedEarly
        if server.mode == "cut":
            raise BrokenOff("cut")
        return answered

    def _do(self, method: str, path: str, body: bytes) -> Answered:
        url = urlsplit(path)
        match method, url.path.removeprefix("/v1").strip("/").split("/"):
            case "GET", ["models"]:
                return 200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
            case "POST", ["files"]:
                name = f"file-{len(self.files)}"
                self.files[name] = b"\n".join(line for line in body.splitlines() if line.startswith(b'{"custom_id"'))
                return 200, {"id": name, "object": "file"}
            case "POST", ["batches"]:
                return 200, self._told(self._make(orjson.loads(body)))
            case "GET", ["batches"]:
                return 200, self._list(parse_qs(url.query))
            case "GET", ["batches", name]:
                return 200, self._told(self._job(name))
            case "POST", ["batches", name, "cancel"]:
                return 200, self._told(self._job(name))
            case "GET", ["files", name, "content"]:
                return 200, self._output(self._job(name.removesuffix("-output")))
        return 404, {"error": {"message": "no such page"}}

    def _make(self, asked: dict[str, Any]) -> Job:
        lines = [orjson.loads(line) for line in self.files[asked["input_file_id"]].splitlines()]
        requests = {line["custom_id"]: Request(0, line["url"], line["body"]) for line in lines}
        for request in requests.values():
            self.world.note_purchase(mark_of(request))
        number = len(self.jobs)
        seconds = 10 ** self.world.chance(f"job {number}").uniform(1.5, 4.5)
        job = Job(f"batch_{number}", asked["metadata"], requests, asyncio.get_running_loop().time() + seconds)
        self.jobs.append(job)
        return job

    def _list(self, query: dict[str, list[str]]) -> dict[str, Any]:
        newest = self.jobs[::-1]
        if "after" in query:
            newest = newest[1 + next(place for place, job in enumerate(newest) if job.id == query["after"][0]) :]
        limit = int(query.get("limit", ["20"])[0])
        page = [self._told(job) for job in newest[:limit]]
        return {"object": "list", "data": page, "has_more": len(newest) > limit}

    def _job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.id == name)

    def _told(self, job: Job) -> dict[str, Any]:
        told: dict[str, Any] = {"id": job.id, "object": "batch", "status": "in_progress", "metadata": job.metadata}
        if asyncio.get_running_loop().time() >= job.due:
            told |= {"status": "completed", "output_file_id": f"{job.id}-output"}
        return told

    def _output(self, job: Job) -> bytes:
        lines = []
        for own, request in job.requests.items():
            said = track_of(answer(request, self.world), Wire(request, model="scripted", fingerprint="batch"))
            body = orjson.loads(b"".join(said.parts))
            response = {"status_code": 200, "request_id": "q", "body": body}
            lines.append(orjson.dumps({"id": own, "custom_id": own, "response": response, "error": None}))
        return b"\n".join(reversed(lines))


class SimulatedTransport(Transport):
    """One process's connections to the provider."""

    def __init__(self, provider: JobProvider, process: Process) -> None:
        super().__init__(proxies=False)
        self._simulated = cast("Pool", SimulatedPool(provider, process))

    @property
    def pool(self) -> Pool:
        return self._simulated


class SimulatedPool:
    """A pool and its connections. A request is answered by the provider, without a socket."""

    beat = None

    def __init__(self, provider: JobProvider, process: Process) -> None:
        self._provider, self._process = provider, process

    def take(self, origin: Origin) -> SimulatedPool:
        return self

    async def connect(self, origin: Origin, limit_seconds: float, *, fresh: bool) -> SimulatedPool:
        return self

    def failed(self, *of_request: object) -> None: ...

    def ask(self, response: ResponseParser, head: bytes, body: bytes, *reading: object) -> asyncio.Task[None]:
        return asyncio.create_task(self._answer(response, head, body))

    async def _answer(self, response: ResponseParser, head: bytes, body: bytes) -> None:
        process, (method, path) = self._process, head.decode().split(" ")[:2]
        process.event("request")
        await process.alive()
        status, answered = await self._provider.respond(method, path, body)
        process.event("answer")
        await process.alive()
        said = answered if isinstance(answered, bytes) else orjson.dumps(answered)
        response.feed(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%b" % (status, len(said), said))


def batch_backend(process: Process, provider: JobProvider) -> Backend:
    capabilities = Capabilities(native_schema=True, schema_with_tools=True)
    transport = SimulatedTransport(provider, process)
    wire = OpenAIBackend("http://provider/v1", capabilities=capabilities, name="openai://provider", transport=transport)
    return JobBackend(wire, OpenAIJobs(wire.client))
