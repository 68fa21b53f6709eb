"""A reduction that does not fit one request, against a model that has a context."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any, cast

from batch_agent import BatchAgent
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, virtual_clock
from batch_agent.testing.replies import ScriptedReply

CONTEXT = {"error": {"message": "This model's maximum context length is 400 tokens", "code": "context_length_exceeded"}}


def rows_of(request: Request) -> list[dict[str, Any]]:
    return [json.loads(line) for line in request.text.splitlines() if line.startswith('{"status"')]


def answer(request: Request) -> ScriptedReply:
    """A leaf says its number, a reduction the numbers of all its rows."""
    rows = rows_of(request)
    if not rows:
        return Say(request.text, latency=1)
    return Say(",".join(str(row["output"]) for row in rows if row["status"] == "ok"), latency=1)


async def tree(backend: ScriptedBackend, leaves: int, **options: Any) -> Any:
    known = {"task": "{input}", "reduce": "Join {n}", "max_inflight": 4}
    return await BatchAgent.run_with_reduce(
        inputs=[str(number) for number in range(leaves)], backend=backend, **(known | options)
    )


@virtual_clock
async def test_rows_that_do_not_fit_the_context_are_reduced_by_a_tree_in_their_order() -> None:
    backend = ScriptedBackend(answer)
    outcome = await tree(backend, 60, model_max_context=700, min_response_tokens=100)
    assert outcome[1] == ",".join(map(str, range(60)))
    assert outcome.reduction.levels > 1
    assert outcome.reduction.covers == tuple(range(60))
    reductions = [request for request in backend.requests if rows_of(request)]
    assert outcome.reduction.requests == len(reductions) > 2
    assert all(len(request.text) / 4 < 600 for request in reductions)


@virtual_clock
async def test_parts_are_reduced_while_the_map_is_still_running() -> None:
    backend = ScriptedBackend(answer)
    await tree(backend, 200, max_inflight=16, model_max_context=700, min_response_tokens=100)
    kinds = [bool(rows_of(request)) for request in backend.requests]
    last_leaf = max(place for place, reduces in enumerate(kinds) if not reduces)
    assert kinds.index(True) < 100
    assert sum(kinds[:last_leaf]) >= 3


@virtual_clock
async def test_the_parts_are_the_same_whatever_the_order_in_which_rows_end() -> None:
    async def requests_of(seed: int) -> set[str]:
        chance = random.Random(seed)

        def shuffled(request: Request) -> ScriptedReply:
            return dataclasses.replace(cast(Say, answer(request)), latency=chance.uniform(1, 9))

        backend = ScriptedBackend(shuffled)
        await tree(backend, 60, model_max_context=700, min_response_tokens=100)
        return {request.text for request in backend.requests}

    assert await requests_of(1) == await requests_of(2)


@virtual_clock
async def test_parts_say_which_results_they_are_and_merges_say_that_they_merge() -> None:
    backend = ScriptedBackend(answer)
    await tree(backend, 4, reduce_tree=2)
    first, second, merge = [request.text for request in backend.requests if rows_of(request)]
    assert first.startswith("Join 2\n\nThese are results 0 to 1 of a longer list.")
    assert second.startswith("Join 2\n\nThese are results 2 to 3 of a longer list.")
    assert merge.startswith("Join 4\n\nThe list was too long to be read at once: ")
    assert rows_of(backend.requests[-1])[1] == {"status": "ok", "index": 1, "results": [2, 3], "output": "2,3"}


@virtual_clock
async def test_a_server_that_finds_a_reduction_too_long_gets_it_in_halves() -> None:
    def strict(request: Request) -> ScriptedReply:
        return Fail(400, CONTEXT) if len(rows_of(request)) > 3 else answer(request)

    outcome = await tree(ScriptedBackend(strict), 10)
    assert outcome[1] == ",".join(map(str, range(10)))
    assert outcome.reduction.covers == tuple(range(10))


@virtual_clock
async def test_a_part_that_fails_is_told_above_and_its_results_are_named_as_lost() -> None:
    def failing(request: Request) -> ScriptedReply:
        if "results 2 to 3 " in request.text:
            return Fail(400)
        return Fail(400) if request.text == "5" else answer(request)

    outcome = await tree(ScriptedBackend(failing), 6, reduce_tree=2)
    reduction = outcome.reduction
    assert outcome[1] == "0,1,4"
    assert (reduction.covers, reduction.failed, reduction.lost) == ((0, 1, 4), (5,), (2, 3))
