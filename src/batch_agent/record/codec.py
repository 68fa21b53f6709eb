"""Encodes steps as bytes: ``decode(*encode(step)) == step``. Only this module knows the journal's format.

A step is a kind, which the database can select by, and a JSON array. A new field is added at the end of an array with a
default for arrays without it, or as a new kind. Both need a new ``FORMAT``: a version that does not know it then leaves
the journal unchanged. Fields are never removed or moved, so every version reads the formats from ``OLDEST`` on.

    format 9    kind 12: a call that was to begin did not start
    format 10   the doubts of an answer
    format 11   the standby that gave an answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import UnionType
from typing import TYPE_CHECKING, Any, cast, get_args

import orjson

from batch_agent.compiler.compaction import Cut
from batch_agent.job import AgentError
from batch_agent.messages import Attachment, Image, Message, Reply, Role, Sealed, ToolCall, Usage, content_shown
from batch_agent.record.steps import (
    OWN,
    Asked,
    CallBegun,
    CallEnded,
    CallWithdrawn,
    Compacted,
    Ended,
    Failed,
    Restarted,
    Step,
    Used,
)

if TYPE_CHECKING:
    from batch_agent.record.store import KeptStep

FORMAT = 11
OLDEST = 8  # the oldest format that is still read
SLOWLY = b" "  # prefix of a body that orjson can neither write nor read
FAILED, ENDED, COMPACTED, ASKED, CALL_BEGUN, CALL_ENDED, RESTARTED, CALL_WITHDRAWN = range(5, 13)
RANKS = {ENDED: 0, FAILED: 2}  # of a row by its last step; 1 is that of a row that has begun and is not done

# Types of the values in each array, in order.
Form = tuple[type | UnionType, ...]
NUMBER = int | float
REPLY: Form = (str, list, list, str, NUMBER | None, str, list | None, list | None, dict | None, str)
CALL: Form = (str, str, str)
USAGE: Form = (int, int, int, int, int)
SEALED: Form = (str, object)
SPENT: Form = (int, int, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER | None)
ERROR: Form = (str, str, str, bool, str)
MESSAGE: Form = (str, str, list, str, str, str)
ROLES = get_args(Role)


def encode(step: Step) -> tuple[int, bytes]:
    # The steps of every row first. Their fields are read one by one: a pattern with fields takes several times as long.
    match step:
        case Asked():
            asked = [step.digest, step.nth, _from_reply(step.reply), _from_spent(step.spent)]
            if step.after != OWN or step.said:
                asked += (step.after, [from_message(message) for message in step.said])
            return ASKED, _dump(asked)
        case CallEnded():
            return CALL_ENDED, _dump([*_from_call(step), step.ok, step.text, *_from_images(step.images)])
        case Ended():
            last = step.reply
            later = (None if last is None else _from_reply(last), step.asked, step.truncated)
            count = 3 if step.truncated else 0 if last is None and not step.asked else 2
            return ENDED, _dump([_from_spent(step.spent), step.output, step.fingerprint, *later[:count]])
        case CallBegun():
            return CALL_BEGUN, _dump(_from_call(step))
        case CallWithdrawn():
            return CALL_WITHDRAWN, _dump([step.digest, step.nth])
        case Failed(error, text, spent):
            fields = (error.stage, error.type, error.message, error.retryable, error.traceback)
            return FAILED, _dump([fields, text, _from_spent(spent)])
        case Compacted(cut, usage, digest):
            return COMPACTED, _dump([cut.kept_from, cut.note, [*cut.reduced.items()], _from_usage(usage), digest])
        case Restarted(spent):
            return RESTARTED, _dump([_from_spent(spent)])


def since_restart(steps: Sequence[KeptStep]) -> Sequence[KeptStep]:
    """Return the steps of the latest conversation of an agent."""
    return steps[max((place for place, step in enumerate(steps) if step.kind == RESTARTED), default=0) :]


def decode(kind: int, body: bytes) -> Step:
    """Return the step of a record. Raises ValueError for bytes that ``encode`` never writes."""
    record = _load(body)
    if kind == FAILED:
        error, text, spent = _read(record, (list, str, list))
        return Failed(AgentError(*_read(error, ERROR)), text, _to_spent(spent))
    if kind == ENDED:
        spent, *later = _read(record, (list, str | None, str, list | None, str, bool), least=1)
        if len(later) > 2 and later[2] is not None:
            later[2] = _to_reply(later[2])
        return Ended(_to_spent(spent), *later)
    if kind == COMPACTED:
        kept_from, note, reduced, usage, digest = _read(record, (int, str, list, list, str))
        texts = dict(_read(pair, (int, str)) for pair in reduced)
        return Compacted(Cut(kept_from, note, texts), _to_usage(usage), digest)
    if kind == ASKED:
        digest, nth, reply, spent, *later = _read(record, (str, int, list, list, int, list), least=4)
        after, said = later if len(later) == 2 else (*later, OWN, ())[:2]
        return Asked(digest, nth, _to_reply(reply), _to_spent(spent), after, tuple(map(to_message, said)))
    if kind == RESTARTED:
        return Restarted(_to_spent(*_read(record, (list,))))
    if kind == CALL_BEGUN:
        if isinstance(record, list) and len(record) == 1:
            return CallBegun("", *_read(record, (int,)))
        return CallBegun(*_read(record, (str, int, str, str)))
    if kind == CALL_WITHDRAWN:
        return CallWithdrawn(*_read(record, (str, int)))
    if kind == CALL_ENDED:
        if isinstance(record, list) and len(record) <= 4:
            nth, ok, text, *images = _read(record, (int, bool, str, list), least=3)
            return CallEnded("", nth, "", "", ok, text, _to_images(*images))
        digest, nth, name, arguments, ok, text, *images = _read(record, (str, int, str, str, bool, str, list), least=6)
        return CallEnded(digest, nth, name, arguments, ok, text, _to_images(*images))
    raise ValueError(f"a record of kind {kind} was written by a newer version of this package, or is damaged")


def _read(array: object, form: Form, least: int | None = None) -> list[Any]:
    """Return the values of the array after checking their types. ``least`` is how many there are at least, if the
    last ones may be missing."""
    if not isinstance(array, list) or not (len(form) if least is None else least) <= len(array) <= len(form):
        raise ValueError(f"a record has an unexpected form: {str(array)[:100]}")
    for value, kind in zip(array, form, strict=False):
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise ValueError(f"a record has {str(value)[:100]} where another type is expected")
    return array


def _from_reply(reply: Reply) -> list[object]:
    fields: list[object] = [
        reply.text,
        [(call.id, call.name, call.arguments) for call in reply.tool_calls] if reply.tool_calls else (),
        _from_usage(reply.usage),
        reply.reasoning,
        reply.first_token,
        reply.finish_reason,
        None if reply.saved is None else _from_usage(reply.saved),
    ]
    later = reply.sealed is not None, reply.doubts is not None, bool(reply.answered_by)
    if any(later):
        fields.append(None if reply.sealed is None else (reply.sealed.wire, reply.sealed.value))
    if any(later[1:]):
        fields.append(None if reply.doubts is None else dict(reply.doubts))
    if any(later[2:]):
        fields.append(reply.answered_by)
    return fields


def _to_reply(array: object) -> Reply:
    # May be missing: the last fields ``sealed``, ``doubts`` and ``answered_by``, the ``cache_write_tokens`` of a Usage.
    text, calls, usage, reasoning, first_token, finish_reason, saved, *later = _read(array, REPLY, least=7)
    sealed = later[0] if later else None
    return Reply(
        text,
        tuple(ToolCall(*_read(call, CALL)) for call in calls),
        _to_usage(usage),
        reasoning,
        first_token,
        finish_reason,
        None if saved is None else _to_usage(saved),
        None if sealed is None else Sealed(*_read(sealed, SEALED)),
        doubts=None if len(later) < 2 or later[1] is None else _to_doubts(later[1]),
        answered_by=later[2] if len(later) > 2 else "",
    )


def _to_doubts(record: Mapping[str, object]) -> Mapping[str, float | None]:
    if any(isinstance(doubt, bool) or not isinstance(doubt, NUMBER | None) for doubt in record.values()):
        raise ValueError(f"a record has {str(record)[:100]} where doubts are expected")
    return cast("Mapping[str, float | None]", record)


def from_message(message: Message) -> tuple[object, ...]:
    """Return the message as JSON values. Images become their placeholders; data that only one provider's wire can read
    is omitted."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    shown = content_shown(message.content)
    return message.role, shown, calls, message.tool_call_id, message.reasoning, message.tool_name


