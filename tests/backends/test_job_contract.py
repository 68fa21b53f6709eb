"""The contract through a batch API, where every turn is a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import orjson
import pytest
from tests.backends.job_server import JobServer

from backends.chat_contract import chat_history, hear_chat, whole
from batch_agent.backends.base import Backend
from batch_agent.backends.registry import open_backend
from batch_agent.testing.contract.backend import BackendContract
from batch_agent.testing.contract.peer import Hang, Heard, Item, Refuse, Say
from batch_agent.testing.contract.terms import REFUSALS


class JobPeer:
    """Every request of the contract is a job of its own, and the script answers jobs."""

    def __init__(self, server: JobServer, backend: Backend) -> None:
        self.backend = backend
        self._server = server

    @property
    def _bodies(self) -> list[bytes]:
        return [line for job in self._server.jobs for line in job.lines]

    @property
    def requests(self) -> list[bytes]:
        return [chat_history(body) for body in self._bodies]

    @property
    def heard(self) -> list[Heard]:
        return [hear_chat(body) for body in self._bodies]

    async def wait_until_asked(self) -> None:
        while not (self._server.jobs and self._server.jobs[0].looked):
            await asyncio.sleep(0.01)

    async def wait_until_left(self) -> None:
        await self.backend.__aexit__(None, None, None)  # a job that nobody waits for goes when its backend is left
        await self.backend.__aenter__()
        assert self._server.jobs[0].status == "cancelled"


class TestOpenAIJobs(BackendContract):
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name"})
    combines = True
    lacks: ClassVar[frozenset[str]] = frozenset({"sealed", "retry_after", "errors_inside", "faults"})
    refusals: ClassVar = {refusal: kind for refusal, kind in REFUSALS.items() if refusal.status != 429}

    @asynccontextmanager
    async def peer(self, *script: Item) -> AsyncIterator[JobPeer]:
        items = iter(script)

        def play(body: dict[str, Any]) -> dict[str, Any] | int:
            item = next(items)
            if isinstance(item, Refuse):
                param = "input_tokens" if item.overflow else None
                server.refusal = {"error": {"message": item.message, "type": "Error", "param": param}}
                return item.status
            assert isinstance(item, Say)
            return orjson.loads(orjson.dumps(whole(item)))

        server = JobServer(play, looks=1_000_000 if any(isinstance(item, Hang) for item in script) else 1)
        async with server:
            url = f"openai-batch://{server.address}/v1?tls=false&gather=0&look=0.001"
            backend, _ = open_backend(url, model=None, api_key="k")
            async with backend:
                yield JobPeer(server, backend)

    @pytest.mark.skip("two requests at once are one job here, and end together: see test_jobs")
    async def test_two_requests_at_once_get_each_its_answer(self) -> None: ...
