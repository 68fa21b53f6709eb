"""How many tokens something is, without a tokenizer."""

from __future__ import annotations

from batch_agent.compiler.tokens import content_tokens, estimate_tokens
from batch_agent.messages import IMAGE_TOKENS, Image


def test_a_message_of_parts_is_its_texts_and_its_images() -> None:
    assert content_tokens("four letters") == estimate_tokens("four letters")
    assert content_tokens(("four letters", Image("https://host/a.png"))) == 3 + IMAGE_TOKENS
