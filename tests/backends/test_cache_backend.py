"""CachingBackend: the contract, answers across runs, and identical requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest
from tests.backends.chat_contract import ChatContract

from batch_agent.backends.base import Backend, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.cache import CachingBackend
from batch_agent.backends.cache_store import FILE, ResponseStore
from batch_agent.errors import BackendError, SpecError, Truncated
from batch_agent.messages import Image, Message, Reply, Sealed, ToolCall, ToolSpec, Usage
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.testing.contract.backend import SEARCH, Item, ask, smoke
from batch_agent.testing.contract.http import HttpPeer

EXACT = RequestShape(model="m", temperature=0)


class Seeded:
    """Gives each request a seed of its own, so that the contract goes through the cache and never finds anything."""

    def __init__(self, inner: CachingBackend) -> None:
        self._inner = inner
        self._seeds = count()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._inner.__aexit__(*exception)

    def check(self, shape: RequestShape) -> None:
        self._inner.check(shape)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        shape = replace(request.shape, seed=request.shape.seed or next(self._seeds))
        return await self._inner.infer(replace(request, shape=shape), on_tool_call)


@smoke
class TestCachingBackend(ChatContract):
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path: Path) -> None:
        self.path = tmp_path / FILE

    @asynccontextmanager
    async def peer(self, *script: Item) -> AsyncIterator[HttpPeer]:
        async with super().peer(*script) as peer, CachingBackend(peer.backend, ResponseStore(self.path)) as caching:
            peer.backend = Seeded(caching)  # type: ignore[assignment]
            yield peer


def caching(inner: Backend, directory: Path) -> CachingBackend:
    return CachingBackend(inner, ResponseStore(directory / FILE))


async def test_a_second_run_is_answered_from_disk_and_says_what_that_saved(tmp_path: Path) -> None:
    usage = Usage(10, 4, 3, 1)
    inner = ScriptedBackend(lambda request: Say("hello", usage=usage, reasoning="hm"))
    async with caching(inner, tmp_path) as backend:
        first = await backend.infer(ask(shape=EXACT))
    async with caching(inner, tmp_path) as backend:
        second = await backend.infer(ask(shape=replace(EXACT)))
    assert (first.usage, first.saved) == (usage, None)
    assert second == replace(first, usage=Usage(), saved=usage)
    assert len(inner.requests) == 1
    assert inner.entered == 0


OTHERS = {
    "model": "n",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 4,
    "stop": ("x",),
    "tools": (SEARCH,),
    "tool_choice": "none",
    "schema": {"type": "object"},
    "schema_name": "other",
    "extra_body": {"a": 1},
    "logprobs": True,
}


@pytest.mark.parametrize("field", [name for name in RequestShape.__dataclass_fields__ if name != "__weakref__"])
async def test_everything_that_determines_an_answer_tells_requests_apart(field: str, tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Say("hello"))
    shape = RequestShape(model="m", seed=3)
    async with caching(inner, tmp_path) as backend:
        await backend.infer(ask(shape=shape))
        other = await backend.infer(ask(shape=replace(shape, **{field: OTHERS[field]})))  # type: ignore[arg-type]
    assert other.saved is None
    assert len(inner.requests) == 2


CONVERSATIONS = [
    [Message("user", "a")],
    [Message("system", "a")],
    [Message("user", "a"), Message("user", "")],
    [Message("user", "a\n"), Message("user", "b")],
    [Message("user", "a"), Message("user", "\nb")],
    [Message("user", "a"), Message("assistant", "", (ToolCall("1", "f", "{}"),)), Message("tool", "x", (), "1")],
    [Message("user", "a"), Message("assistant", "", (ToolCall("1", "f", "{} "),)), Message("tool", "x", (), "1")],
    [Message("user", "a"), Message("assistant", "", (ToolCall("2", "f", "{}"),)), Message("tool", "x", (), "2")],
    [Message("user", '["user", "a", [], ""]\n["user", "b", [], ""]')],
    [Message("user", "half a pair: \ud800")],
]


async def test_other_messages_are_other_requests_and_reasoning_that_is_not_sent_is_none(tmp_path: Path) -> None:
    async with caching(ScriptedBackend(), tmp_path) as backend:
        keys = {backend._key(ask(*messages, shape=EXACT)) for messages in CONVERSATIONS}
        again = backend._key(ask(Message("user", "a", reasoning="thought"), shape=EXACT))
    assert len(keys) == len(CONVERSATIONS)
    assert again in keys


async def test_the_order_of_a_mapping_does_not_matter(tmp_path: Path) -> None:
    def shape(parameters: dict[str, object]) -> RequestShape:
        return replace(EXACT, tools=(ToolSpec("t", "", parameters),))  # type: ignore[arg-type]

    async with caching(ScriptedBackend(), tmp_path) as backend:
        one = backend._key(ask(shape=shape({"a": 1, "b": 2})))
        two = backend._key(ask(shape=shape({"b": 2, "a": 1})))
    assert one == two


async def test_sampled_answers_are_neither_kept_nor_shared(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Say("hello"))
    async with caching(inner, tmp_path) as backend:
        for temperature in (None, 0.7):
            for _ in range(2):
                await backend.infer(ask(shape=RequestShape(model="m", temperature=temperature)))
    assert len(inner.requests) == 4


async def test_errors_are_not_kept(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Fail(500) if request.number == 0 else Say("hello"))
    async with caching(inner, tmp_path) as backend:
        with pytest.raises(BackendError):
            await backend.infer(ask(shape=EXACT))
        assert (await backend.infer(ask(shape=EXACT))).text == "hello"


async def test_the_tool_calls_of_a_cached_answer_are_reported_in_order(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: CallTools(ToolUse("search", {"q": "a"}), ToolUse("search", {"q": "b"})))
    seen: list[ToolCall] = []
    async with caching(inner, tmp_path) as backend:
        first = await backend.infer(ask(shape=EXACT))
        second = await backend.infer(ask(shape=EXACT), seen.append)
    assert tuple(seen) == second.tool_calls == first.tool_calls
    assert all(a is b for a, b in zip(seen, second.tool_calls, strict=True))


@virtual_clock
async def test_identical_requests_in_flight_are_sent_once(tmp_path: Path) -> None:
    usage = Usage(10, completion_tokens=2)
    inner = ScriptedBackend(lambda request: CallTools(ToolUse("f"), latency=1, usage=usage))
    seen: list[ToolCall] = []
    async with caching(inner, tmp_path) as backend:
        first, second, third = await asyncio.gather(
            backend.infer(ask(shape=EXACT), seen.append),
            backend.infer(ask(shape=EXACT), seen.append),
            backend.infer(ask(shape=EXACT)),
        )
    assert len(inner.requests) == 1
    assert len(seen) == 2
    assert (first.usage, first.saved) == (usage, None)
    assert (second.usage, second.saved) == (third.usage, third.saved) == (Usage(), usage)


@virtual_clock
async def test_when_the_first_asker_is_cancelled_the_next_one_asks(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Say("hello", latency=10))
    async with caching(inner, tmp_path) as backend:
        askers = [asyncio.create_task(backend.infer(ask(shape=EXACT))) for _ in range(4)]
        await asyncio.sleep(1)
        askers[0].cancel()
        askers[2].cancel()
        ends = await asyncio.gather(*askers, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, Reply, asyncio.CancelledError, Reply]
    assert len(inner.requests) == 2
    assert inner.inflight == 0
    assert inner.peak_inflight == 1


@virtual_clock
async def test_a_waiter_that_is_cancelled_does_not_touch_the_others(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Say("hello", latency=10))
    async with caching(inner, tmp_path) as backend:
        askers = [asyncio.create_task(backend.infer(ask(shape=EXACT))) for _ in range(3)]
        await asyncio.sleep(1)
        askers[1].cancel()
        ends = await asyncio.gather(*askers, return_exceptions=True)
    assert [type(end) for end in ends] == [Reply, asyncio.CancelledError, Reply]
    assert len(inner.requests) == 1


@virtual_clock
async def test_an_error_is_told_to_everybody_who_waits_and_the_next_request_is_sent(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Fail(500, latency=1) if request.number == 0 else Say("hello"))
    async with caching(inner, tmp_path) as backend:
        askers = [backend.infer(ask(shape=EXACT)) for _ in range(3)]
        ends = await asyncio.gather(*askers, return_exceptions=True)
        assert all(isinstance(end, BackendError) for end in ends)
        assert len(inner.requests) == 1
        assert (await backend.infer(ask(shape=EXACT))).text == "hello"


class CutOff(ScriptedBackend):
    """Takes its time, then breaks off with what it has computed."""

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        await super().infer(request, on_tool_call)
        raise Truncated("cut", text="half", usage=Usage(100, completion_tokens=50))


@virtual_clock
async def test_what_an_error_took_is_on_the_account_of_the_first_asker_alone(tmp_path: Path) -> None:
    inner = CutOff(lambda request: Say("hello", latency=1))
    async with caching(inner, tmp_path) as backend:
        askers = [backend.infer(ask(shape=EXACT)) for _ in range(3)]
        first, *others = await asyncio.gather(*askers, return_exceptions=True)
    assert len(inner.requests) == 1
    assert isinstance(first, Truncated) and first.usage == Usage(100, completion_tokens=50) and not first.paid_elsewhere
    for other in others:
        assert isinstance(other, Truncated) and other is not first
        assert (str(other), other.text, other.usage, other.paid_elsewhere) == ("cut", "half", None, True)


async def test_two_processes_share_one_file(tmp_path: Path) -> None:
    def echo(request: Request) -> Say:
        return Say(request.text)

    one, two = ScriptedBackend(echo), ScriptedBackend(echo)
    async with caching(one, tmp_path) as first, caching(two, tmp_path) as second:
        for number in range(20):
            asker = first if number % 2 else second
            await asker.infer(ask(Message("user", str(number)), shape=EXACT))
        for number in range(20):
            asker = second if number % 2 else first
            assert (await asker.infer(ask(Message("user", str(number)), shape=EXACT))).text == str(number)
    assert len(one.requests) + len(two.requests) == 20


async def test_a_place_that_cannot_be_used_is_a_spec_error_before_anything_is_entered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inner = ScriptedBackend()
    with pytest.raises(SpecError, match=r"cache: .* cannot be used .*name another directory"):
        async with caching(inner, tmp_path / "file" / "below"):
            pass
    assert inner.entered == 0


async def test_images_and_sealed_parts_are_a_part_of_the_question(tmp_path: Path) -> None:
    inner = ScriptedBackend(lambda request: Say(f"answer {request.number}"))
    questions = [
        [Message("user", "a")],
        [Message("user", ("a", Image("https://host/1.png")))],
        [Message("user", ("a", Image("https://host/2.png")))],
        *([Message("user", "a"), Message("assistant", "b", sealed=s)] for s in (None, Sealed("w", 1), Sealed("w", 2))),
    ]
    async with caching(inner, tmp_path) as backend:
        first = [(await backend.infer(ask(*question, shape=EXACT))).text for question in questions]
        again = [(await backend.infer(ask(*question, shape=EXACT))).text for question in questions]
    assert len(set(first)) == len(questions)
    assert again == first
