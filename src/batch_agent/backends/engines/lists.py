"""Lists of conversations or texts in one request, for the engines that answer them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import TypeVar

from batch_agent.backends.base import Answers, caught
from batch_agent.errors import BackendError
from batch_agent.messages import Reply

T = TypeVar("T")
NOT_THERE = frozenset([404, 405, 501])  # what a server without such a route answers


async def infer_in_lists(
    asked: Sequence[T],
    most: int,
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    """For a server that answers so many in one request: ``ask_list`` gives the answers of a list, or raises for all of
    it. A list that is refused is asked in halves, so that the bad one fails alone; where the server has no lists at
    all, each is asked by itself. And whether it has them, as far as was seen."""
    lists = [asked[start : start + most] for start in range(0, len(asked), most)]
    answered = await asyncio.gather(*(_ask_list(part, ask_list, ask_one) for part in lists))
    return [answer for answers, _ in answered for answer in answers], all(there for _, there in answered)


async def _ask_list(
    asked: Sequence[T],
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    if len(asked) == 1:
        return [await caught(ask_one(asked[0]))], True
    try:
        return await ask_list(asked), True
    except BackendError as error:
        if error.retryable:
            return [copy(error) for _ in asked], True
        status = error.status
    if status in NOT_THERE:
        answers = await asyncio.gather(*(caught(ask_one(each)) for each in asked))
        # A model that is not there answers like a route that is not, but then nothing else works either.
        return answers, not any(isinstance(answer, Reply) for answer in answers)
    return await infer_in_lists(asked, -(-len(asked) // 2), ask_list, ask_one)
