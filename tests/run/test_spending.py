"""Calls reserved, settled and refused, without a run around them."""

from __future__ import annotations

import asyncio

import pytest

from batch_agent import BatchSpec
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.dispatch.spending import Spending
from batch_agent.errors import BackendError, BadResponse, Interrupted, Rejected, Timeout, Unavailable
from batch_agent.messages import Conversation, Message, Usage
from batch_agent.run.lending import WholeBudget
from batch_agent.scheduler.budget import Amount
from batch_agent.share.table import BUDGET_TOKENS, Grant
from batch_agent.testing import virtual_clock

REQUEST = ModelRequest(RequestShape("m", max_tokens=100), Conversation([Message("user", "x" * 100)]), "0", 1)


def spending(told: list[str], **limits: object) -> Spending:
    """``told`` gets what the run would be told."""
    spec = BatchSpec(task="x", inputs=[], **limits)
    return Spending(spec, None, lambda short: None, told.append, lambda: told.append("time is up"))


def shared(error: BackendError) -> BackendError:
    error.paid_elsewhere = True
    return error


@pytest.mark.parametrize(
    ("error", "costs"),
    [
        (Rejected("no", status=400), False),
        (Unavailable("connection refused", unreached=True), False),
        (Timeout("no connection in time", unreached=True), False),
        (shared(BadResponse("cut off")), False),
        (BadResponse("cut off"), True),
        (Timeout("too slow"), True),
        (None, True),
    ],
    ids=lambda value: repr(value),
)
async def test_only_what_may_have_been_computed_counts(error: BackendError | None, costs: bool) -> None:
    budget = spending([], max_total_tokens=1000)
    budget.start()
    call = await budget.reserve(REQUEST)
    reserved = call.amount.tokens
    assert reserved > 200
    assert budget.fail(call, REQUEST, error) is None
    assert budget.so_far() == (reserved if costs else 0, None)
    budget.close()


@virtual_clock
async def test_when_time_is_up_the_run_is_told_and_every_call_is_refused() -> None:
    for limits in ({}, {"max_total_tokens": 300}):
        told: list[str] = []
        budget = spending(told, max_wall_time=10, **limits)
        budget.start()
        in_flight = await budget.reserve(REQUEST)
        waiting = asyncio.ensure_future(budget.reserve(REQUEST)) if limits else None
        await asyncio.sleep(9)
        assert (told, budget.time_is_up) == ([], False)
        await asyncio.sleep(2)
        assert told == ["max_wall_time, 10 s, is over", "time is up"]
        for call in (budget.reserve(REQUEST), waiting):
            if call is not None:
                with pytest.raises(Interrupted, match="out of budget: max_wall_time, 10 s, is over"):
                    await call
        assert "max_wall_time" in str(budget.refusal())
        assert budget.refused == (3 if limits else 2)
        budget.settle(in_flight, REQUEST, Usage(10, completion_tokens=10))
        assert told == ["max_wall_time, 10 s, is over", "time is up"]
        budget.close()


async def test_a_commit_gives_a_worker_of_a_shared_run_no_budget() -> None:
    """Only its reports to the table of shares do: they know what the other workers hold."""
    budget = spending([], max_total_tokens=10_000)
    whole = WholeBudget(budget, 1)
    budget.start(commit=lambda: None, shared=True)
    waiting = asyncio.ensure_future(budget.reserve(REQUEST))
    await asyncio.sleep(0)
    budget.claim()
    assert whole.claims(last=False) == {}
    whole.granted({BUDGET_TOKENS: Grant(10_000, 10_000)})  # of a commit that began when it was alone
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.granted(Amount(10_000), Amount(), Amount())
    await waiting
    budget.close()
