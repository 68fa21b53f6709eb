"""The ledger and the limits of an outermost run: all of them, or one worker's shares of them.

A run whose only worker is in its own process holds everything, and pays nothing for sharing. When another process
joins, the ledger moves into the table of shares, from which each worker gets its part (``lending``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from batch_agent.errors import SpecError
from batch_agent.record.commits import Commits
from batch_agent.record.store import Store
from batch_agent.run.feeder import Feeder
from batch_agent.run.leases import Leases
from batch_agent.run.lending import FEEDER, Lending

if TYPE_CHECKING:
    from batch_agent.run.opened import Setup


class RunBudget:
    """The ledger and the limits. ``number`` is that of the worker in this process. ``feeder`` is None if another
    process feeds the run."""

    def __init__(
        self, setup: Setup, store: Store, number: int, feeder: Feeder | None, leases: Leases, commits: Commits
    ) -> None:
        self._shared = setup.shared
        self._controls = setup.controls
        self._requests = setup.requests
        self._backend, self._lease = setup.prepared.backend, setup.lease
        self._store = store
        self._record = store if setup.feeds else None
        self._number = number
        self._feeder = feeder
        self._leases = leases
        self._commits = commits
        self._extent = AsyncExitStack()
        self._changing = asyncio.Lock()  # held while the ledger starts, and while another process joins
        self._ended = False

    @asynccontextmanager
    async def opened(self, *, is_shared: bool) -> AsyncIterator[None]:
        """Start the ledger, and stop it at the end."""
        spending, commits = self._shared.spending, self._commits
        try:
            async with self._extent:
                async with self._changing:
                    before = None if self._record is None else await self._record.spent()
                    learnt = None if self._record is None else await self._record.learnt()
                    if is_shared:
                        lender = await self._open_lender()
                        spending.start(before, learnt, lender.soon, shared=True)
                        await self._at_work(lender)
                    else:
                        spending.start(before, learnt, commits.touch if self._store.writes else None)
                try:
                    yield
                finally:
                    async with self._changing:
                        self._ended = True
        finally:
            spending.close()

    async def begin_sharing(self) -> None:
        """Share the limits with other workers from now on: the run had one worker, and another process joins. Raises
        SpecError if the run has ended."""
        async with self._changing:
            if self._ended:
                raise SpecError("the run has ended")
            if self._shared.lender is not None:
                return
            lender = await self._open_lender()
            if self._commits is not None:
                await self._commits.flush()  # what its commits have claimed is granted before the first report
            self._shared.spending.share(lender.soon)
            if self._shared.pool is not None:
                self._shared.pool.once = lender.once
            await self._at_work(lender)

    async def _open_lender(self) -> Lending:
        shared, feeder = self._shared, self._feeder
        name = str(self._number) if feeder is None else f"{FEEDER}{feeder.session}"
        lender = Lending(self._store, name, self._lease)
        if feeder is not None:
            await lender.begin(self._backend)
        self._leases.on_need = lender.soon
        shared.lender = lender
        for request in self._requests.values() if feeder is not None else ():
            lender.steer(request)  # only this process has applied it so far
        return lender

    async def _at_work(self, lender: Lending) -> None:
        await self._extent.enter_async_context(lender.at_work(self._shared, self._controls, self._backend))
