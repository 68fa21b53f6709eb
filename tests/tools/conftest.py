from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from batch_agent.tools import ToolPool, resolve_tools

OpenPool = Callable[..., AbstractAsyncContextManager[ToolPool]]


@asynccontextmanager
async def _open_pool(*tools: object, timeout: float | None = 30.0) -> AsyncIterator[ToolPool]:
    """A pool as the engine has it: its tasks belong to a group, and it is closed before the group ends."""
    async with asyncio.TaskGroup() as group:
        pool = ToolPool(resolve_tools(tools), timeout=timeout, spawn=group.create_task)
        try:
            yield pool
        finally:
            await pool.close()


@pytest.fixture
def open_pool() -> OpenPool:
    return _open_pool
