"""What servers say of a request that is too long, in their own words."""

from __future__ import annotations

import pytest

from batch_agent.compiler.compaction import Stated, stated


@pytest.mark.parametrize(
    "message, says",
    [
        (
            "This model's maximum context length is 4097 tokens. However, you requested 5000 tokens (4000 in the "
            "messages, 1000 in the completion). Please reduce the length.",
            Stated(4097, 4000),
        ),
        (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 130,012 tokens.",
            Stated(128000, 130012),
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 1000. This model's maximum context length is 4096 "
            "tokens and your request has 4000 input tokens (1000 > 4096 - 4000).",
            Stated(4096, 4000),
        ),
        (
            "This model's maximum context length is 64 tokens. However, your request has 80 input tokens and 3 output "
            "tokens (simulated).",
            Stated(64, 80),
        ),
        (
            "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
            Stated(8192, 9000),
        ),
        ("the request exceeds the available context size (4096 tokens), try increasing it", Stated(4096, None)),
        ("prompt is too long: 210000 tokens > 200000 maximum", Stated(200000, 210000)),
        ("input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000", Stated(200000, 190000)),
        ("the context is full", Stated()),
        ("maximum context length is 99999999999999999999", Stated()),
    ],
)
def test_a_server_says_how_long_its_context_and_the_prompt_are(message: str, says: Stated) -> None:
    assert stated(message) == says
