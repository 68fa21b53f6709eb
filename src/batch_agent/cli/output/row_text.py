"""The record of one row as text: heading, conversation, outcome."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batch_agent.files.columns import Record
from batch_agent.files.results import to_json
from batch_agent.messages import ToolCall, content_shown
from batch_agent.observe.text import counted, dollars, duration, harmless, harmless_lines
from batch_agent.record.steps import Asked, CallBegun, CallEnded, Past, PastTurn, Spent

CUT_CHARACTERS = 2000  # shown of a text without --full
SHOWN_BYTES = 1_000_000  # of a file that the row kept
INDENT = "    "


@dataclass(frozen=True, slots=True)
class Page:
    """Whether texts are shown in full, and the width of lines; None means that lines are not wrapped."""

    full: bool = False
    width: int | None = None

    def said(self, label: str, text: str) -> str:
        if not self.full and len(text) > CUT_CHARACTERS:
            text = f"{text[:CUT_CHARACTERS]}… ({len(text) - CUT_CHARACTERS:,} more characters, --full shows them)"
        lines = harmless_lines(text).split("\n")
        return "\n".join(["", label, *(f"{INDENT}{part}" for line in lines for part in self._parts(line))])

    def _parts(self, line: str) -> list[str]:
        """Return the line, wrapped between words."""
        if self.width is None or len(line) + len(INDENT) <= self.width:
            return [line]
        room = max(20, self.width - len(INDENT))
        return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row to show. ``record`` is its result line; a running row has none. ``stage`` is "" in a plain run."""

    stage: str
    record: Record | None
    past: Past | None
    prompts: tuple[str, str] | None = None  # system and user, if known
    value: object = None  # the input of a row without a result
    repairs: Mapping[int, str] = field(default_factory=dict)  # messages after a turn whose answer did not validate


def row_text(row: ShownRow, page: Page) -> str:
    record, past = row.record, row.past
    parts = [_heading(record, past, row.stage)]
    value = record.get("input") if record and "input" in record else row.value
    if row.prompts is not None:
        system, user = row.prompts
        parts += [page.said("system", system)] if system else []
        parts += [page.said("user", user)] if user else []
    elif value is not None:
        parts.append(page.said("input", value if isinstance(value, str) else to_json(value).decode()))
    if past is None:
        parts.append(page.said("answers", "not in the journal" if record and "ok" in record else "none yet"))
    elif past.unreadable:
        parts.append(page.said("answers", f"unreadable: {past.unreadable}"))
    else:
        parts += _conversation(past, row.repairs, page)
        parts += _worked(past, page)
    parts += _end(record, past, page)
    return "\n".join(parts)


def _heading(record: Record | None, past: Past | None, stage: str) -> str:
    index, job_id = (record or {}).get("index"), (record or {}).get("job_id")
    name = "a row whose input is unknown" if index is None else f"row {index}"
    if job_id is not None and str(job_id) != str(index):
        name += f" ({harmless(str(job_id))})"
    if stage:
        name = f"{stage}, {name}"
    facts = [_state(record, past)]
    spent = None if past is None else past.spent
    timings = (record or {}).get("timings")
    total = timings.get("total") if isinstance(timings, dict) else spent.total if spent is not None else None
    if isinstance(total, int | float):
        facts.append(duration(total))
    if past is not None:
        turns = len(past.turns) + len(past.asked)
        facts.append(counted(turns, "turn") + (" and one that was cut off" if _cut_off(past) else ""))
        tokens = _tokens(record, past)
        facts.append(f"{tokens[0]:,} tokens in, {tokens[1]:,} out")
    cost = (record or {}).get("cost")
    if isinstance(cost, int | float):
        facts.append(dollars(cost))
    line = f"{name}: {', '.join(facts)}"
    return f"{line}\n{'=' * len(line)}"


def _tokens(record: Record | None, past: Past) -> tuple[int, int]:
    """Return the tokens of prompts and of answers: of the result, with failed attempts, else the sum of the turns."""
    usage = (record or {}).get("usage")
    if isinstance(usage, dict):
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            return prompt, completion
    each = [turn.reply.usage for turn in past.turns] + [ask.reply.usage for ask in past.asked]
    return sum(one.prompt_tokens for one in each), sum(one.completion_tokens for one in each)


def _cut_off(past: Past) -> str:
    """Return the text of an incomplete answer, which is not one of the turns; else ""."""
    text = past.failed.text if past.failed is not None else ""
    answers = [turn.reply.text for turn in past.turns[-1:]] + [ask.reply.text for ask in past.asked]
    return "" if text in answers else text


