"""Makes the record of a run in this process available to worker processes of this machine, when one is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from batch_agent.blocking import on_this_loop
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.record.store import Store
from batch_agent.record.store_server import StoreDesk, StoreServer
from batch_agent.run.trust import fingerprint_of_things

LEAVE_SECONDS = 5.0  # for workers to leave when the run has ended


class RecordServer:
    """Serves the record of a run. ``url`` is that of a record outside this process. ``facts`` returns what workers
    need; it raises SpecError if they cannot work on the run. ``share`` lets other processes take rows; it is called
    before the first one joins, unless the run ``is_shared`` from its start."""

    def __init__(
        self,
        store: Store,
        url: str | None,
        facts: Callable[[], JsonObject],
        share: Callable[[], Awaitable[None]],
        *,
        is_shared: bool,
    ) -> None:
        self._store = store.fed
        self.url = url
        self._facts = facts
        self._share, self._is_shared = share, is_shared
        self._loop = asyncio.get_running_loop()
        self._desk: StoreDesk | None = None
        self._server: StoreServer | None = None

    @property
    def path(self) -> Path:
        """Path of the socket, which is created at first use. Raises SpecError if other processes cannot work on the
        run."""
        if self._server is None:
            self._server = StoreServer(self.desk, self._store.folder)
        return self._server.path

    @property
    def desk(self) -> StoreDesk:
        """The object that answers the calls of workers. Raises SpecError if other processes cannot work on the run."""
        if self._desk is None:
            if self.url is not None:
                raise SpecError("the record of this run is not in this process: workers reach it at its URL")
            facts = self._facts()
            self._desk = StoreDesk(self._store, facts=lambda: facts, on_join=self._joined)
        return self._desk

    def _joined(self) -> None:
        """Called in a thread, before a worker joins."""
        if not self._is_shared:
            asyncio.run_coroutine_threadsafe(self.begin_sharing(), self._loop).result()

    async def begin_sharing(self) -> None:
        """Let other processes take rows from now on."""
        await self._share()
        self._is_shared = True

    def specs(self) -> list[JsonObject]:
        """Return the options of the run and of its stages in the form in which workers get them. Raises SpecError."""
        facts = cast("dict[str, JsonObject]", self._facts())
        return [facts["spec"], *cast("dict[str, JsonObject]", facts.get("specs", {})).values()]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that the run tells workers to use, for workers that the run itself starts."""
        return fingerprint_of_things(self._facts())

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
