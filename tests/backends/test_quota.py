"""What providers say of their budgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.http.wire import read_quota
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.errors import RateLimited
from batch_agent.messages import Allowance, Conversation, Message, Quota
from batch_agent.testing import Fail, Say, ScriptedBackend, ScriptedServer


def asked() -> ModelRequest:
    return ModelRequest(RequestShape("m"), Conversation((Message("user", "hello"),)), "job")


def test_openai_names_its_budgets_and_when_they_are_full() -> None:
    headers = {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert read_quota(headers) == Quota(Allowance(60, 59, 1.0), Allowance(150_000, 149_984, 360.0))


def test_anthropic_names_moments_and_counts_each_kind_of_token() -> None:
    headers = {
        f"anthropic-ratelimit-{kind}-{what}": value
        for kind in ("requests", "tokens", "input-tokens", "output-tokens")
        for what, value in (("limit", "50"), ("remaining", "49"), ("reset", "2026-01-01T00:00:30Z"))
    }
    allowance = Allowance(50, 49, 30.0)
    assert read_quota(headers, now=1767225600.0) == Quota(allowance, allowance, allowance, allowance)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("7.66s", 7.66),
        ("2m59.56s", 179.56),
        ("1h2m3s", 3723.0),
        ("1d", 86_400.0),
        ("10", 10.0),
        ("0.5", 0.5),
        ("1767225610", 10.0),
        ("2026-01-01T00:00:10.5+00:00", 10.5),
        ("2025-12-31T23:00:00Z", 0.0),
        ("soon", None),
        ("", None),
        ("1s2", None),
        ("-3s", None),
    ],
)
def test_a_reset_is_a_duration_seconds_or_a_moment(text: str, seconds: float | None) -> None:
    quota = read_quota({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": text}, now=1767225600.0)
    assert quota is not None and quota.requests is not None
    assert quota.requests.resets_in == (None if seconds is None else pytest.approx(seconds))


def test_headers_without_budgets_say_nothing() -> None:
    assert read_quota({"content-type": "application/json", "x-ratelimit-reset-requests": "1s"}) is None
    assert read_quota({"x-ratelimit-remaining-requests": "many"}) is None


@given(st.text(max_size=80))
def test_no_value_breaks_the_reading(text: str) -> None:
    names = [f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")]
    read_quota(dict.fromkeys(names, text))


LEFT = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "7", "x-ratelimit-reset-requests": "20ms"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_over_http_tells_what_is_left(streamed: bool) -> None:
    async with ScriptedServer([Say("ok", headers=LEFT)]) as server, OpenAIBackend(server.url) as backend:
        reply = await backend.infer(asked(), (lambda call: None) if streamed else None)
    assert reply.quota == Quota(Allowance(60, 7, 0.02))


async def test_a_refusal_tells_what_is_left_too() -> None:
    async with ScriptedServer([Fail(429, headers=LEFT)]) as server, OpenAIBackend(server.url) as backend:
        with pytest.raises(RateLimited) as refused:
            await backend.infer(asked())
    assert refused.value.quota == Quota(Allowance(60, 7, 0.02))


async def test_a_scripted_backend_tells_it_like_its_server() -> None:
    reply = await ScriptedBackend([Say("ok", headers=LEFT)]).infer(asked())
    assert reply.quota == Quota(Allowance(60, 7, 0.02))
