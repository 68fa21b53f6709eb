"""Several conversations or texts in one request, for the engines that support it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TypeVar

import orjson

from batch_agent.backends.base import Answers, caught
from batch_agent.backends.http.wire import Faults, Naming
from batch_agent.backends.openai.chat import read_answer
from batch_agent.errors import BackendError
from batch_agent.messages import Reply

T = TypeVar("T")
NOT_THERE = frozenset([404, 405, 501])  # status codes of a server without the route


async def infer_in_lists(
    asked: Sequence[T],
    most: int,
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    """Send requests in lists of at most ``most``, and return the answers and whether the server supports lists.
    ``ask_list`` returns the answers of a list, or raises for all of it. A refused list is split in halves, so that the
    bad request fails alone. Without list support each request is sent alone."""
    lists = [asked[start : start + most] for start in range(0, len(asked), most)]
    answered = await asyncio.gather(*(_ask_list(part, ask_list, ask_one) for part in lists))
    return [answer for answers, _ in answered for answer in answers], all(there for _, there in answered)


def read_each(bodies: Iterable[Mapping[str, object]], faults: Faults) -> Answers:
    """Return the answers of a list, each given as the body of a single answer."""
    answers: Answers = []
    for body in bodies:
        try:
            answers.append(read_answer(orjson.dumps(body), Naming((), faults)))
        except BackendError as error:
            answers.append(error)
    return answers


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
        # A missing model looks like a missing route, but then single requests fail too.
        return answers, not any(isinstance(answer, Reply) for answer in answers)
    return await infer_in_lists(asked, -(-len(asked) // 2), ask_list, ask_one)
