"""Conversations that outgrow the context are cut before they do, once and not every turn, and resumed as they were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_agent import AgentContext, AgentResult, BatchAgent, Tool
from batch_agent.errors import SpecError
from batch_agent.events import ContextCompacted, Event, TurnFailed
from batch_agent.messages import Message, Usage
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock

CONTEXT = 4_000
TURNS = 20


@Tool.define(cacheable=True)
async def look(page: int) -> str:
    return f"page {page}: " + "word " * 300


def size(request: Request) -> int:
    return len(request.raw) // 4


def looks(request: Request, turns: int = TURNS, *, counted: bool = True) -> Say:
    """Looks at one page after another; pages are told by the latest call, since a history may be cut."""
    calls = [call for message in request.conversation() for call in message.tool_calls]
    page = int(calls[-1].arguments.split(":")[1].strip(" }")) + 1 if calls else 0
    usage = Usage(size(request), 0, 10) if counted else Usage()
    if page < turns:
        return CallTools(ToolUse("look", {"page": page}, id=f"look_{page}"), usage=usage, latency=1)
    return Say("done", usage=usage)


async def run(
    script: Any = looks, **options: Any
) -> tuple[list[AgentResult[Any]], ScriptedBackend, list[ContextCompacted]]:
    backend = ScriptedBackend(script)
    known: dict[str, Any] = {
        "task": "Read {input}.",
        "inputs": ["the book"],
        "system_prompt": "You read books.",
        "tools": [look],
        "max_turns": None,
        "model_max_context": CONTEXT,
        "max_retries": 0,
        "streaming_tool_dispatch": False,
    }
    events: list[Event] = []
    async with BatchAgent.open(backend=backend, sinks=[events.append], **{**known, **options}) as running:
        results = [result async for result in running.results()]
    return results, backend, [event for event in events if isinstance(event, ContextCompacted)]


def cuts(backend: ScriptedBackend) -> list[int]:
    """The requests that do not begin with all of the one before."""
    raws = [request.raw.rpartition(b"]")[0] for request in backend.requests]
    return [number for number in range(1, len(raws)) if not raws[number].startswith(raws[number - 1])]


@virtual_clock
async def test_a_conversation_is_cut_before_it_outgrows_the_context_and_rarely() -> None:
    [result], backend, events = await run()
    assert (result.ok, result.turns) == (True, TURNS + 1)
    assert max(map(size, backend.requests)) < CONTEXT
    assert 0 < len(cuts(backend)) < TURNS / 3
    assert [event.turn for event in events] == [number + 1 for number in cuts(backend)]
    assert all(event.before_tokens > 0.85 * CONTEXT > event.after_tokens for event in events)


@pytest.mark.parametrize("counted_turns", [0, 1])
@virtual_clock
async def test_a_conversation_is_cut_in_time_although_the_server_counts_no_tokens(counted_turns: int) -> None:
    [result], backend, events = await run(lambda request: looks(request, counted=request.turn < counted_turns))
    assert (result.ok, result.turns) == (True, TURNS + 1)
    assert max(map(size, backend.requests)) < CONTEXT
    assert 0 < len(cuts(backend)) < TURNS / 3
    assert all(event.before_tokens > 0.6 * CONTEXT for event in events)


@virtual_clock
async def test_the_shared_prefix_the_task_and_the_latest_exchange_are_not_touched() -> None:
    _, backend, _ = await run()
    pages = [await look.function(page) for page in range(TURNS)]
    for request in backend.requests:
        assert request.messages[0]["content"] == "You read books."
        assert str(request.messages[1]["content"]).startswith("Read the book.")
        assert request.text in {"Read the book.", *pages}


@virtual_clock
async def test_the_transcript_has_everything() -> None:
    [result], _, _ = await run()
    pages = [message.content for message in result.messages if message.role == "tool"]
    assert pages == [await look.function(page) for page in range(TURNS)]


@pytest.mark.parametrize(
    "options", [{"model_max_context": 100_000}, {"compaction": "off"}, {"model_max_context": None}]
)
@virtual_clock
async def test_nothing_is_cut_that_fits_or_when_nobody_wants_it(options: dict[str, Any]) -> None:
    [result], backend, events = await run(**options)
    assert result.ok
    assert cuts(backend) == []
    assert events == []


@virtual_clock
async def test_a_resumed_agent_goes_on_from_the_cut_conversation(tmp_path: Path) -> None:
    def stops(request: Request) -> Any:
        return Fail(400) if request.number == 15 else looks(request)

    record = {"run_dir": tmp_path, "resume": True, "retry_from": "failure"}
    [failed], before, _ = await run(stops, **record)
    assert not failed.ok
    assert cuts(before)
    [result], after, _ = await run(**record)
    assert result.ok
    assert after.requests[0].raw == before.requests[-1].raw
    [whole], none, _ = await run(**record)
    assert none.requests == []
    assert (whole.messages, whole.usage) == (result.messages, result.usage)


@virtual_clock
async def test_what_a_model_told_is_recorded_and_not_asked_for_again(tmp_path: Path) -> None:
    def stops(request: Request) -> Any:
        return Fail(400) if request.number >= 15 and request.model != "small" else with_summaries(request)

    record = {"run_dir": tmp_path, "resume": True, "retry_from": "failure", "compaction_model": "small"}
    [failed], before, _ = await run(stops, **record)
    assert not failed.ok
    [result], after, _ = await run(with_summaries, **record)
    assert result.ok
    assert after.requests[0].raw == before.requests[-1].raw
    told = [request for request in (*before.requests, *after.requests) if request.model == "small"]
    assert len({request.raw for request in told}) == len(told) > 1
    assert result.usage.completion_tokens == 10 * result.turns + 20 * len(told)


def with_summaries(request: Request) -> Say:
    if "removed from its context" in str(request.messages[0]["content"]):
        return Say("Pages so far were all words.", usage=Usage(500, 0, 20))
    return looks(request)


@virtual_clock
async def test_a_model_tells_what_is_left_out() -> None:
    [result], backend, _ = await run(with_summaries, compaction_model="small")
    summaries = [request for request in backend.requests if request.model == "small"]
    assert result.ok
    assert summaries
    assert "calls look(" in summaries[0].text
    assert "page 0: word" in summaries[0].text
    assert "Pages so far were all words." in str(backend.requests[-1].messages[1]["content"])
    turns = [request for request in backend.requests if request.model != "small"]
    assert result.turns == len(turns)
    assert result.usage.completion_tokens == 10 * len(turns) + 20 * len(summaries)


@virtual_clock
async def test_a_model_elsewhere_tells_it_there() -> None:
    small = ScriptedBackend(with_summaries)
    [result], backend, _ = await run(compaction_backend=small)
    assert result.ok
    assert small.requests
    assert small.entered == 0
    assert not any("removed from" in str(request.messages[0]["content"]) for request in backend.requests)


@pytest.mark.parametrize("answer", [Fail(500), Fail(401), Hang()])
@virtual_clock
async def test_where_that_model_cannot_be_asked_the_calls_are_told(answer: Any) -> None:
    [result], backend, events = await run(compaction_backend=ScriptedBackend(lambda _: answer), timeout_per_turn=30)
    assert result.ok
    assert events
    assert "- look({" in str(backend.requests[-1].messages[1]["content"])


@virtual_clock
async def test_a_function_tells_what_is_left_out() -> None:
    seen: list[Sequence[Message]] = []

    async def tell(gone: Sequence[Message]) -> str:
        seen.append(gone)
        return f"{len(gone)} messages"

    [result], backend, _ = await run(compaction=tell)
    assert result.ok
    assert [message.role for message in seen[0][:2]] == ["assistant", "tool"]
    assert f"{len(seen[-1])} messages" in str(backend.requests[-1].messages[1]["content"])


@pytest.mark.parametrize("tell", [lambda gone: 1 / 0, lambda gone: None])
@virtual_clock
async def test_a_function_that_fails_fails_its_row(tell: Any) -> None:
    [result], _, _ = await run(compaction=tell)
    assert result.error is not None
    assert (result.error.type, "compaction" in result.error.message) == ("WorkerFailed", True)


def server(context: int, script: Any = looks) -> Any:
    """A server that knows its own context, of which nobody was told."""

    def answer(request: Request) -> Any:
        asked = size(request) + (request.max_tokens or 0)
        if asked > context:
            said = (
                f"This model's maximum context length is {context} tokens. However, your request has {size(request)} "
                "input tokens."
            )
            return Fail(400, {"error": {"message": said, "param": "input_tokens"}})
        return script(request)

    return answer


@virtual_clock
async def test_a_servers_own_context_error_cuts_once_and_is_learnt_from() -> None:
    [result], backend, events = await run(server(CONTEXT), model_max_context=None)
    assert result.ok
    refused = [request for request in backend.requests if size(request) > CONTEXT]
    assert len(refused) == 1
    assert len(events) > 1
    assert result.attempts == 2


@virtual_clock
async def test_a_servers_own_context_error_shrinks_max_tokens_where_that_is_enough() -> None:
    [result], backend, events = await run(
        server(CONTEXT, lambda request: looks(request, 4)), model_max_context=None, max_tokens=3_500
    )
    assert result.ok
    assert events == []
    assert backend.requests[0].max_tokens == 3_500
    assert 256 < (backend.requests[-1].max_tokens or 0) <= CONTEXT - size(backend.requests[-1])


@virtual_clock
async def test_a_context_error_that_nothing_helps_against_stays_one() -> None:
    [result], backend, _ = await run(server(20), model_max_context=None)
    assert result.error is not None
    assert result.error.type == "ContextOverflow"
    assert len(backend.requests) == 1


@virtual_clock
async def test_one_result_longer_than_the_context_is_cut_before_it_is_sent() -> None:
    @Tool.define(effect="read")
    async def everything() -> str:
        return "begin " + "word " * 8_000 + "end"

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("everything", {}), usage=Usage(size(request), 0, 10))
        return Say("done", usage=Usage(size(request), 0, 10))

    [result], backend, _ = await run(server(CONTEXT, script), tools=[everything])
    assert result.ok
    assert len(backend.requests) == 2
    assert "begin word" in backend.requests[1].text
    assert "word end" in backend.requests[1].text


async def test_a_model_for_summaries_that_would_write_none_is_an_error() -> None:
    with pytest.raises(SpecError, match="compaction_model"):
        await run(compaction="off", compaction_model="small")
    with pytest.raises(SpecError, match="compaction: must be auto, off, or a function"):
        await run(compaction="sometimes")


@virtual_clock
async def test_the_server_is_not_asked_too_much_by_a_prompt_that_was_foreseen() -> None:
    events: list[Event] = []
    async with BatchAgent.open(
        task="Read {input}.",
        inputs=["the book"],
        tools=[look],
        max_turns=None,
        model_max_context=CONTEXT,
        max_tokens=1_500,
        backend=ScriptedBackend(server(CONTEXT)),
        sinks=[events.append],
    ) as running:
        [result] = [result async for result in running.results()]
    assert result.ok
    assert not any(isinstance(event, TurnFailed) for event in events)


@virtual_clock
async def test_a_model_for_summaries_that_the_server_does_not_have_does_not_stop_the_run() -> None:
    def script(request: Request) -> Any:
        return Fail(404) if request.model == "small" else looks(request)

    results, backend, events = await run(script, inputs=["a", "b", "c"], compaction_model="small", max_inflight=2)
    assert all(result.ok for result in results)
    assert len(events) > 3
    assert "- look({" in str(backend.requests[-1].messages[1]["content"])


@virtual_clock
async def test_a_loop_of_a_worker_is_cut_like_a_row_and_resumed_as_it_was(tmp_path: Path) -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        return await ctx.loop(max_turns=TURNS + 1)

    def stops(request: Request) -> Any:
        return Fail(400) if request.number >= 15 and request.model != "small" else with_summaries(request)

    record = {"run_dir": tmp_path, "resume": True, "retry_from": "failure"}
    options = {**record, "worker": work, "compaction_model": "small"}
    [failed], before, events = await run(stops, **options)
    assert not failed.ok and events
    [result], after, _ = await run(with_summaries, **options)
    assert (result.output, result.turns) == ("done", TURNS + 1)
    assert after.requests[0].raw == before.requests[-1].raw
    assert max(map(size, (*before.requests, *after.requests))) < CONTEXT
    told = [request for request in (*before.requests, *after.requests) if request.model == "small"]
    assert len({request.raw for request in told}) == len(told) > 1
    assert result.usage.completion_tokens == 10 * result.turns + 20 * len(told)


@virtual_clock
async def test_a_loop_of_a_worker_is_not_cut_when_the_run_says_so() -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        return await ctx.loop(max_turns=TURNS + 1)

    [result], backend, events = await run(worker=work, compaction="off")
    assert (result.ok, events) == (True, [])
    assert max(map(size, backend.requests)) > CONTEXT
