"""Many single-turn conversations in one call, whatever the backend does with them."""

from __future__ import annotations

from collections.abc import Sequence

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.errors import BackendError, Rejected
from batch_agent.messages import Message, Reply
from batch_agent.testing import Fail, Say, ScriptedBackend
from batch_agent.testing.wire import Request


async def test_answers_come_in_the_order_of_the_prompts_and_all_are_asked_at_once() -> None:
    backend = ScriptedBackend(lambda request: Say(f"heard {request.messages[-1]['content']}", latency=0.01))
    replies = await backend.generate_batch(["a", [Message("system", "s"), Message("user", "b")]])
    assert [reply.text for reply in replies if isinstance(reply, Reply)] == ["heard a", "heard b"]
    assert backend.peak_inflight == 2


async def test_one_bad_prompt_fails_alone() -> None:
    def answer(request: Request) -> Say | Fail:
        return Fail(400) if request.messages[-1]["content"] == "bad" else Say("fine")

    replies = await ScriptedBackend(answer).generate_batch(["a", "bad", "c"])
    assert [type(reply) for reply in replies] == [Reply, Rejected, Reply]


async def test_nothing_is_asked_for_no_prompts() -> None:
    backend = ScriptedBackend([])
    assert await backend.generate_batch([]) == []
    assert backend.requests == []


class OneRequest(ScriptedBackend):
    """Answers a batch at once."""

    batches: list[int]

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> list[Reply | BackendError]:
        self.batches = [len(requests)]
        return [Reply(request.shape.model) for request in requests]


async def test_a_backend_that_answers_batches_gets_them_whole() -> None:
    backend = OneRequest()
    replies = await backend.generate_batch(["a", "b"], RequestShape("m"))
    assert (replies, backend.batches) == ([Reply("m"), Reply("m")], [2])
