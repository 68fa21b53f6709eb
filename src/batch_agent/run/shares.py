"""The ledger and the limits of an outermost run: all of them, or one worker's shares of them.

A run whose only worker is in its own process holds everything, and pays nothing for sharing. When another process
joins, the ledger moves into the table of shares, from which each worker gets its part (``sharing``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from batch_agent.backends.base import Backend
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.journal import Journal
from batch_agent.record.store import RunStore, WorkStore
from batch_agent.run.control import Controls
from batch_agent.run.feeder import Feeder
from batch_agent.run.shared import Shared
from batch_agent.run.sharing import Lending
from batch_agent.run.worker import Leases
from batch_agent.scheduler.budget import NOTHING, Amount


class Shares:
    """``record`` is the record of a run that this process feeds. ``number`` is that of the worker in this process."""

    def __init__(
        self,
        shared: Shared,
        controls: Controls,
        backend: Backend,
        store: WorkStore,
        record: RunStore | None,
        lease: float,
        number: int,
        *,
        feeder: Feeder | None,
        leases: Leases | None,
        journal: Journal | None,
    ) -> None:
        self._shared, self._controls, self._backend = shared, controls, backend
        self._store, self._record, self._lease, self._number = store, record, lease, number
        self._feeder, self._leases, self._journal = feeder, leases, journal
        self._extent = AsyncExitStack()

    @asynccontextmanager
    async def opened(self, *, is_shared: bool) -> AsyncIterator[None]:
        """Start the ledger, and stop it at the end."""
        spending, journal = self._shared.spending, self._journal
        if is_shared:
            lender = await self._open_lender()
            spending.start(commit=lender.soon, shared=True)
        elif self._record is None or journal is None or journal.in_memory:
            spending.start()
        else:
            before = await asyncio.to_thread(self._record.spent)
            spending.start(Amount(before.tokens, before.cost or 0.0), before.learnt, journal.touch)
        try:
            async with self._extent:
                if self._shared.lender is not None:
                    await self._at_work(self._shared.lender)
                yield
        finally:
            spending.close()

    async def begin_sharing(self) -> None:
        """Share the limits of a run that was alone until now: another process joins it."""
        if self._shared.lender is not None:
            return
        lender = await self._open_lender()
        self._shared.spending.share(self._moved, lender.soon)
        if self._shared.pool is not None:
            self._shared.pool.once = lender.once
        await self._at_work(lender)

    async def _open_lender(self) -> Lending:
        shared, feeder = self._shared, self._feeder
        name = str(self._number) if feeder is None else f"feeder-{feeder.session}"
        lender = Lending(self._store, name, self._lease)
        self._moved = NOTHING
        if feeder is not None:
            if isinstance(self._record, DirectoryStore):
                tokens, cost = await asyncio.to_thread(self._record.share)
                self._moved = Amount(tokens, cost)
            await lender.begin(self._backend)
        if self._leases is not None:
            self._leases.on_need = lender.soon
        shared.lender = lender
        return lender

    async def _at_work(self, lender: Lending) -> None:
        await self._extent.enter_async_context(lender.at_work(self._shared, self._controls, self._backend))
