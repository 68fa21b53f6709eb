"""A wire that takes a conversation as a whole fits the seam: views that grow and fork, sealed parts, tails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from backends.messages_wire import MARK, HistoryView, MessagesBackend
from backends.wire import Exchange, Step, WireServer, answer
from batch_agent import BatchAgent, Tool
from batch_agent.backends.openai.chat import ChatView
from batch_agent.messages import Conversation, Image, JsonObject, Message, Sealed, ToolCall

THOUGHT: JsonObject = {"type": "thinking", "thinking": "hm", "signature": "sig-1"}
CALLS = (ToolCall("a", "look_up", '{"word":"x"}'), ToolCall("b", "look_up", '{"word":"y"}'))
ANSWER = Message("assistant", "Let me look.", CALLS, sealed=Sealed("messages", THOUGHT))
RESULTS = [Message("tool", f"about {c.id}", tool_call_id=c.id, tool_name=c.name) for c in CALLS]


def conversation() -> Conversation:
    return Conversation([Message("user", "Hello")], Conversation([Message("system", "Be brief.")]))


def body(talk: Conversation) -> bytes:
    return talk.view(HistoryView).render(b'{"model":"m"}', {"metadata": {"user_id": 7}})


def test_the_system_prompt_stands_apart_and_tool_results_are_one_named_message() -> None:
    talk = conversation()
    for message in (ANSWER, *RESULTS, Message("user", "Mend it.")):
        talk.append(message)
    sent = orjson.loads(body(talk))
    assert [block["text"] for block in sent["system"]] == ["Be brief."]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert [block["type"] for block in sent["messages"][1]["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    *results, mend = sent["messages"][2]["content"]
    assert [(block["tool_use_id"], block["name"]) for block in results] == [("a", "look_up"), ("b", "look_up")]
    assert mend["text"] == "Mend it."


def test_the_cache_mark_moves_to_the_end_and_everything_before_it_stays_byte_for_byte() -> None:
    talk = conversation()
    bodies = [body(talk)]
    for messages in ([ANSWER, *RESULTS], [Message("assistant", "Done."), Message("user", "And now?")]):
        for message in messages:
            talk.append(message)
        bodies.append(body(talk))
    for sent in bodies:
        assert sent.count(MARK) == 2, "one behind the system prompt, one at the end"
        assert orjson.loads(sent)["messages"][-1]["content"][-1]["cache_control"]
    first, second, third = (sent[: sent.rindex(MARK)] for sent in bodies)
    assert second.startswith(first)
    assert third.startswith(second)


def test_what_was_written_is_not_written_again() -> None:
    talk = conversation()
    talk.append(ANSWER)
    before = talk.view(HistoryView)
    written = [*before.system, *before.closed]
    talk.append(RESULTS[0])
    after = talk.view(HistoryView)
    assert all(old is new for old, new in zip(written, [*after.system, *after.closed], strict=True))


def test_agents_fork_from_what_they_share_and_go_on_by_themselves() -> None:
    shared = Conversation([Message("system", "Be brief.")])
    one, two = (Conversation([Message("user", word)], shared) for word in ("one", "two"))
    assert one.view(HistoryView).system[0] is two.view(HistoryView).system[0]
    assert b"one" not in body(two) and b"two" not in body(one)
    assert shared.view(HistoryView).open == []


def test_a_conversation_has_a_view_for_each_wire() -> None:
    talk = conversation()
    chat, history = talk.view(ChatView), talk.view(HistoryView)
    talk.append(Message("assistant", "Hello."))
    assert (talk.view(ChatView), talk.view(HistoryView)) == (chat, history)
    assert len(chat.pieces) == 3
    assert len(history.closed) == 2


def test_a_sealed_part_goes_back_to_its_own_wire_alone() -> None:
    talk = conversation()
    talk.append(ANSWER)
    talk.append(Message("assistant", "Done.", sealed=Sealed("other", {"signature": "sig-2"})))
    assert b"sig-1" in body(talk)
    assert b"sig-2" not in body(talk)
    assert not any(b"sig" in piece for piece in talk.view(ChatView).pieces)


def test_an_image_has_the_form_of_each_wire() -> None:
    talk = Conversation([Message("user", ("What is this?", Image.of(b"png", "image/png")))])
    [text, image] = orjson.loads(body(talk))["messages"][0]["content"]
    assert text["text"] == "What is this?"
    assert image["source"] == {"type": "base64", "media_type": "image/png", "data": "cG5n"}


@Tool.define(effect="read")
async def look_up(word: str) -> str:
    return f"about {word}"


def served(script: Callable[[JsonObject], list[JsonObject]]) -> Step:
    usage = {"input": 10, "read": 60, "written": 30, "output": 10}

    async def step(exchange: Exchange) -> None:
        await answer({"content": script(exchange.json), "why": "end", "usage": usage})(exchange)

    return step


def look_then_answer(sent: JsonObject) -> list[JsonObject]:
    if len(sent["messages"]) == 1:  # type: ignore[arg-type]
        return [THOUGHT, {"type": "tool_use", "id": "a", "name": "look_up", "input": {"word": "x"}}]
    return [{"type": "text", "text": "done"}]


@pytest.mark.parametrize("broken", [False, True])
async def test_signed_reasoning_comes_back_in_the_next_turn_also_after_a_resume(tmp_path: Path, broken: bool) -> None:
    async def run(server: WireServer, ok: bool) -> None:
        [result] = await BatchAgent.run(
            **{"task": "{input}", "inputs": ["a"], "tools": [look_up], "backend": MessagesBackend(server.url)},
            **{"model": "m", "run_dir": tmp_path, "resume": True, "max_retries": 0},
            **{"streaming_tool_dispatch": False},
        )
        assert result.ok is ok
        if ok:
            assert result.usage.cache_write_tokens == 60

    async with WireServer(served(look_then_answer)) as good:
        if broken:
            async with WireServer(served(look_then_answer), answer({"error": "broken"}, 400)) as bad:
                await run(bad, ok=False)
        await run(good, ok=True)
    assert len(good.requests) == (1 if broken else 2), "what was recorded is not asked again"
    last = good.requests[-1].json
    assert last["messages"][1]["content"][0] == THOUGHT
    assert last["messages"][2]["content"][0]["name"] == "look_up"


async def test_a_request_knows_its_agent_by_a_number_of_its_own_where_job_ids_repeat() -> None:
    inputs = [{"id": "same", "n": n} for n in range(3)]
    async with WireServer(served(lambda sent: [{"type": "text", "text": "done"}])) as server:
        await BatchAgent.run(task="{n}", inputs=inputs, backend=MessagesBackend(server.url), model="m")
    assert sorted(exchange.json["metadata"]["user_id"] for exchange in server.requests) == [0, 1, 2]
