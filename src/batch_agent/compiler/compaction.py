"""Decides which part of a conversation is removed when it outgrows the context, and what replaces it.

A conversation is a task and exchanges: an answer with its reasoning and tool calls, and their results. An exchange
stays or goes as a whole, so every remaining call has its result and every result its call. The oldest go first; the
latest always stays. A note at the end of the task's message describes what was removed, so the text before it is
unchanged, and no two messages of one role become neighbours. Old results that stay may be reduced to head and tail, or
to their shape.

A cut always covers the whole history, and a later cut includes the earlier one. So a conversation changes only where it
is cut, and only grows until the next cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from batch_agent.compiler.tokens import BYTES_PER_TOKEN, content_tokens, estimate_tokens
from batch_agent.messages import Message, ToolCall, content_text
from batch_agent.value_type import value_type

THRESHOLD = 0.85  # of the context: nothing is cut below that
TARGET = 0.5  # target size of a cut, so that the next one is far away
WORTH = 0.1  # of the context: a cut that frees less is not worth the lost cache

KEPT_WHOLE = 2  # the latest exchanges, whose results are reduced only as a last resort
REDUCED_TOKENS = 150  # size of a reduced result
NOTE_TOKENS = 500  # reserved for the note about removed exchanges
CALLS_TOLD = 40  # removed calls that the note lists: the latest
CALL_TOKENS = 30
MESSAGE_TOKENS = 4  # the markers around a message

HEAD = 2 / 3  # of what is left: the start of a text is the most informative
SHOWN_ITEMS = 2
SHOWN_CHARACTERS = 80
DEEPEST = 6

# OpenAI, vLLM and SGLang; llama.cpp; Anthropic.
_CONTEXT = re.compile(
    r"(?:maximum|max) context length (?:is|of) ([\d,]+)|model's context length \(?([\d,]+)"
    r"|available context size \(?([\d,]+)|n_ctx\D{1,8}([\d,]+)|\d (?:tokens )?> ([\d,]+)(?![\d,]| ?-)",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"([\d,]+) (?:input tokens|in the messages|in your prompt|tokens in the messages|prompt tokens)"
    r"|(?:input|prompt|messages)(?: is too long| resulted in| has| length)?:? \(?([\d,]+) tokens"
    r"|input_tokens\D{1,6}([\d,]+)|n_prompt_tokens\D{1,6}([\d,]+)"
    r"|exceed context limit: ([\d,]+) \+",
    re.IGNORECASE,
)


@value_type
class Cut:
    """What remains of a history. Positions count the agent's own messages; the task is the first."""

    kept_from: int = 0  # the first exchange that stays; 0: none is removed
    note: str = ""  # replaces the removed exchanges
    reduced: Mapping[int, str] = field(default_factory=dict)  # results that stay, shortened

    def apply(self, own: Sequence[Message]) -> list[Message]:
        begins = first_exchange(own)
        head = list(own[:begins])
        if self.note:
            content, note = head[-1].content, f"\n\n{self.note}"
            head[-1] = replace(head[-1], content=content + note if isinstance(content, str) else (*content, note))
        rest = range(max(begins, self.kept_from), len(own))
        return [*head, *(self.message(own[place], place) for place in rest)]

    def message(self, message: Message, place: int) -> Message:
        return replace(message, content=self.reduced[place]) if place in self.reduced else message


def first_exchange(own: Sequence[Message]) -> int:
    return next((place for place, message in enumerate(own) if message.role == "assistant"), len(own))


def message_tokens(message: Message) -> int:
    calls = sum(estimate_tokens(call.name) + estimate_tokens(call.arguments) for call in message.tool_calls)
    return MESSAGE_TOKENS + content_tokens(message.content) + calls


def history_tokens(messages: Sequence[Message]) -> int:
    return sum(map(message_tokens, messages))


def plan_cut(own: Sequence[Message], before: Cut, excess: int, *, told: bool) -> Cut:
    """Return a cut after which the history is about ``excess`` tokens shorter than after the cut ``before``. Its note
    is written later. ``told``: a summary of the removed exchanges will be written, so exchanges are removed first.
    Otherwise old results are reduced first."""
    starts = [place for place, message in enumerate(own) if message.role == "assistant"]
    kept = [place for place in starts if place >= before.kept_from]
    if not kept:
        return before
    reduced = dict(before.reduced)
    sizes = {place: message_tokens(before.message(own[place], place)) for place in range(kept[0], len(own))}
    saved = -NOTE_TOKENS if told else 0
    whole_from = kept[-KEPT_WHOLE:][0]
    if not told:
        saved += _reduce(own, range(kept[0], whole_from), REDUCED_TOKENS, sizes, reduced, excess)
    kept_from = before.kept_from
    for start, following in pairwise(kept):
        if saved >= excess:
            break
        saved += sum(sizes[place] for place in range(start, following))
        saved -= 0 if told else CALL_TOKENS * len(own[start].tool_calls)
        kept_from = following
    if saved < excess:
        left = [place for place in sizes if place >= max(kept_from, kept[0]) and own[place].role == "tool"]
        if left:
            limit = (sum(sizes[place] for place in left) - (excess - saved)) // len(left)
            _reduce(own, left, max(limit, REDUCED_TOKENS), sizes, reduced, excess - saved)
    return Cut(kept_from, before.note, {place: text for place, text in reduced.items() if place >= kept_from})


