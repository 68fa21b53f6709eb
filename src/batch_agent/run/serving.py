"""Makes the record of a run in this process available to worker processes of this machine, when one is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from batch_agent.agent.prepare import Prepared
from batch_agent.blocking import on_this_loop
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.record.memory import MemoryStore
from batch_agent.record.served import StoreDesk, StoreServer
from batch_agent.record.store import WorkStore
from batch_agent.run.control import Inside
from batch_agent.run.recording import facts_for_workers
from batch_agent.run.spec_json import spec_json

LEAVE_SECONDS = 5.0  # for workers to leave when the run has ended


class Serving:
    """``first`` is the first input. ``begin_sharing`` is called before the first worker joins."""

    def __init__(
        self,
        store: WorkStore,
        prepared: Prepared,
        first: object,
        inside: Inside | None,
        begin_sharing: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._prepared, self._first, self._inside = store, prepared, first, inside
        self._begin_sharing = begin_sharing
        self._loop = asyncio.get_running_loop()
        self._server: StoreServer | None = None

    @property
    def path(self) -> Path:
        """Path of the socket, which is created at first use. Raises SpecError if other processes cannot work on the
        run."""
        if self._server is None:
            store = self._store
            if not isinstance(store, MemoryStore):
                raise SpecError("the record of this run is not in this process: workers reach it at its URL")
            facts = self._facts()  # raises before anything listens
            parts = {"": self._prepared} if self._inside is None else self._inside.parts
            schemas = {name: part.schema for name, part in parts.items()}
            self._server = StoreServer(StoreDesk(store, schemas=schemas, facts=lambda: facts, on_join=self._joined))
        return self._server.path

    def _facts(self) -> JsonObject:
        inside = {} if self._inside is None else self._inside.facts(self._prepared)
        return {**facts_for_workers(self._prepared, self._first, None), **inside}

    def _joined(self) -> None:
        """Called in a thread, before a worker joins."""

        async def share() -> None:
            await self._begin_sharing()

        asyncio.run_coroutine_threadsafe(share(), self._loop).result()

    def specs(self) -> list[JsonObject]:
        """Return the options of the run and of its stages, as workers get them. Raises SpecError."""
        inside = {} if self._inside is None else self._inside.facts(self._prepared).get("specs", {})
        return [spec_json(self._prepared), *cast("dict[str, JsonObject]", inside).values()]

    @property
    def url(self) -> str | None:
        """URL at which workers reach the record; None if it is in this process."""
        return None if self._store.instant else str(self._prepared.spec.run_dir)

    async def close(self) -> None:
        """Stop serving, when the workers have seen that the run has ended and left."""
        server = self._server
        if server is None:
            return
        changed = asyncio.Event()
        server.on_change = on_this_loop(changed.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while server.is_used:
                    changed.clear()
                    await changed.wait()
        await asyncio.to_thread(server.close)
