"""Messages as people and files get them, and conversations as wires see them."""

from __future__ import annotations

from batch_agent.backends.anthropic.request import MessagesView
from batch_agent.backends.openai.chat import ChatView
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
    assert one.view(ChatView) is chat and len(chat.pieces) == 3
    assert len(two.view(ChatView).pieces) == 2 and len(shared.view(ChatView).pieces) == 1


def test_an_answer_keeps_its_calls_and_its_sealed_part_as_a_message() -> None:
    calls, sealed = (ToolCall("a", "f", "{}"),), Sealed("w", None)
    assert Reply("x", calls, sealed=sealed).message() == Message("assistant", "x", calls, sealed=sealed)