def _reduce(
    own: Sequence[Message],
    places: Sequence[int],
    limit: int,
    sizes: dict[int, int],
    reduced: dict[int, str],
    excess: int,
) -> int:
    """Reduce the results at these places to ``limit`` tokens each, until ``excess`` tokens are saved. Returns the
    number of tokens saved."""
    saved = 0
    for place in places:
        if saved >= excess:
            break
        if own[place].role == "tool" and sizes[place] > limit + limit // 2:
            reduced[place] = shorten(content_text(own[place].content), limit)
            now = message_tokens(replace(own[place], content=reduced[place]))
            saved += sizes[place] - now
            sizes[place] = now
    return saved


def left_out(own: Sequence[Message], cut: Cut) -> Sequence[Message]:
    return own[first_exchange(own) : cut.kept_from]


def note(own: Sequence[Message], cut: Cut, summary: str) -> str:
    """Return the note at the end of the task; "" if nothing was removed. Without a ``summary`` it lists the calls and
    the beginnings of their results."""
    gone = left_out(own, cut)
    if not gone:
        return ""
    steps = sum(message.role == "assistant" for message in gone)
    told = summary.strip() or "\n".join(_calls(gone))
    return f"[The first {steps} steps of your work on this are left out here to save room. What they were:\n{told}]"


def _calls(gone: Sequence[Message]) -> list[str]:
    results = {message.tool_call_id: content_text(message.content) for message in gone if message.role == "tool"}
    lines = [_line(call, results.get(call.id, "")) for message in gone for call in message.tool_calls]
    texts = [
        f"- said: {shorten(content_text(m.content), CALL_TOKENS)}"
        for m in gone
        if m.role == "assistant" and not m.tool_calls
    ]
    more = [f"- {len(lines) - CALLS_TOLD} calls before these"] if len(lines) > CALLS_TOLD else []
    return [*more, *lines[-CALLS_TOLD:], *texts[-CALLS_TOLD:]]


def _line(call: ToolCall, result: str) -> str:
    said = " ".join(shorten(result, CALL_TOKENS // 2).split())
    return f"- {call.name}({shorten(call.arguments, CALL_TOKENS // 2)}): {said}"


def shorten(text: str, most_tokens: int) -> str:
    """Return a text of at most about ``most_tokens`` tokens; a short text is unchanged."""
    if estimate_tokens(text) <= most_tokens:
        return text
    if text.lstrip()[:1] in ("{", "["):
        shape = _shape_of(text)
        if shape is not None and estimate_tokens(shape) <= most_tokens:
            return shape
    return _ends(text, most_tokens)


def _ends(text: str, most_tokens: int) -> str:
    share = len(text) / max(1, estimate_tokens(text) * BYTES_PER_TOKEN)  # characters are not always bytes
    room = int(most_tokens * BYTES_PER_TOKEN * share)
    head = int(room * HEAD)
    tail = room - head
    gone = len(text) - room
    return f"{text[:head]}\n[… {gone:,} characters left out …]\n{text[len(text) - tail :]}"


def _shape_of(text: str) -> str | None:
    """Return JSON text with long lists and texts cut and marked as cut; None if the text is not JSON."""
    try:
        value = from_json(text)
    except ValueError:
        return None
    return f"[only the shape of this] {to_json(_shape(value, 0)).decode()}"


def _shape(value: JsonValue, depth: int) -> JsonValue:
    if isinstance(value, str):
        return value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}… ({len(value):,} characters)"
    if depth >= DEEPEST and isinstance(value, dict | list):
        return f"… ({len(value):,} {'fields' if isinstance(value, dict) else 'items'})"
    if isinstance(value, dict):
        return {name: _shape(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        shown = [_shape(inner, depth + 1) for inner in value[:SHOWN_ITEMS]]
        more = len(value) - SHOWN_ITEMS
        return [*shown, f"… ({more:,} more items)"] if more > 0 else shown
    return value


@dataclass(frozen=True, slots=True)
class Stated:
    """Counts in tokens; None if the server did not state a count."""

    context: int | None = None
    prompt: int | None = None


def stated(message: str) -> Stated:
    return Stated(_number(_CONTEXT, message), _number(_PROMPT, message))


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    if found is None:
        return None
    digits = next(group for group in found.groups() if group is not None).replace(",", "")
    return int(digits) if digits and len(digits) < 10 else None
