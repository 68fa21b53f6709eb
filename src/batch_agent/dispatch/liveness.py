"""Is a server there? Asked of an endpoint in place of a row's turn, which would have to wait for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from batch_agent.errors import BackendError, Rejected

KNOCK_SECONDS = 2.0

Knock = Callable[[str], Awaitable[object]]
"""Asks the endpoint of this name what costs it nothing to answer. Raises a BackendError where it does not."""


async def why_shut(knock: Knock, endpoint: str) -> str:
    """Why it does not open; "" where it does."""
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            await knock(endpoint)
    except TimeoutError:
        return f"no answer in {KNOCK_SECONDS:g} s"
    except Rejected:
        return ""  # it is there
    except BackendError as error:
        return str(error)
    return ""