def _state(record: Record | None, past: Past | None) -> str:
    if record is not None and "ok" in record:
        return "ok" if record["ok"] else "failed"
    return "not done" if past is None or not past.done else "ok"


def _conversation(past: Past, repairs: Mapping[int, str], page: Page) -> Iterator[str]:
    before = Spent()
    for number, turn in enumerate(past.turns, start=1):
        reply = turn.reply
        took = duration(max(0.0, turn.spent.inference - before.inference))
        usage = f"{reply.usage.prompt_tokens:,} in, {reply.usage.completion_tokens:,} out"
        label = f"assistant, turn {number}, {took}, {usage}"
        before = turn.spent
        if reply.reasoning:
            yield page.said("reasoning", reply.reasoning)
        if reply.text or not reply.tool_calls:
            yield page.said(label, reply.text)
            label = ""
        yield from _calls(turn, label, page)
        if number in repairs:
            yield page.said("user, repair", repairs[number])
    if text := _cut_off(past):
        yield page.said("assistant, cut off", text)


def _calls(turn: PastTurn, label: str, page: Page) -> Iterator[str]:
    for place, call in enumerate(turn.reply.tool_calls):
        yield page.said(f"{label}: calls" if label and not place else "calls", _call(call))
        outcome = turn.outcomes.get(place)
        if outcome is not None:
            yield page.said(f"{harmless(call.name)} answers", outcome)
        else:
            yield page.said(f"{harmless(call.name)}", "started" if place in turn.begun else "not started")


def _worked(past: Past, page: Page) -> Iterator[str]:
    """Yield the requests and tool calls of the user's worker, in the order in which they ended."""
    ended = {(step.digest, step.nth) for step in past.worked if isinstance(step, CallEnded)}
    number = 0
    for step in past.worked:
        if isinstance(step, Asked):
            number += 1
            if step.after >= 0:
                yield page.said(f"ask {number}", f"continues ask {step.after + 1}")
            for message in step.said:
                yield page.said(f"ask {number}, {message.role}", content_shown(message.content))
            usage = f"{step.reply.usage.prompt_tokens:,} in, {step.reply.usage.completion_tokens:,} out"
            if step.reply.text or not step.reply.tool_calls:
                yield page.said(f"answer {number}, {usage}", step.reply.text)
            for call in step.reply.tool_calls:
                yield page.said(f"answer {number} calls", _call(call))
        elif isinstance(step, CallEnded):
            yield page.said("the worker calls", _call(ToolCall("", step.name, step.arguments)))
            yield page.said(f"{harmless(step.name)} {'answers' if step.ok else 'fails'}", step.text)
        elif isinstance(step, CallBegun) and (step.digest, step.nth) not in ended:
            yield page.said("the worker calls", _call(ToolCall("", step.name, step.arguments)))
            yield page.said(harmless(step.name), "started; its outcome is unknown")


def _call(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return f"{call.name} {call.arguments}"
    given = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{call.name}({', '.join(given)})"


def _end(record: Record | None, past: Past | None, page: Page) -> Iterator[str]:
    error = (record or {}).get("error")
    failed = past.failed.error if past is not None and past.failed is not None else None
    if isinstance(error, dict):
        yield page.said("failed", f"{error.get('type')}: {error.get('message')}")
        if traceback := error.get("traceback"):
            yield page.said("traceback", str(traceback).rstrip())
    elif failed is not None and not (record or {}).get("ok"):
        yield page.said("failed", str(failed))
        if failed.traceback:
            yield page.said("traceback", failed.traceback.rstrip())
    output = (record or {}).get("output")
    if isinstance(output, str):
        answers = (
            [] if past is None else [turn.reply.text for turn in past.turns] + [ask.reply.text for ask in past.asked]
        )
        if output not in answers:  # the worker, or the agent that it started, wrote it
            yield page.said("output", output)
    elif output is not None:
        yield page.said("output", to_json(output).decode())
    artifacts = (record or {}).get("artifacts")
    for name, path in artifacts.items() if isinstance(artifacts, dict) else ():
        yield from _artifact(harmless(str(name)), Path(str(path)), page)


def _artifact(name: str, path: Path, page: Page) -> Iterator[str]:
    """Yield the text of a file that the row kept: what a command-line agent did, printed and changed."""
    try:
        text = path.read_text() if path.stat().st_size <= SHOWN_BYTES else ""
    except (OSError, UnicodeDecodeError):  # on another machine, moved, or not a text
        text = ""
    yield (
        page.said(f"{name}, {harmless(str(path))}", text.rstrip())
        if text.strip()
        else f"\n{name}, {harmless(str(path))}"
    )