def to_message(array: object) -> Message:
    role, content, calls, call_id, reasoning, name = _read(array, MESSAGE)
    if role not in ROLES:
        raise ValueError(f"a record has {role[:100]!r} where a role is expected")
    return Message(role, content, tuple(ToolCall(*_read(call, CALL)) for call in calls), call_id, reasoning, name)


def _from_call(step: CallBegun | CallEnded) -> tuple[object, ...]:
    """Return the fields that identify a call. A call of the tool loop is identified by its place in its answer."""
    if step.digest or step.name or step.arguments:
        return step.digest, step.nth, step.name, step.arguments
    return (step.nth,)


def _from_images(images: Sequence[Attachment]) -> list[object]:
    return [[(image.url, image.tokens) for image in images]] if images else []


def _to_images(array: Sequence[object] = ()) -> tuple[Image, ...]:
    pairs = (_read(image, (str, int)) for image in array)
    return tuple(Image(url, tokens=tokens) for url, tokens in pairs)


def _from_usage(usage: Usage) -> tuple[int, ...]:
    counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens
    return (*counts, usage.cache_write_tokens) if usage.cache_write_tokens else counts


def _to_usage(array: object) -> Usage:
    return Usage(*_read(array, USAGE, least=4))


_from_spent = attrgetter("sent", "retries", "queued", "inference", "tool_wait", "total", "cost")


def _to_spent(array: object) -> Used:
    return Used(*_read(array, SPENT))


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # orjson cannot write a lone surrogate or an integer beyond 64 bits; a model or a server can.
        return SLOWLY + json.dumps(value).encode("ascii")


def _load(body: object) -> object:
    if not isinstance(body, bytes):
        raise ValueError(f"a record is {type(body).__name__} where bytes are expected")
    if not body:
        raise ValueError("its checksum is wrong")
    try:
        value: object = json.loads(body) if body.startswith(SLOWLY) else orjson.loads(body)
    except RecursionError:
        raise ValueError("a record is nested too deeply") from None
    return value
