from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from batch_agent.tools import ToolPool, resolve_tools

OpenPool = Callable[..., ToolPool]


def _open_pool(*tools: object, timeout: float | None = 30.0, **options: Callable[[int], None]) -> ToolPool:
    """A pool as the engine has it."""
    spawn = asyncio.get_running_loop().create_task
    return ToolPool(resolve_tools(tools), timeout=timeout, spawn=spawn, **options)


@pytest.fixture
def open_pool() -> OpenPool:
    return _open_pool
