"""Steps as bytes and back: ``decode(*encode(step)) == step``. The one place that knows the journal's format.

A step is a kind, which the database can select by, and a JSON array. A change here needs a new ``FORMAT``.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from batch_agent.job import AgentError
from batch_agent.messages import Reply, Sealed, ToolCall, Usage
from batch_agent.store.steps import Begun, Done, Failed, Outcome, Spent, Step, Turn

FORMAT = 1
SLOWLY = b" "  # before what orjson can neither write nor read
TURN, BEGUN, OUTCOME, DONE, FAILED = range(1, 6)


def encode(step: Step) -> tuple[int, bytes]:
    match step:
        case Done(reply, spent):
            return DONE, _dump([_from_reply(reply), _from_spent(spent)])
        case Turn(reply, spent):
            return TURN, _dump([_from_reply(reply), _from_spent(spent)])
        case Outcome(call, text):
            return OUTCOME, _dump([call, text])
        case Begun(calls):
            return BEGUN, _dump(calls)
        case Failed(error, text, spent):
            fields = (error.stage, error.type, error.message, error.retryable)
            return FAILED, _dump([fields, text, _from_spent(spent)])


def decode(kind: int, body: bytes) -> Step:
    """Raises ValueError for what ``encode`` never wrote."""
    try:
        return _decode(kind, _load(body))
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"a record of kind {kind} has another form") from error


def _decode(kind: int, body: Any) -> Step:
    if kind == DONE:
        return Done(_to_reply(body[0]), Spent(*body[1]))
    if kind == TURN:
        return Turn(_to_reply(body[0]), Spent(*body[1]))
    if kind == OUTCOME:
        return Outcome(*body)
    if kind == BEGUN:
        return Begun(tuple(body))
    if kind == FAILED:
        return Failed(AgentError(*body[0]), body[1], Spent(*body[2]))
    raise ValueError(f"there is no record of kind {kind}")


def _from_reply(reply: Reply) -> list[object]:
    return [
        reply.text,
        [(call.id, call.name, call.arguments) for call in reply.tool_calls],
        _from_usage(reply.usage),
        reply.reasoning,
        reply.first_token,
        reply.finish_reason,
        None if reply.saved is None else _from_usage(reply.saved),
        None if reply.sealed is None else (reply.sealed.wire, reply.sealed.value),
    ]


def _to_reply(body: Any) -> Reply:
    # Later fields are at the end, here and in a Usage, and may be missing: first there was no ``sealed`` and no
    # ``cache_write_tokens``.
    text, calls, usage, reasoning, first_token, finish_reason, saved, *later = body
    sealed = later[0] if later else None
    return Reply(
        text,
        tuple(ToolCall(*call) for call in calls),
        Usage(*usage),
        reasoning,
        first_token,
        finish_reason,
        None if saved is None else Usage(*saved),
        None if sealed is None else Sealed(*sealed),
    )


def _from_usage(usage: Usage) -> tuple[int, ...]:
    return (
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
        usage.cache_write_tokens,
    )


def _from_spent(spent: Spent) -> tuple[object, ...]:
    return spent.sent, spent.retries, spent.queued, spent.inference, spent.tool_wait, spent.total, spent.cost


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # A lone surrogate or an integer beyond 64 bits, which a model or a server can write and orjson cannot.
        return SLOWLY + json.dumps(value).encode("ascii")


def _load(body: bytes) -> Any:
    return json.loads(body) if body.startswith(SLOWLY) else orjson.loads(body)
