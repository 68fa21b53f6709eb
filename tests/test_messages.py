"""Messages as people and files get them, and conversations as wires see them."""

from __future__ import annotations

import gc

from batch_agent.backends.anthropic.request import MessagesView
from batch_agent.backends.bedrock.converse import ConverseView
from batch_agent.backends.openai.chat import ChatView
from batch_agent.backends.openai.responses import ItemView
from batch_agent.messages import Conversation, Image, Message, Reply, Sealed, ToolCall, content_text


def test_a_transcript_shows_parts_and_keeps_to_itself_what_only_a_wire_can_read() -> None:
    asked = Message("user", ("Look:", Image("https://host/a.png")))
    assert asked.to_dict() == {
        "role": "user",
        "content": [
            {"type": "text", "text": "Look:"},
            {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        ],
    }
    assert content_text(asked.content) == "Look:"
    answered = Reply("a cat", reasoning="hm", sealed=Sealed("w", {"signature": "s"})).message()
    assert answered.to_dict() == {"role": "assistant", "content": "a cat", "reasoning": "hm"}


def test_agents_fork_from_what_they_share_and_each_wire_has_its_own_view() -> None:
    shared = Conversation([Message("system", "Be brief.")])
    one, two = (Conversation([Message("user", word)], shared) for word in ("one", "two"))
    assert one.view(MessagesView).system[0] is two.view(MessagesView).system[0]
    chat = one.view(ChatView)
    one.append(Message("assistant", "Hello."))
    assert one.view(ChatView) is chat and len(chat.own) == 2
    assert len(two.view(ChatView).own) == 1
    assert chat.shared is two.view(ChatView).shared, "what agents share is encoded once"


def test_the_texts_of_a_conversation_are_in_memory_once() -> None:
    """Each wire refers to the texts of the messages. Their JSON is made for a request and not kept."""
    shared = Conversation([Message("system", "Be brief.")])
    text, result = "Tell me of rain. " * 500, "It rained. " * 500
    talk = Conversation([Message("user", text)], shared)
    talk.append(Message("assistant", "I look.", (ToolCall("a", "f", "{}"),)))
    talk.append(Message("tool", result, tool_call_id="a"))
    for wire in (ChatView, ItemView, MessagesView, ConverseView):
        talk.view(wire)
    found, seen, left = list[object](), set[int](), list[object]([talk])
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, str | bytes):
            found += [value] * (len(value) > 1000)
        else:
            left += gc.get_referents(value)
    assert sorted(map(id, found)) == sorted([id(text), id(result)])


def test_an_answer_keeps_its_calls_and_its_sealed_part_as_a_message() -> None:
    calls, sealed = (ToolCall("a", "f", "{}"),), Sealed("w", None)
    assert Reply("x", calls, sealed=sealed).message() == Message("assistant", "x", calls, sealed=sealed)
